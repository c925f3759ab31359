"""Files that a command is asked to write, tried before the work for them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer

from oomb.cli.refusal import check_out


def test_a_pipe_is_taken_as_it_is(tmp_path: Path) -> None:
    """As /dev/stdout is into a pipe. Nobody reads yet: opening it would wait for a reader."""
    ends = os.pipe()
    check_out("plan", "--out", Path(f"/proc/self/fd/{ends[1]}"))
    for end in ends:
        os.close(end)
    os.mkfifo(tmp_path / "pipe")
    check_out("plan", "--out", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_is_tried_behind_its_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("deep/file")
    check_out("plan", "--out", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not any((tmp_path / "deep").iterdir())


def test_links_in_a_circle_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(typer.Exit):
        check_out("plan", "--out", tmp_path / "a")
    assert "--out: expected a file to write, got " in capsys.readouterr().err


def test_ranks_try_the_same_file_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        tries = [pool.submit(check_out, "plan", "--out", tmp_path / "file") for _ in range(2000)]
    for one in tries:
        one.result()
    assert not any(tmp_path.iterdir())
