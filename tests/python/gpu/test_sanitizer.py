"""compute-sanitizer finds nothing in the attention kernels and the page operations."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )
    assert found is not None, "compute-sanitizer comes with the CUDA toolkit"
    return found


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
@pytest.mark.parametrize("which", ["sm90", "sm80", "plain", "pages"])
def test_sanitizer_finds_nothing(which: str, tool: str) -> None:
    if which == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    script = Path(__file__).with_name("attention_under_sanitizer.py")
    command = [sanitizer(), "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run(
        [*command, which],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"CUDA_MODULE_LOADING": "LAZY"},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert f"{which}: all played" in done.stdout
