"""setuptools' build backend, with build requirements that follow OOMB_CUDA (PEP 517 hooks)."""

import os

import toolkit
from setuptools.build_meta import *  # noqa: F403  (the hooks that need no change)

# One 13.x minor for all of them: nvcc and its headers must match.
NVCC_PACKAGES = [
    f"{name}==13.0.*"
    for name in (
        "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-crt",
        "nvidia-cuda-cccl", "nvidia-nvvm",
    )
]  # fmt: skip
CUTLASS_PACKAGE = "nvidia-cutlass==4.2.0.0"


def cuda_requirements() -> list[str]:
    mode = os.environ.get("OOMB_CUDA", "auto")
    found = toolkit.nvcc_on_machine()
    if mode == "off" or (mode == "auto" and not found):
        return []
    requirements = [] if found else list(NVCC_PACKAGES)
    if toolkit.needs_cutlass() and "CUTLASS_HOME" not in os.environ:
        requirements.append(CUTLASS_PACKAGE)
    return requirements


def get_requires_for_build_wheel(config_settings=None):  # noqa: ANN001, ANN201
    return cuda_requirements()


def get_requires_for_build_editable(config_settings=None):  # noqa: ANN001, ANN201
    return cuda_requirements()
