"""States whose tensors lie in rows on several ranks: each writes and reads its own, with torch's
distributed checkpoints over safetensors."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from oomb.checkpoint.manifest import CheckpointError
from oomb.checkpoint.state_tree import packed, pieces, unpacked
from oomb.checkpoint.store import ByFirst

_dcp: Any = checkpoint
_FILES = "shard-*.safetensors"  # torch's names


def expect_rows() -> None:
    """Raise unless this torch writes and reads such files.

    Raises:
        CheckpointError: it is too old.
    """
    writer = getattr(_dcp, "HuggingFaceStorageWriter", None)
    if writer is None or "save_distributed" not in inspect.signature(writer).parameters:
        raise CheckpointError(
            "torch: expected one whose HuggingFaceStorageWriter knows save_distributed, for "
            f"optimizer states that lie on several ranks, got {torch.__version__}"
        )


def has_rows(folder: Path) -> bool:
    """Whether a folder was written by :func:`save_rows`."""
    return any(folder.glob(_FILES))


def save_rows(
    folder: Path, name: str, state: Any, *, by_first: ByFirst, file_bytes: int = 1 << 29
) -> None:
    """As :func:`save_state`, called by all ranks: each writes its rows of a DTensor.

    Tensors lie in ``shard-<rank>-…safetensors`` under their places in the state, such as
    ``optimizer.state.<parameter>.exp_avg``, and what all have is written once.

    Args:
        folder: the same on all ranks; it is there and holds nothing else.
        by_first: as of :meth:`CheckpointStore.save`.
        file_bytes: of tensors in one file: host memory that writing takes, about twice over.

    Raises:
        CheckpointError: on all ranks: one could not write, or this torch is too old.
    """
    expect_rows()
    tensors: dict[str, torch.Tensor] = {}
    tree = packed(state, name, tensors)
    by_first(lambda: (folder / f"{name}.json").write_text(json.dumps(tree)))
    own = {key: x.to_local() if isinstance(x, DTensor) else x for key, x in tensors.items()}
    files = enumerate(pieces(own, file_bytes), start=1)
    file_of = {key: number for number, keys in files for key in keys}
    writer = _dcp.HuggingFaceStorageWriter(str(folder), file_of, save_distributed=True)
    try:
        _dcp.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # is no Exception
        raise CheckpointError(_said(error)) from error


def load_rows(folder: Path, name: str, parameters: Mapping[str, torch.Tensor]) -> Any:
    """What :func:`save_rows`, or :func:`save_state`, wrote, with this rank's rows alone.

    Args:
        parameters: by the place of their states, such as ``optimizer.state.<parameter>``: a state
            of the shape of a DTensor becomes one of the same rows. Others are whole, on the CPU.

    Raises:
        CheckpointError: files do not have all of a tensor, or this torch is too old.
    """
    expect_rows()
    reader = _dcp.HuggingFaceStorageReader(str(folder))
    tensors: dict[str, torch.Tensor] = {}
    for key, saved in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(f"{name}."):
            like = parameters.get(key.rpartition(".")[0])
            if isinstance(like, DTensor) and like.shape == saved.size:
                tensors[key] = torch.empty_like(like.detach(), dtype=saved.properties.dtype)
            else:
                tensors[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # Each rank finds its rows by itself, so that none waits for another.
            _dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(_said(error)) from error
    return unpacked(json.loads((folder / f"{name}.json").read_text()), tensors)


def _said(error: CheckpointException) -> str:
    """Each rank's own error; torch's text is a traceback of each."""
    return "; ".join(f"[rank {rank}] {failure[0]}" for rank, failure in error.failures.items())
