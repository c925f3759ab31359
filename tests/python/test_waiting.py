"""How torch's threads wait once oomb is imported: what OpenMP's runtime says of itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def spins(script: str, **environment: str) -> int:
    """Turns that a waiting thread spins before it sleeps, of a fresh process that loads torch."""
    inherited = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | {"OMP_DISPLAY_ENV": "verbose"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"GOMP_SPINCOUNT = '(\d+|INFINITY)'", done.stderr)
    if found is None:
        pytest.skip("this torch's OpenMP runtime is not GNU's, which tells how long it spins")
    return sys.maxsize if found[1] == "INFINITY" else int(found[1])


@pytest.mark.parametrize("first", ["import oomb", "from oomb.cli import app"])
def test_threads_sleep_where_oomb_comes_before_torch(first: str) -> None:
    assert spins(f"{first}\nimport torch") == 0


def test_a_choice_of_the_user_stays() -> None:
    assert spins("import oomb, torch", OMP_WAIT_POLICY="active") > 10_000
    assert spins("import oomb, torch", GOMP_SPINCOUNT="12345") == 12345


def test_nothing_changes_where_torch_is_loaded() -> None:
    unset = "import os, torch, oomb; assert 'OMP_WAIT_POLICY' not in os.environ"
    assert spins(unset) > 10_000
