"""setuptools' build backend, with build requirements that follow OOMB_CUDA (PEP 517 hooks)."""

import os

import toolkit
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no change)


def cuda_requirements() -> list[str]:
    mode = os.environ.get("OOMB_CUDA", "auto")
    if mode != "on" or toolkit.nvcc_on_machine():
        return []
    lines = (toolkit.ROOT / "requirements-cuda.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def get_requires_for_build_wheel(config_settings=None):
    return cuda_requirements()


def get_requires_for_build_editable(config_settings=None):
    return cuda_requirements()
