"""Fetches GoogleTest's sources into a folder, for machines that have no GoogleTest installed.

PyPI carries no GoogleTest, so the ways are: a pinned tag from its git repository, and, where that
cannot be reached, Debian's source package through apt (neither needs root).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = "https://github.com/google/googletest"
TAG = "v1.17.0"
SECONDS = 120


def run(*command: str, cwd: Path | None = None) -> bool:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, timeout=SECONDS, capture_output=True, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def from_git(work: Path) -> Path | None:
    clone = work / "clone"
    options = ("-c", "advice.detachedHead=false", "clone", "--quiet", "--depth=1")
    found = run("git", *options, f"--branch={TAG}", REPOSITORY, str(clone))
    return clone if found else None


def from_debian(work: Path) -> Path | None:
    lists = work / "lists"
    (lists / "partial").mkdir(parents=True)
    apt = ("apt-get", "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={work}")
    if not run(*apt, "update") or not run(*apt, "download", "googletest", cwd=work):
        return None
    for package in work.glob("googletest_*.deb"):
        if run("dpkg-deb", "-x", str(package), str(work / "unpacked")):
            return work / "unpacked/usr/src/googletest"
    return None


def main(target: Path) -> int:
    if (target / "googletest/src/gtest-all.cc").exists():
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for fetch in (from_git, from_debian):
            work = Path(folder) / fetch.__name__
            work.mkdir()
            if source := fetch(work):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(source, target)
                return 0
    print(
        "no GoogleTest on this machine, and neither its git repository nor a Debian mirror can be "
        "reached; install it (Debian, Ubuntu: libgtest-dev) and try again",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
