"""setuptools' build backend, with build requirements that follow OOMB_CUDA (PEP 517 hooks)."""

import os

import toolkit
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no change)

CUTLASS_PACKAGE = "nvidia-cutlass==4.2.0.0"


def cuda_requirements() -> list[str]:
    mode = os.environ.get("OOMB_CUDA", "auto")
    found = toolkit.nvcc_on_machine()
    if mode == "off" or (mode == "auto" and not found):
        return []
    lines = (toolkit.ROOT / "requirements-cuda.txt").read_text().splitlines()
    requirements = [] if found else [line for line in lines if line and not line.startswith("#")]
    if toolkit.needs_cutlass() and "CUTLASS_HOME" not in os.environ:
        requirements.append(CUTLASS_PACKAGE)
    return requirements


def get_requires_for_build_wheel(config_settings=None):
    return cuda_requirements()


def get_requires_for_build_editable(config_settings=None):
    return cuda_requirements()
