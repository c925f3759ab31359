"""The command line without an installed script."""

from __future__ import annotations

import subprocess
import sys


def test_python_m_oomb() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oomb", "plan", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: oomb plan" in done.stdout
