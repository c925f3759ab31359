"""A long text is tokenised in little memory, and one sees how far it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("text_memory.py")
MEGABYTES = 40  # of one document, 40 million tokens; docs/train.md has the figures of 200


@pytest.mark.slow
def test_memory_does_not_follow_the_text(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(MEGABYTES), "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == found["bytes"] == MEGABYTES * 10**6
    assert found["peak_bytes"] < 2 * 10**9
    assert "Tokenising" in done.stderr and "%" in done.stderr
