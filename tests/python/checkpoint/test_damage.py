"""Whatever happens to a file of a checkpoint, it is noticed, and the one before is used."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from oomb.checkpoint import CheckpointStore

from .folders import contents, write_example


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, write_example, identity={"model": "A"})
    return store


def assert_rejected(store: CheckpointStore, name: str) -> None:
    """Step 2 is rejected for a reason that names the file; step 1 is used."""
    found = store.newest_intact({"model": "A"})
    assert found is not None and found.step == 1, name
    ((path, reason),) = found.rejected
    assert path == store.path_of(2)
    assert name in reason, (name, reason)


def files(store: CheckpointStore) -> list[Path]:
    folder = store.path_of(2)
    return [folder / name for name in contents(folder)]


def test_500_flipped_bits(store: CheckpointStore) -> None:
    """Each file in turn, so that the small ones (manifest, marker) are hit as often."""
    draw = random.Random(0)
    for _, path in zip(range(500), itertools.cycle(files(store)), strict=False):
        own = path.read_bytes()
        place = draw.randrange(8 * len(own))
        damaged = bytearray(own)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert_rejected(store, path.name)
        path.write_bytes(own)
    intact = store.newest_intact({"model": "A"})
    assert intact is not None and intact.step == 2


def test_50_truncations(store: CheckpointStore) -> None:
    draw = random.Random(1)
    for _, path in zip(range(50), itertools.cycle(files(store)), strict=False):
        own = path.read_bytes()
        path.write_bytes(own[: draw.choice([0, len(own) - 1, draw.randrange(len(own))])])
        assert_rejected(store, path.name)
        path.write_bytes(own)


def test_50_zeroed_blocks(store: CheckpointStore) -> None:
    """As a lost sector leaves them; at least one byte was not zero."""
    draw = random.Random(2)
    for _, path in zip(range(50), itertools.cycle(files(store)), strict=False):
        own = path.read_bytes()
        size = min(512, len(own))
        begin = draw.randrange(len(own) - size + 1)
        damaged = own[:begin] + bytes(size) + own[begin + size :]
        assert damaged != own
        path.write_bytes(damaged)
        assert_rejected(store, path.name)
        path.write_bytes(own)


def test_two_files_swapped(store: CheckpointStore) -> None:
    for one, other in itertools.combinations(files(store), 2):
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        found = store.newest_intact({"model": "A"})
        assert found is not None and found.step == 1, (one.name, other.name)
        one.write_bytes(first)
        other.write_bytes(second)


def test_files_of_another_step(store: CheckpointStore, tmp_path: Path) -> None:
    """Both are intact files, only not of one checkpoint."""

    def write(folder: Path) -> None:
        write_example(folder)
        (folder / "config.json").write_text("{}")

    other = CheckpointStore(tmp_path / "other").save(2, write, identity={"model": "A"})
    (store.path_of(2) / "config.json").write_bytes((other / "config.json").read_bytes())
    assert_rejected(store, "config.json")


def test_missing_and_added_files(store: CheckpointStore) -> None:
    for path in files(store):
        own = path.read_bytes()
        path.unlink()
        assert_rejected(store, path.name)
        path.write_bytes(own)
    added = store.path_of(2) / "adapter_model.safetensors"
    added.write_bytes(b"\0" * 16)
    assert_rejected(store, "adapter_model.safetensors: is not in the manifest")


def test_a_manifest_of_another_format(store: CheckpointStore) -> None:
    """Sealed anew, as a later version would write it."""
    import hashlib

    folder = store.path_of(2)
    manifest = folder / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    seal = hashlib.sha256(manifest.read_bytes()).hexdigest()
    (folder / "COMPLETE").write_text(f"{seal}\n")
    assert_rejected(store, "format: expected 1, got 2")


def test_all_damaged(store: CheckpointStore) -> None:
    for step in (1, 2):
        (store.path_of(step) / "config.json").write_text("")
    assert store.newest_intact() is None
    assert [path.name for path, _ in store.rejected] == ["step-00000002", "step-00000001"]
