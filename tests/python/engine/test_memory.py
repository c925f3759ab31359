"""Memory of a step does not grow with the text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "memory_of_a_step.py"
# Big blocks go back to the system when they are freed, so that the peak is that of live tensors and
# not of the allocator's fragments, which differ by 15 MB from run to run.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
}


def rest_of_peak(tokens: int, attention: str, backward: str) -> tuple[int, int]:
    """Peak bytes of a fresh process less weights, gradient buffers and pools; and the pools'."""
    measured = measure(tokens, attention, backward)
    parts = ("weights", "gradients", "pools")
    return measured["peak"] - sum(measured[part] for part in parts), measured["pools"]


def measure(tokens: int, attention: str, backward: str, *call: str) -> dict[str, int]:
    """Bytes of a fresh process."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tokens), attention, backward, *call],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


def check(attention: str, backward: str) -> None:
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(rest_of_peak, n, attention, backward) for n in (16384, 65536)]
    (short, short_pools), (long, long_pools) = (run.result() for run in runs)
    assert long_pools > 3.5 * short_pools  # the part that does grow, and may
    assert abs(long - short) < 0.01 * short


def test_peak_at_16k_and_64k_tokens() -> None:
    """The demo's model; page-sparse, and three chunks swept, to be quick."""
    check("sparse", "three")


@pytest.mark.slow
@pytest.mark.release
def test_peak_at_16k_and_64k_tokens_of_exact_training() -> None:
    check("dense", "all")


def test_two_passes_take_what_a_step_takes() -> None:
    """With a bonus of entropy, whose gradient needs more of a slice than that of the plain loss."""
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(measure, 16384, "sparse", "three")
        two = pool.submit(measure, 16384, "sparse", "three", "two_pass")
    assert two.result()["peak"] < 1.03 * plain.result()["peak"]
