"""What a run's checkpoints say of its training, besides tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oomb.checkpoint import CheckpointError, CheckpointStore
from oomb.hf.step_layout import StepLayout

CHECKPOINTS = "checkpoints"  # below output_dir
TRAINING = "training"  # file with schedule, random generators, engine


def layout_of_newest(output_dir: Path, now: StepLayout) -> StepLayout:
    """How steps were divided before a run's newest checkpoint; ``now`` where it does not say."""
    store = CheckpointStore(output_dir / CHECKPOINTS)
    try:
        state = training_state(store.path_of(store.steps()[-1]))
    except (IndexError, CheckpointError):  # there is none; or it is damaged, which resuming says
        return now
    return now.before(state)


def training_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of its training besides tensors.

    Raises:
        CheckpointError: it holds the model only, or is damaged.
    """
    state: dict[str, Any] = json.loads(CheckpointStore.read_file(checkpoint, f"{TRAINING}.json"))
    return state
