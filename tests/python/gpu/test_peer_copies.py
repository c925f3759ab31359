"""Ranks of one host write messages into each other's memory: two, three and four processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROGRAM = Path(__file__).with_name("peer_copies_on_gpus.py")
LONGEST_SECONDS = 120


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_arrive_and_nobody_waits_for_ever(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", str(PROGRAM)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("nobody_waits_for_ever") == ranks
