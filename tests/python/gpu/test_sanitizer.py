"""compute-sanitizer finds nothing in the attention kernels and the page operations."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("attention_under_sanitizer.py")


def watched(tool: str, which: str) -> subprocess.CompletedProcess[str]:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    assert sanitizer is not None, "compute-sanitizer comes with the CUDA toolkit"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":  # else the memory behind a tensor may be the next one's
        command += ["--padding", "65536"]
    return subprocess.run(
        [*command, sys.executable, str(SCRIPT), which],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# Hopper's kernels meet at mbarriers, by instructions of their own. racecheck follows no wait for
# one: every pair it reports is a note or a tile that is written before the arrival and read after
# the wait. synccheck calls an arrival by threads that need not wait a missing wait.
@pytest.mark.parametrize(
    ("which", "tool"),
    [
        (which, tool)
        for which in ("sm90", "sm80", "sm80-small", "plain", "pages")
        for tool in ("memcheck", "initcheck", "racecheck", "synccheck")
        if which != "sm90" or tool in ("memcheck", "initcheck")
    ],
)
def test_sanitizer_finds_nothing(which: str, tool: str) -> None:
    if which == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    done = watched(tool, which)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert f"{which}: all played" in done.stdout


def test_sanitizer_sees_a_read_behind_the_pool() -> None:
    done = watched("memcheck", "beyond")
    assert done.returncode == 9, done.stdout[-8000:] + done.stderr[-8000:]
    assert "Invalid __global__ read" in done.stdout
