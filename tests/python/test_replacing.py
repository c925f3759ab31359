"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomb.replacing import replace_file


def test_a_file_and_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["b.txt"]


def test_a_link_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    replace_file(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_real_limit_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"short")
    script = (
        "import resource; from pathlib import Path; from oomb.replacing import replace_file; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); "
        f"replace_file(Path({str(path)!r}), bytes(5000))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert path.read_bytes() == b"short"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()], ids=["full", "stopped"])
def test_nothing_is_left_of_an_attempt(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"before")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(type(error)):
        replace_file(path, b"after")
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["file"]
