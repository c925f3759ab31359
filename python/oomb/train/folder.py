"""The folder of a run: new, or one to go on with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from oomb.checkpoint import CheckpointError
from oomb.errors import Error
from oomb.hf.saved_training import layout_of_newest
from oomb.hf.step_layout import StepLayout
from oomb.plan import Prediction, write_plan
from oomb.replacing import replace_file
from oomb.train.arguments import sharing_ranks
from oomb.train.errors import BadInput
from oomb.train.reading import read_settings, write_settings
from oomb.train.settings import RunSettings

SETTINGS_FILE = "run.yaml"
DATA_FILE = "data.sha256"
MODEL_FOLDER = "model"

# Where these change, the checkpoint is another run's, or its place in the data means nothing.
_FIXED = (
    "task",
    "trl",
    "rewards",
    "model.name",
    "model.revision",
    "model.tokenizer",
    "model.dtype",
    "model.rope",
    "model.max_position_embeddings",
    "lora",
    "data.train",
    "data.eval_fraction",
    "data.format",
    "data.kind",
    "data.text_field",
    "data.messages_field",
    "data.prompt_field",
    "data.completion_field",
    "data.images",
    "data.chat_template",
    "data.arrange",
    "data.simulated_context",
    "data.add_bos",
    "data.add_eos",
    "context",
    "training.seed",
    "optimizer.name",
)


def check_folder(settings: RunSettings, resume: bool) -> None:
    """Refuse to mix two runs in one folder. Writes nothing.

    Raises:
        BadInput: the folder cannot be made, holds something and ``resume`` is False, or holds a run
            whose fixed settings differ, or whose steps took another number of sequences.
    """
    folder = Path(settings.output_dir)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"output_dir: expected a folder, got the file {folder}")
    parent = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(parent, os.W_OK):
        raise BadInput(f"output_dir: expected a folder that can be written, got {folder}")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not resume:
        raise BadInput(
            f"output_dir: expected a new or empty folder, got {folder}, which is not empty; "
            "--resume goes on with the run in it"
        )
    if not (folder / SETTINGS_FILE).exists():
        raise BadInput(
            f"output_dir: expected a run to resume, got {folder} without {SETTINGS_FILE}"
        )
    before = read_settings(folder / SETTINGS_FILE)
    # Without skipped positions their pieces mean nothing.
    skips = settings.data.simulated_context is not None
    for field in (*_FIXED, "data.simulated_pieces") if skips else _FIXED:
        old, new = _value(before, field), _value(settings, field)
        if old != new:
            raise BadInput(f"{field}: expected {old!r}, as the run began, got {new!r}")
    _check_sequences_of_step(settings, folder)


def _check_sequences_of_step(settings: RunSettings, folder: Path) -> None:
    training, sharing = settings.training, sharing_ranks(settings)
    now = StepLayout(
        batch_size=training.batch_size,
        accumulation_steps=training.accumulation_steps,
        groups=1 if sharing is None else sharing.dp_shard_size,
    )
    try:
        now.expect_as_many(layout_of_newest(folder, now), "training.accumulation_steps")
    except CheckpointError as error:
        raise BadInput(str(error)) from error


def check_data(settings: RunSettings, identity: str) -> None:
    """Refuse to go on in other data: a checkpoint's place in it would mean nothing.

    Raises:
        BadInput: the run in the folder began with sequences of another identity.
    """
    file = Path(settings.output_dir) / DATA_FILE
    if file.exists() and file.read_text().strip() != identity:
        raise BadInput(
            "data.train: expected the text and tokenizer that the run began with, got others"
        )


def begin(settings: RunSettings, identity: str, prediction: Prediction) -> None:
    """Make the folder and write settings, the identity of the data and the plan into it.

    Raises:
        oomb.Error: one cannot be written; files that were there are as they were, or new.
    """
    folder = Path(settings.output_dir)
    try:
        write_settings(settings, folder / SETTINGS_FILE)
        replace_file(folder / DATA_FILE, f"{identity}\n".encode())
        write_plan(folder, prediction)
    except OSError as error:
        raise Error(
            f"output_dir: expected a folder that takes files, got {folder}: {error.strerror}; its "
            "checkpoints are as they were"
        ) from error


def _value(settings: RunSettings, field: str) -> Any:
    value: Any = settings
    for name in field.split("."):
        value = getattr(value, name)
    return value
