"""Finds what a CUDA build needs, for CMake (command line) and for the build backend (import).

Standard library only: it runs in pip's isolated build environment before anything is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

GB = 1 << 30
BYTES_PER_CUDA_JOB = 5 * GB
ROOT = Path(__file__).resolve().parent.parent


def nvcc_on_machine() -> str:
    """An installed toolkit's compiler: $CUDACXX, then PATH, then the usual places."""
    for candidate in (
        os.environ.get("CUDACXX"),
        shutil.which("nvcc"),
        *(
            f"{os.environ[name]}/bin/nvcc"
            for name in ("CUDA_HOME", "CUDA_PATH")
            if name in os.environ
        ),
        "/usr/local/cuda/bin/nvcc",
    ):
        if candidate and (path := shutil.which(candidate)):
            return str(Path(path).resolve())
    return ""


def package_folders(name: str) -> list[Path]:
    """Where an installed package lies; it is never imported."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []


def nvcc_from_packages() -> str:
    """The compiler of NVIDIA's PyPI packages, which unpack to nvidia/cu13 in site-packages."""
    for folder in package_folders("nvidia"):
        for path in sorted(folder.glob("cu*/bin/nvcc")):
            return str(path)
    return ""


def nvcc(mode: str) -> str:
    return nvcc_on_machine() or (nvcc_from_packages() if mode == "on" else "")


def library_dir(nvcc_path: str) -> str:
    """Where libcudart_static.a is if nvcc would not look there: the packages have no lib64."""
    root = Path(nvcc_path).parent.parent
    return str(root / "lib") if (root / "lib" / "libcudart_static.a").exists() else ""


def pybind11_include() -> str:
    """The package pybind11, else the copy inside torch: enough where there is no network."""
    folders = [
        folder / "include" for name in ("pybind11", "torch") for folder in package_folders(name)
    ]
    header = "pybind11/pybind11.h"
    return next((str(folder) for folder in folders if (folder / header).exists()), "")


def available_bytes() -> int:
    """Memory that a build may use: the smaller of the machine's and its control group's."""
    meminfo = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(match[1]) * 1024 if match else 8 * GB
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def jobs() -> int:
    cores = os.cpu_count() or 1
    return max(1, min(cores, available_bytes() // BYTES_PER_CUDA_JOB))


if __name__ == "__main__":
    commands = {
        "nvcc": nvcc,
        "library_dir": library_dir,
        "pybind11_include": pybind11_include,
        "jobs": jobs,
    }
    print(commands[sys.argv[1]](*sys.argv[2:]))
