"""A folder of checkpoints, of which the newest intact one is always found."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomb.checkpoint.durable import folders_below, sync
from oomb.checkpoint.manifest import (
    MARKER,
    CheckpointError,
    read_verified,
    read_verified_file,
    write_manifest,
    write_marker,
)

_STEP = r"step-(\d{8,})"
_UNFINISHED = ".unfinished-"  # being written, or being deleted: never a checkpoint
_BEFORE = f"{_UNFINISHED}before-"

Rejected = list[tuple[Path, str]]
ByFirst = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every bit was verified.

    Attributes:
        step: optimizer steps done.
        path: its folder.
        identity: what :meth:`CheckpointStore.save` was given.
        num_bytes: of its files.
        rejected: newer ones that must not be loaded, each with the reason.
    """

    step: int
    path: Path
    identity: dict[str, str]
    num_bytes: int
    rejected: tuple[tuple[Path, str], ...] = ()


class CheckpointStore:
    """Saves checkpoints as ``step-00000123`` below a folder; one process writes at a time.

    Args:
        folder: made at the first save.
        keep_last: complete checkpoints to keep; None: all.
    """

    def __init__(self, folder: str | Path, *, keep_last: int | None = None) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last: expected None or an int >= 1, got {keep_last}")
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.rejected: Rejected = []

    def path_of(self, step: int) -> Path:
        """Folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        identity: Mapping[str, str] | None = None,
        keep: Collection[Path] = (),
        by_first: ByFirst = lambda work: work(),
    ) -> Path:
        """Save what ``write`` puts into the folder it is given; all of it or nothing.

        The files are written to a temporary folder, put on the disk, hashed into a manifest and
        renamed into place; a marker comes last. A crash at any moment leaves the checkpoints before
        as they were; one of the same step is found until the new one is complete.

        Args:
            step: optimizer steps done.
            identity: of the model: what a load must match, see :func:`model_identity`.
            keep: checkpoints that must not be deleted for ``keep_last``.
            by_first: where several ranks save together: has its argument called by one of them and
                returns its result, or raises its error, on all; every rank calls ``write``.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: writing failed (a full disk, a pickle); nothing is left of it.
        """
        final = self.path_of(step)
        temporary = self.folder / f"{_UNFINISHED}{final.name}"
        begun = False

        def begin() -> None:
            nonlocal begun
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clean()
            begun = True
            temporary.mkdir()

        try:
            by_first(begin)
            write(temporary)
            by_first(lambda: self._finish(temporary, final, step, identity or {}))
        except BaseException as error:
            if begun:
                shutil.rmtree(temporary, ignore_errors=True)
            if begun and final.exists() and not (final / MARKER).exists():
                shutil.rmtree(final, ignore_errors=True)
            if isinstance(error, (OSError, CheckpointError)) or _is_disk_error(error):
                raise CheckpointError(
                    f"the checkpoint of step {step} was not saved in {self.folder}: {error}; "
                    "those before it are as they were"
                ) from error
            raise
        by_first(lambda: self._prune({final, *keep}))
        return final

    def _finish(self, temporary: Path, final: Path, step: int, identity: Mapping[str, str]) -> None:
        """What was written becomes the checkpoint."""
        write_manifest(temporary, step, identity)
        for folder in folders_below(temporary):
            sync(folder)
        before = self.folder / f"{_BEFORE}{final.name}"
        if final.exists():  # the same step, saved again
            final.rename(before)
        try:
            temporary.rename(final)
            sync(self.folder)
            write_marker(final)
            sync(final)
        except BaseException:
            if before.exists():
                shutil.rmtree(final, ignore_errors=True)
            self._put_back()
            raise
        shutil.rmtree(before, ignore_errors=True)

    def _put_back(self) -> None:
        """A checkpoint whose step was not saved again to the end is what it was."""
        for step, before in self._replaced():
            final = self.path_of(step)
            if not (final / MARKER).exists():
                shutil.rmtree(final, ignore_errors=True)
                before.rename(final)

    def newest_intact(self, expected: Mapping[str, str] | None = None) -> Checkpoint | None:
        """The checkpoint with most steps whose every file is as it was saved; None: there is none.

        Those passed over stand in ``rejected``, of the result and of the store.

        Args:
            expected: identity that the checkpoint must have.
        """
        self.rejected = []
        for _, path in sorted([*self._steps(), *self._replaced()], reverse=True):
            try:
                checkpoint = self.verified(path, expected)
            except CheckpointError as error:
                self.rejected.append((path, str(error)))
            else:
                return Checkpoint(**{**vars(checkpoint), "rejected": tuple(self.rejected)})
        return None

    @staticmethod
    def verified(path: str | Path, expected: Mapping[str, str] | None = None) -> Checkpoint:
        """Read and hash every file of one checkpoint.

        Raises:
            CheckpointError: it must not be loaded; the message is the reason.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError("is not a folder")
        try:
            step, identity, num_bytes = read_verified(path, expected)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot be read: {error!r}") from error
        return Checkpoint(step=step, path=path, identity=identity, num_bytes=num_bytes)

    @staticmethod
    def read_file(path: str | Path, name: str) -> bytes:
        """One file of a checkpoint, as it was saved; the others are not looked at.

        Raises:
            CheckpointError: it is not there, or not as it was saved.
        """
        try:
            return read_verified_file(Path(path), name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot be read: {error!r}") from error

    def steps(self) -> list[int]:
        """Steps whose checkpoint was saved to the end, intact or not since; ascending."""
        complete = [x for x in self._steps() if (x[1] / MARKER).exists()]
        return sorted({step for step, _ in [*complete, *self._replaced()]})

    def _steps(self, before: str = "") -> list[tuple[int, Path]]:
        """Folders whose name is a step's behind some text, with their steps."""
        if not self.folder.is_dir():
            return []
        names = re.compile(re.escape(before) + _STEP)
        found = ((names.fullmatch(path.name), path) for path in self.folder.iterdir())
        return [(int(match[1]), path) for match, path in found if match]

    def _replaced(self) -> list[tuple[int, Path]]:
        """Complete checkpoints that a process moved away to save their step again, and left so."""
        return [x for x in self._steps(_BEFORE) if (x[1] / MARKER).exists()]

    def _prune(self, keep: Collection[Path]) -> None:
        if self.keep_last is None:
            return
        newest_first = sorted(self._steps(), reverse=True)
        complete = [path for _, path in newest_first if (path / MARKER).exists()]
        kept = {*complete[: self.keep_last], *keep}
        oldest_kept = min(step for step, path in newest_first if path in kept)
        for step, path in newest_first:
            # An incomplete one newer than those kept may be what a reader wants to look into.
            if path not in kept and ((path / MARKER).exists() or step < oldest_kept):
                try:
                    self._discard(path)
                except OSError as error:  # what was just saved is safe
                    warnings.warn(f"{path} was not deleted: {error}", stacklevel=2)

    def _discard(self, path: Path) -> None:
        """Delete in such an order that what is half deleted is no checkpoint."""
        hidden = self.folder / f"{_UNFINISHED}deleted-{path.name}"
        os.rename(path, hidden)
        sync(self.folder)
        shutil.rmtree(hidden, ignore_errors=True)

    def _clean(self) -> None:
        """Remove what a killed process left."""
        self._put_back()
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


def _is_disk_error(error: BaseException) -> bool:
    """safetensors wraps the system's error in its own."""
    return type(error).__name__ == "SafetensorError"
