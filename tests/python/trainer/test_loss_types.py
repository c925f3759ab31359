"""Every loss type that TRL's trainers of pairs and policies have, stock and through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl

import oomb
import oomb.hf

from .runs import prompts
from .test_two_pass import (
    DPO_LOSSES,
    GENERATION,
    compare,
    plain_log_softmax,  # noqa: F401  # a fixture
    preferences,
    reward,
    same_completions,  # noqa: F401  # a fixture
    settings,
)

# Those that test_two_pass.py does not train with one by one.
OTHER_DPO_LOSSES = [
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_down",
    "discopop",
    "sft",
]


def test_these_are_all_of_them(tmp_path: Path) -> None:
    """TRL names its losses where it is given another."""
    args = trl.DPOConfig(**settings(tmp_path), loss_type=["none of them"], max_length=64)
    with pytest.raises(ValueError, match="Unknown loss type") as refused:
        compare(trl.DPOTrainer, oomb.hf.DPOTrainer, lambda: args, preferences(), True)
    for name in (*DPO_LOSSES, *OTHER_DPO_LOSSES):
        assert f"'{name}'" in str(refused.value)
    assert str(refused.value).count("'") == 2 * len(DPO_LOSSES + OTHER_DPO_LOSSES)


@pytest.mark.slow
def test_dpo(tmp_path: Path) -> None:
    """All others at once, each with a weight of its own."""

    def args() -> Any:
        return trl.DPOConfig(
            **settings(tmp_path, per_device_train_batch_size=2),
            loss_type=OTHER_DPO_LOSSES,
            loss_weights=[0.3 + 0.1 * i for i in range(len(OTHER_DPO_LOSSES))],
            label_smoothing=0.1,
            max_length=64,
        )

    compare(trl.DPOTrainer, oomb.hf.DPOTrainer, args, preferences(), adapted=True)


GRPO: dict[str, dict[str, Any]] = {
    "luspo": {"importance_sampling_level": "sequence"},
    "cispo": {"epsilon_high": 1.5},
    "sapo": {},
    "vespo": {},
}


@pytest.mark.slow
@pytest.mark.usefixtures("same_completions")
@pytest.mark.parametrize("loss_type", GRPO)
@pytest.mark.sampled(2)
def test_grpo(loss_type: str, tmp_path: Path) -> None:
    def args() -> Any:
        given = {**GENERATION, **GRPO[loss_type], "loss_type": loss_type}
        return trl.GRPOConfig(**settings(tmp_path, **given))

    data = prompts(2).select_columns(["prompt"])
    compare(trl.GRPOTrainer, oomb.hf.GRPOTrainer, args, data, adapted=False, reward_funcs=reward)
