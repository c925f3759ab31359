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
SOURCES = Path(__file__).resolve().parent.parent / "csrc"


def nvcc_on_machine() -> str:
    """An installed toolkit's compiler: $CUDACXX, then PATH, then the usual places."""
    for candidate in (
        os.environ.get("CUDACXX"),
        shutil.which("nvcc"),
        *(f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ),
        "/usr/local/cuda/bin/nvcc",
    ):
        if candidate and (path := shutil.which(candidate)):
            return str(Path(path).resolve())
    return ""


def nvcc_from_packages() -> str:
    """The compiler of NVIDIA's PyPI packages, which unpack to nvidia/cu13 in site-packages."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc")):
            return str(nvcc)
    return ""


def nvcc(mode: str) -> str:
    return nvcc_on_machine() or (nvcc_from_packages() if mode == "on" else "")


def library_dir(nvcc_path: str) -> str:
    """Where libcudart_static.a is when nvcc itself would not look: the packages use lib, not lib64."""
    root = Path(nvcc_path).parent.parent
    return str(root / "lib") if (root / "lib" / "libcudart_static.a").exists() else ""


def needs_cutlass() -> bool:
    """Whether any kernel includes a CUTLASS or CuTe header."""
    pattern = re.compile(r'^\s*#include\s*[<"](?:cute|cutlass)/', re.MULTILINE)
    return any(
        pattern.search(path.read_text())
        for path in SOURCES.rglob("*")
        if path.suffix in {".cu", ".cuh", ".h"}
    )


def cutlass_include() -> str:
    """$CUTLASS_HOME, then the PyPI package (located, never imported: importing runs a generator)."""
    if home := os.environ.get("CUTLASS_HOME"):
        return str(Path(home) / "include")
    spec = importlib.util.find_spec("cutlass_library")
    if spec and spec.submodule_search_locations:
        return str(Path(spec.submodule_search_locations[0]) / "source" / "include")
    return ""


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
        "needs_cutlass": lambda: "ON" if needs_cutlass() else "OFF",
        "cutlass_include": cutlass_include,
        "jobs": jobs,
    }
    print(commands[sys.argv[1]](*sys.argv[2:]))
