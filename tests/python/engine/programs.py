"""Runs a program of its own, for what happens when an interpreter ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# transformers imports torchao where it is installed, which warns of kernels for GPUs.
_WITHOUT_TORCHAO_S_WARNINGS = """
import logging
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
"""


def run_program(text: str, seconds: float = 120) -> tuple[int, str]:
    """Exit code and what was written to stderr; a negative code is a signal's."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCHAO_S_WARNINGS + text],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return done.returncode, done.stderr
