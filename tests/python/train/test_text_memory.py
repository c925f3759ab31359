"""A long text is tokenised in little memory, and one sees how far it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("text_memory.py")
MEGABYTES = 2, 20  # of one document; docs/train.md has the figures of 200


@pytest.mark.slow
@pytest.mark.release
def test_memory_does_not_follow_the_text(tmp_path: Path) -> None:
    peaks = []
    for megabytes in MEGABYTES:
        folder = tmp_path / str(megabytes)
        folder.mkdir()
        command = [sys.executable, str(SCRIPT), str(folder), str(megabytes), "2"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["tokens"] == found["bytes"] == megabytes * 10**6
        assert "Tokenising" in done.stderr and "100%" in done.stderr
        peaks.append(found["peak_bytes"])
    assert peaks[-1] < 2 * 10**9
    # The tokens of the longer text, as int64, would not have fitted into what it took more.
    assert peaks[1] - peaks[0] < 8 * 10**6 * (MEGABYTES[1] - MEGABYTES[0])
