"""Saving is all or nothing, and the newest intact checkpoint is found."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oomb.checkpoint import CheckpointError, CheckpointStore

from .folders import contents, write_example


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_a_saved_checkpoint_is_found(store: CheckpointStore) -> None:
    assert store.newest_intact() is None
    path = store.save(7, write_example, identity={"model": "A"})
    assert path == store.folder / "step-00000007"
    found = store.newest_intact({"model": "A"})
    assert found is not None
    assert (found.step, found.path, found.identity) == (7, path, {"model": "A"})
    assert found.rejected == ()
    written = {name: data for name, data in contents(path).items() if name[0].islower()}
    assert found.num_bytes == sum(map(len, written.values()))
    assert set(contents(path)) == {*written, "MANIFEST.json", "COMPLETE"}
    assert [p.name for p in store.folder.iterdir()] == [path.name]


def test_the_newest_comes_first(store: CheckpointStore) -> None:
    for step in (3, 20, 100_000_001, 9):
        store.save(step, write_example)
    assert store.steps() == [3, 9, 20, 100_000_001]
    found = store.newest_intact()
    assert found is not None and found.step == 100_000_001


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    best = store.path_of(2)
    for step in range(1, 7):
        store.save(step, write_example, keep=[best] if step >= 2 else [])
    assert store.steps() == [2, 5, 6]
    assert len(list(tmp_path.iterdir())) == 3


def test_keep_last_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^keep_last: expected None or an int >= 1, got 0"):
        CheckpointStore(tmp_path, keep_last=0)


def test_a_checkpoint_of_another_model(store: CheckpointStore) -> None:
    store.save(1, write_example, identity={"model": "A", "parameters": "7"})
    store.save(2, write_example, identity={"model": "B", "parameters": "7"})
    found = store.newest_intact({"model": "A", "parameters": "7"})
    assert found is not None and found.step == 1
    reason = "is of another model: model: expected A, got B"
    assert found.rejected == ((store.path_of(2), reason),)
    assert store.newest_intact({"model": "C"}) is None
    assert len(store.rejected) == 2


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(4, write_example)
    store.save(4, lambda folder: (folder / "only").write_text("this") and None)
    assert store.newest_intact() is not None
    assert set(contents(store.path_of(4))) == {"only", "MANIFEST.json", "COMPLETE"}


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), KeyError("a bug")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "place", ["mkdir", "write", "sync", "write_manifest", "rename", "write_marker"]
)
@pytest.mark.parametrize("step", [1, 2], ids=["again", "new"])
def test_a_failure_leaves_what_was_before(
    step: int,
    error: BaseException,
    place: str,
    store: CheckpointStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.save(1, write_example)
    before = contents(store.folder)
    failing = False

    def fail(*_: object, **__: object) -> None:
        if failing:
            raise error

    def write(folder: Path) -> None:
        nonlocal failing
        write_example(folder)
        failing = True
        if place == "write":
            fail()

    with monkeypatch.context() as patch:
        if place in ("mkdir", "rename"):
            failing = place == "mkdir"
            own = getattr(Path, place)
            patch.setattr(
                Path,
                place,
                lambda path, *rest, **named: (
                    fail() if ".unfinished-step" in path.name else None,
                    own(path, *rest, **named),
                )[1],
            )
        elif place != "write":
            patch.setattr(f"oomb.checkpoint.store.{place}", fail)
        expected = CheckpointError if isinstance(error, OSError) else type(error)
        with pytest.raises(expected) as caught:
            store.save(step, write)
    if isinstance(error, OSError):
        assert f"the checkpoint of step {step} was not saved" in str(caught.value)
        assert "No space left on device" in str(caught.value)
    assert contents(store.folder) == before
    store.save(2, write_example)
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("place", ["write_manifest", "rename", "sync", "write_marker", "rmtree"])
def test_a_kill_while_a_step_is_saved_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)

    def write(folder: Path) -> None:
        (folder / "other").write_text("of the second time")

    store.save(5, write)
    again = contents(store.path_of(5))
    store.save(5, write_example)
    before = contents(store.path_of(5))

    def killed() -> None:
        renamed = 0

        def rename(path: Path, target: Path) -> None:
            nonlocal renamed
            renamed += 1
            os._exit(9) if renamed == 2 else os.rename(path, target)

        def die(path: Path, *_: object, **__: object) -> None:
            if place != "rmtree" or "before" in path.name:
                os._exit(9)

        if place == "rename":  # the old one is away, the new one not yet there
            monkeypatch.setattr(Path, place, rename)
        else:
            owner = "shutil." if place == "rmtree" else "oomb.checkpoint.store."
            monkeypatch.setattr(owner + place, die)
        store.save(5, write)

    child = os.fork()
    if child == 0:
        try:
            killed()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    found = store.newest_intact()
    assert found is not None and found.step == 5
    expected = again if place == "rmtree" else before
    assert contents(found.path) == expected
    assert store.steps() == [5]
    store.save(6, lambda _: None, keep=[store.path_of(5)])
    assert contents(store.path_of(5)) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


def test_a_full_disk(tmp_path: Path) -> None:
    """A real limit of the system, reached in the middle of a file of weights."""
    script = f"""
import resource, signal, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from oomb.checkpoint import CheckpointStore
store = CheckpointStore({str(tmp_path)!r})
store.save(1, lambda folder: save_file({{"a": torch.ones(10_000)}}, folder / "a.safetensors"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.save(2, lambda folder: save_file({{"a": torch.ones(50_000)}}, folder / "a.safetensors"))
except Exception as error:
    print(type(error).__name__, error)
found = store.newest_intact()
print(found.step, found.rejected, sorted(p.name for p in store.folder.iterdir()))
"""
    assert resource.RLIMIT_FSIZE
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failure, found = done.stdout.splitlines()
    assert failure.startswith("CheckpointError the checkpoint of step 2 was not saved")
    assert found == "1 () ['step-00000001']"


def pickled(folder: Path) -> None:
    torch.save({"a": 1}, folder / "optimizer.pt")


def pickled_under_another_name(folder: Path) -> None:
    torch.save({"a": 1}, folder / "state.json")


def plainly_pickled(folder: Path) -> None:
    import pickle

    (folder / "state.json").write_bytes(pickle.dumps({"a": 1}))


def linked(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("/etc/hostname")


@pytest.mark.parametrize("write", [pickled, pickled_under_another_name, plainly_pickled, linked])
def test_pickles_and_links_are_refused(
    write: Callable[[Path], None], store: CheckpointStore
) -> None:
    store.save(1, write_example)
    with pytest.raises(CheckpointError, match=r"step 2 was not saved .*is a (pickle|link)"):
        store.save(2, write)
    assert store.steps() == [1]
    # and where somebody put one later
    path = store.save(3, write_example)
    (path / "optimizer.json").unlink(missing_ok=True)
    (path / "state.json").unlink(missing_ok=True)
    if write is linked:
        (path / "model.safetensors").unlink()
    write(path)
    found = store.newest_intact()
    assert found is not None and found.step == 1
    assert "is a " in found.rejected[0][1]


@pytest.mark.parametrize("start", [b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"], ids=str)
def test_a_length_that_begins_as_a_pickle_does(start: bytes, store: CheckpointStore) -> None:
    """Of a header of 640, 896, 1,152 or 1,408 bytes."""
    length = int.from_bytes(start, "little")

    def write(folder: Path) -> None:
        file = folder / "model.safetensors"
        for padding in range(length):
            save_file({"w": torch.ones(2)}, file, {"a": "x" * padding})
            if file.read_bytes()[:2] == start:
                return
        raise AssertionError("no header of that length")

    path = store.save(1, write)
    assert torch.equal(load_file(path / "model.safetensors")["w"], torch.ones(2))


def test_a_checkpoint_is_saved_though_an_old_one_stays(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    few = CheckpointStore(store.folder, keep_last=1)
    few.save(1, write_example)
    monkeypatch.setattr(few, "_discard", refuse)
    with pytest.warns(UserWarning, match="step-00000001 was not deleted: .*Input/output"):
        few.save(2, write_example)
    assert few.steps() == [1, 2]


def test_what_a_killed_process_left_is_removed(store: CheckpointStore) -> None:
    store.save(1, write_example)
    left = store.folder / ".unfinished-step-00000002"
    left.mkdir()
    write_example(left)
    unmarked = store.save(2, write_example)
    (unmarked / "COMPLETE").unlink()
    found = store.newest_intact()
    assert found is not None and found.step == 1
    assert found.rejected == ((unmarked, "has no COMPLETE: saving it did not finish"),)
    assert store.steps() == [1]
    store.save(3, write_example)
    assert not left.exists()
    assert unmarked.exists()  # until its turn comes
    CheckpointStore(store.folder, keep_last=1).save(4, write_example)
    assert [path.name for path in store.folder.iterdir()] == ["step-00000004"]


def test_other_files_in_the_folder_are_left_alone(store: CheckpointStore) -> None:
    store.folder.mkdir()
    (store.folder / "notes.txt").write_text("mine")
    (store.folder / "step-of-mine").mkdir()
    CheckpointStore(store.folder, keep_last=1).save(1, write_example)
    CheckpointStore(store.folder, keep_last=1).save(2, write_example)
    names = {path.name for path in store.folder.iterdir()}
    assert names == {"notes.txt", "step-of-mine", "step-00000002"}


def test_everything_is_on_the_disk_before_the_marker(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, then the folders that hold their names, then the rename, then the marker."""
    synced: list[str] = []
    own = os.fsync

    def fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(target.relative_to(store.folder.parent).as_posix())
        own(descriptor)

    def write(folder: Path) -> None:
        (folder / "inner").mkdir()
        save_file({"a": torch.ones(3)}, folder / "inner" / "a.safetensors")
        (folder / "b.json").write_text("{}")

    monkeypatch.setattr(os, "fsync", fsync)
    store.save(1, write)
    hidden, final = "checkpoints/.unfinished-step-00000001", "checkpoints/step-00000001"
    assert synced == [
        f"{hidden}/b.json",
        f"{hidden}/inner/a.safetensors",
        f"{hidden}/MANIFEST.json",
        f"{hidden}/inner",
        hidden,
        "checkpoints",
        f"{final}/COMPLETE",
        final,
    ]
