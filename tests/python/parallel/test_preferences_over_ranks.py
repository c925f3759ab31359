"""TRL's preference trainers in four processes that share each sequence, against the stock ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from accelerate.parallelism_config import ParallelismConfig

import oomb.hf
from engine.reference import EXACT
from trainer.runs import CONFIG, prompts
from trainer.two_pass_runs import classifier, judged, preferences, reward, settings, trained
from trainer.two_pass_runs import plain_log_softmax as plain_log_softmax

from .world import World, as_started

RANKS = 4

# Trainer; its arguments; its data; how it is made.
CASES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "dpo": ("DPO", {"ld_alpha": 0.5, "max_length": 64}, preferences, {"with_reference": True}),
    "dpo, adapter": ("DPO", {"loss_type": ["ipo"], "max_length": 64}, preferences, {}),
    "kto": ("KTO", {"max_length": 64}, judged, {"with_reference": True}),
    "reward": (
        "Reward",
        {"center_rewards_coefficient": 0.1, "max_length": 64},
        preferences,
        {"make_model": classifier},
    ),
}


def run(rank: int, name: str, folder: Path) -> Any:
    """Gradients of two steps and what was logged; ``rank`` -1: of the stock trainer."""
    kind, own, data, others = CASES[name]
    others = dict(others)
    adapted = not others.get("with_reference", False)
    if rank >= 0:
        others["oomb_config"] = CONFIG
    with as_started(rank, RANKS):
        size = {"per_device_train_batch_size": 2, **own}
        args = getattr(trl, f"{kind}Config")(**settings(folder, **size))
        trainer = getattr(trl if rank < 0 else oomb.hf, f"{kind}Trainer")
        return trained(trainer, adapted, args, data(), **others)


SLOW = {"dpo, adapter", "kto", "reward"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_as_the_stock_trainer_in_one_process(world: World, tmp_path: Path, name: str) -> None:
    world.start(run, name, tmp_path / "ranks")
    expected, log = run(-1, name, tmp_path / "stock")
    for found, own in world.answers():
        assert len(found) == len(expected) == 2
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert set(mine) == set(theirs)
            largest = max(float(grad.norm()) for grad in theirs.values())
            assert largest > 1e-4
            for key, grad in theirs.items():
                error = float((mine[key] - grad).norm())
                scale = max(float(grad.norm()), 1e-3 * largest)
                assert error <= EXACT * (1 + 9 * step) * scale, key
        for mine, theirs in zip(own, log, strict=True):
            assert set(theirs) <= set(mine)
            for key, value in theirs.items():
                if not key.endswith(("runtime", "per_second", "time")):
                    assert mine[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


def refused(rank: int, folder: Path, kind: str, own: dict[str, Any]) -> str:
    """What a trainer says."""
    with as_started(rank, RANKS):
        own = dict(own)
        layout = {"cp_size": RANKS} if own else {"dp_shard_size": 2, "cp_size": 2}
        given: dict[str, Any] = {"parallelism_config": ParallelismConfig(**layout)}
        others: dict[str, Any] = {"shard_weights": True} if own.pop("shards", False) else {}
        if kind == "GRPO":  # TRL's own arguments refuse a cp_size
            given, others = {}, {"reward_funcs": reward}
        args = getattr(trl, f"{kind}Config")(**settings(folder), **own, **given)
        data = preferences() if kind == "DPO" else prompts(2).select_columns(["prompt"])
        with pytest.raises(ValueError) as found:
            trained(
                getattr(oomb.hf, f"{kind}Trainer"), True, args, data, oomb_config=CONFIG, **others
            )
    return str(found.value)


@pytest.mark.parametrize(
    ("kind", "own", "text"),
    [
        ("DPO", {}, "cp_size: expected all processes to share each sequence, got 2 groups"),
        ("DPO", {"precompute_ref_log_probs": True}, "log_probs: expected False in 4 processes"),
        ("DPO", {"shards": True}, "shard_weights: expected False and a whole model"),
        ("GRPO", {}, "world_size: expected 1, got 4: a trainer that generates"),
    ],
)
def test_what_is_refused(
    world: World, tmp_path: Path, kind: str, own: dict[str, Any], text: str
) -> None:
    assert all(text in found for found in world.run(refused, tmp_path, kind, own))
