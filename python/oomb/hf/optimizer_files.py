"""The optimizer's part of a checkpoint: whole, or each rank's rows where weights are sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from oomb.checkpoint import CheckpointError, load_state, save_state
from oomb.checkpoint.rows import has_rows, load_rows, save_rows
from oomb.hf.saved_training import TRAINING
from oomb.parallel.job import Job
from oomb.parallel.whole import is_sharded

_OPTIMIZER = "optimizer"  # a folder, and the state's place in its files


class OptimizerFiles:
    """Writes and reads an optimizer's state; its keys are those of torch's
    ``get_optimizer_state_dict``: names of parameters where the optimizer itself has numbers.

    Every rank makes one and calls it.
    """

    def __init__(self, optimizer: Any, model: nn.Module, job: Job) -> None:
        self._optimizer = optimizer
        self._job = job
        self._is_sharded = is_sharded(model)
        named = {parameter: name for name, parameter in model.named_parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = trained
        self._names = [named.get(p, str(number)) for number, p in enumerate(trained)]

    def save(self, checkpoint: Path) -> None:
        """Write ``optimizer/`` in a checkpoint's folder.

        Raises:
            CheckpointError: a rank cannot write there.
        """
        folder, job = checkpoint / _OPTIMIZER, self._job
        job.by_first(folder.mkdir)
        state = self._by_name(self._optimizer.state_dict())
        if not self._is_sharded:
            job.by_first(lambda: save_state(folder, _OPTIMIZER, state))
            return
        job.together(lambda: _expect_seen(folder))
        save_rows(folder, _OPTIMIZER, state, by_first=job.by_first)

    def load(self, checkpoint: Path, *, copy: bool) -> dict[str, Any]:
        """What this rank's optimizer loads, whatever number of ranks wrote it.

        Args:
            copy: as of :func:`load_state`.
        """
        return self._job.together(lambda: self._read(checkpoint, copy))

    def _read(self, checkpoint: Path, copy: bool) -> dict[str, Any]:
        folder, name, place, keys = checkpoint / _OPTIMIZER, _OPTIMIZER, _OPTIMIZER, self._names
        is_old = not folder.is_dir()
        if is_old:  # before there was this folder: among the rest, by numbers
            folder, name, place = checkpoint, TRAINING, f"{TRAINING}.{_OPTIMIZER}"
            keys = [str(number) for number in range(len(keys))]
        state: Any
        if self._is_sharded or has_rows(folder):
            places = (f"{place}.state.{key}" for key in keys)
            state = load_rows(folder, name, dict(zip(places, self._parameters, strict=True)))
        else:
            state = load_state(folder, name, copy=copy)
        found: dict[str, Any] = state[_OPTIMIZER] if is_old else state
        return found

    def _by_name(self, state: dict[str, Any]) -> dict[str, Any]:
        """Loading needs no numbers again: it goes by the order in groups."""
        if not {"state", "param_groups"} <= state.keys():  # an optimizer's own, which nobody cuts
            return state
        names: dict[Any, str] = dict(enumerate(self._names))
        groups = [
            {**group, "params": [names.get(key, key) for key in group["params"]]}
            for group in state["param_groups"]
        ]
        values = {names.get(key, key): value for key, value in state["state"].items()}
        return {**state, "state": values, "param_groups": groups}


def _expect_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"output_dir: expected a folder that all ranks share, as each writes its rows of the "
            f"optimizer's state, got {folder}, which is not on every host"
        )
