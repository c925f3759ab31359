"""What a checkpoint's folder must hold: a hash per file, and a marker that saving finished.

    step-00000123/
        model.safetensors, config.json, ...     whatever the trainer wrote
        MANIFEST.json                           size and sha256 of each of them, and whose they are
        COMPLETE                                sha256 of MANIFEST.json; written last

So every bit of a checkpoint is covered: of a file by the manifest, of the manifest by the marker,
and of the marker by the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oomb.checkpoint.durable import files_below, sync, write_durably
from oomb.errors import Error

MANIFEST = "MANIFEST.json"
MARKER = "COMPLETE"
_FORMAT = 1
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class CheckpointError(Error):
    """A checkpoint that cannot be saved, or must not be loaded; the message says why."""


def write_manifest(folder: Path, step: int, identity: Mapping[str, str]) -> None:
    """Put every file of a folder on the disk, and its hash into the manifest.

    Raises:
        CheckpointError: one of them is a pickle or a link.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in files_below(folder):
        name = path.relative_to(folder).as_posix()
        _refuse_pickle(name, path)
        sync(path)
        files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format": _FORMAT, "step": step, "identity": dict(identity), "files": files}
    write_durably(folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")


def write_marker(folder: Path) -> None:
    """Declare a folder complete."""
    write_durably(folder / MARKER, _seal(folder / MANIFEST))


def read_verified(
    folder: Path, expected: Mapping[str, str] | None
) -> tuple[int, dict[str, str], int]:
    """Check a checkpoint and return its step, its identity and its bytes.

    Raises:
        CheckpointError: the reason why it must not be loaded.
    """
    present = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    for name, path in present.items():
        _refuse_pickle(name, path)
    manifest = _read_manifest(folder)
    files: dict[str, dict[str, Any]] = manifest["files"]
    identity: dict[str, str] = manifest["identity"]
    for field, value in (expected or {}).items():
        if identity.get(field) != value:
            raise CheckpointError(
                f"is of another model: {field}: expected {value}, got {identity.get(field)}"
            )
    for name in present:
        if name not in files and name not in (MANIFEST, MARKER):
            raise CheckpointError(f"{name}: is not in the manifest")
    for name, entry in files.items():
        if name not in present:
            raise CheckpointError(f"{name}: is missing")
        size = present[name].stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{name}: expected {entry['bytes']} bytes, got {size}")
    for name, entry in files.items():
        if _sha256(present[name]) != entry["sha256"]:
            raise CheckpointError(f"{name}: its contents changed (sha256 differs)")
    return manifest["step"], identity, sum(entry["bytes"] for entry in files.values())


def read_verified_file(folder: Path, name: str) -> bytes:
    """One file of a complete checkpoint.

    Raises:
        CheckpointError: the reason why it must not be used.
    """
    entry = _read_manifest(folder)["files"][name]
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise CheckpointError(f"{name}: its contents changed (sha256 differs)")
    return content


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"has no {MANIFEST}: it is no checkpoint, or a damaged one")
    if not (folder / MARKER).is_file():
        raise CheckpointError(f"has no {MARKER}: saving it did not finish")
    if (folder / MARKER).read_bytes() != _seal(folder / MANIFEST):
        raise CheckpointError(f"{MANIFEST} or {MARKER}: its contents changed (sha256 differs)")
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"format: expected {_FORMAT}, got {manifest.get('format')}")
    return manifest


def _seal(manifest: Path) -> bytes:
    return _sha256(manifest).encode() + b"\n"


def _sha256(path: Path) -> str:
    # hashlib.file_digest needs Python 3.11
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _refuse_pickle(name: str, path: Path) -> None:
    """Loading a pickle runs the code in it. torch.save writes one, plain or in a zip archive."""
    if path.is_symlink():
        raise CheckpointError(f"{name}: is a link; a checkpoint holds its own files")
    if path.suffix in _PICKLE_SUFFIXES:
        raise CheckpointError(f"{name}: is a pickle, which may run code when loaded")
    with open(path, "rb") as file:
        start = file.read(9)
    # A length may begin as a pickle does.
    if path.suffix == ".safetensors" and _is_safetensors(start, path.stat().st_size):
        return
    # Protocols 2 to 5 begin with an opcode that no text begins with.
    if (
        start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
        or start[:4] == b"PK\x03\x04"
    ):
        raise CheckpointError(f"{name}: is a pickle, which may run code when loaded")


def _is_safetensors(start: bytes, num_bytes: int) -> bool:
    """The length of a header that fits the file, and the brace that it begins with."""
    length = int.from_bytes(start[:8], "little")
    return start[8:9] == b"{" and 8 + length <= num_bytes
