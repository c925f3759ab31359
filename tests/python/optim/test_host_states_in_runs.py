"""Trainers and ``oomb train`` with the optimizer's states on the host: same bits, also resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.runs import StopsAfter
from oomb.hf import Trainer
from oomb.optim import HostStates
from trainer.runs import CONFIG, arguments, logged, model, packed


@pytest.fixture(autouse=True)
def _eager() -> Any:
    """torchao compiles its steps; their arithmetic is the same without."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _trainer(folder: Path, states: str, optimizer: str, **settings: Any) -> Trainer:
    callbacks = settings.pop("callbacks", [])
    torch.manual_seed(0)
    return Trainer(
        model(),
        arguments(
            folder,
            max_steps=4,
            optim=optimizer,
            gradient_accumulation_steps=2,
            save_strategy="steps",
            save_steps=1,
            lr_scheduler_type="cosine",
            **settings,
        ),
        train_dataset=packed(),
        oomb_config=CONFIG,
        optimizer_states=states,
        callbacks=callbacks,
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw_torch",
        "adamw_torch_8bit",
        pytest.param("adamw_bnb_8bit", marks=pytest.mark.slow),
        pytest.param("adafactor", marks=pytest.mark.slow),
        pytest.param("adamw_torch_4bit", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_same_bits_and_resumed(optimizer: str, tmp_path: Path) -> None:
    whole = _trainer(tmp_path / "device", "device", optimizer)
    whole.train()
    broken = _trainer(tmp_path / "host", "host", optimizer, callbacks=[StopsAfter(2)])
    broken.train()
    resumed = _trainer(tmp_path / "host", "host", optimizer)
    resumed.train(resume_from_checkpoint=True)
    assert isinstance(resumed.optimizer.optimizer, HostStates)
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert logged(resumed, "grad_norm") == logged(whole, "grad_norm")
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.grad is None
    # A checkpoint says nothing of where states are.
    on_device = _trainer(tmp_path / "on", "device", optimizer)
    step = broken.checkpoint_store().path_of(2)
    on_device.train(resume_from_checkpoint=str(step))
    for mine, theirs in zip(on_device.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="optimizer_states: expected 'device' or 'host', got 'x'"):
        _trainer(tmp_path, "x", "adamw_torch")
