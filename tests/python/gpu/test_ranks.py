"""Two GPUs that share sequences: the results of one, twice the same bits, one failure for both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROGRAM = Path(__file__).with_name("ranks_on_gpus.py")
LONGEST_SECONDS = 300


def test_two_gpus_share_sequences() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(PROGRAM)],
        env={**os.environ, "NCCL_NVLS_ENABLE": "0"},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert "WRONG" not in done.stdout
