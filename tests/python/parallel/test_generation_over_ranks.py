"""TRL's generating trainers in four processes that share each completion, against stock ones."""

from __future__ import annotations

import os
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import trl
from accelerate import PartialState
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor
from trl.trainer import grpo_trainer

import oomb.hf
from engine.reference import EXACT, relative_error
from oomb.parallel.whole import is_sharded
from trainer.runs import CONFIG, prompts, tokenizer
from trainer.two_pass_runs import Gradients, model, reference, settings
from trainer.two_pass_runs import plain_log_softmax as plain_log_softmax

from .world import World, as_started

RANKS = 4
# Two prompts of unlike length in a batch, two batches of a generation, each used twice.
GENERATION: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 9,
    "temperature": 0.9,
    "num_iterations": 2,
    "learning_rate": 0.3,
    "log_completions": True,
}
# Trainer; its arguments. Without an adapter there is a reference.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": (
        "GRPO",
        {
            "loss_type": "dapo",
            "beta": 0.04,
            "top_entropy_quantile": 0.5,
            "ds3_gather_for_generation": False,  # layers of zero3 one by one
        },
    ),
    "grpo, whole": ("GRPO", {"beta": 0.04, "learning_rate": 1e-2}),
    "rloo": ("RLOO", {"beta": 0.05, "normalize_advantages": True}),
}


class Found(NamedTuple):
    """What a process saw of a run."""

    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    log: list[dict[str, float]]
    table: dict[str, Any]
    generations: int


def judge(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    """Draws, gathers and notes, as a judge behind a network may; only one process may ask it."""
    assert os.environ.get("RANK", "0") == "0"
    own = [float(index * index % 7) + random.random() for index in range(len(completions))]
    log_metric("judged", sum(own))
    log_extra("drawn", own)
    assert PartialState().is_main_process
    return gather_object(own)  # type: ignore[no-any-return]


def run(rank: int, name: str, folder: Path, policy: str = "") -> Found:
    """Two steps and an evaluation; ``rank`` -1: of the stock trainer.

    Sampling and shuffling draw as seeded at their beginning: the engine draws a number of its own.
    Where processes share whole weights by a ``policy``, those but the first begin without any.
    """
    kind, own = CASES[name]
    stock = getattr(trl, f"{kind}Trainer")
    generate, calculate = stock._generate, stock._calculate_rewards
    generations: list[int] = []

    def generated(self: Any, *args: Any) -> Any:
        generations.append(self._step)
        torch.manual_seed(self._step)
        return generate(self, *args)

    def judged(self: Any, *args: Any) -> Any:
        random.seed(self._step)
        rewards = calculate(self, *args)
        torch.manual_seed(self._step)
        return rewards

    with as_started(rank, RANKS), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "_generate", generated)
        patch.setattr(stock, "_calculate_rewards", judged)
        patch.setattr(grpo_trainer, "create_model_from_path", lambda *_, **__: reference())
        others: dict[str, Any] = {"oomb_config": CONFIG} if rank >= 0 else {}
        trained = model("whole" not in name)
        if policy and rank >= 0:
            others = {"oomb_config": replace(CONFIG, sharded_weights=policy), "shard_weights": True}
            if rank > 0 and "whole" in name:  # TRL copies an adapter
                trained = trained.to("meta")
        data = prompts(6).select_columns(["prompt"])
        seen = Gradients()
        trainer = (stock if rank < 0 else getattr(oomb.hf, f"{kind}Trainer"))(
            model=trained,
            reward_funcs=judge,
            args=getattr(trl, f"{kind}Config")(**settings(folder, **{**GENERATION, **own})),
            train_dataset=data,
            eval_dataset=data.select(range(2)),
            processing_class=tokenizer(),
            callbacks=[seen],
            **others,
        )
        trainer.train()
        trainer.evaluate()
        table = {
            "prompt": list(trainer._logs["prompt"]),
            "completion": list(trainer._logs["completion"]),
            "advantages": list(trainer._logs["advantages"]),
            "drawn": list(trainer._logs["extra"]["drawn"]),
        }
        assert is_sharded(trainer.model) == bool(policy and rank >= 0)
        weights = whole({name: x.detach() for name, x in trainer.model.named_parameters()})
        gradients = [whole(step) for step in seen.steps]
    return Found(gradients, weights, trainer.state.log_history, table, len(generations))


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: x.full_tensor() if isinstance(x, DTensor) else x.clone()
        for name, x in tensors.items()
    }


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("grpo", ""),
        ("grpo, whole", "zero3"),
        pytest.param("grpo", "zero3", marks=pytest.mark.slow),
        pytest.param("grpo, whole", "zero2", marks=pytest.mark.slow),
        pytest.param("rloo", "zero1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_as_the_stock_trainer_in_one_process(
    world: World, tmp_path: Path, name: str, policy: str
) -> None:
    world.start(run, name, tmp_path / "ranks", policy)
    expected = run(-1, name, tmp_path / "stock")
    answers = world.answers()
    assert [found.generations for found in answers] == [expected.generations, 0, 0, 0]
    for found in answers:
        own, table = dict(found.table), dict(expected.table)
        advantages = own.pop("advantages"), table.pop("advantages")
        assert own == table
        assert advantages[0] == pytest.approx(advantages[1], rel=EXACT)
        assert len(found.gradients) == len(expected.gradients) == 2
        for step, (mine, theirs) in enumerate(
            zip(found.gradients, expected.gradients, strict=True)
        ):
            assert set(mine) == set(theirs)
            largest = max(float(grad.norm()) for grad in theirs.values())
            assert largest > 1e-4
            for key, grad in theirs.items():
                scale = max(float(grad.norm()), 1e-3 * largest)
                error = float((mine[key] - grad).norm())
                assert error <= EXACT * (1 + 9 * step) * scale, key
        for key, weight in expected.weights.items():
            assert relative_error(found.weights[key], weight) < EXACT
        assert any("eval_reward" in line for line in expected.log)
        for mine_, theirs_ in zip(found.log, expected.log, strict=True):
            assert set(theirs_) <= set(mine_)
            for key, value in theirs_.items():
                if "reward" in key or "judged" in key or "completions/" in key:
                    assert mine_[key] == value, key
                elif not key.endswith(("runtime", "per_second", "time")):
                    assert mine_[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


def made(rank: int, folder: Path, batch: int) -> tuple[list[str], int]:
    """Warnings of a trainer, and how many completions it generates at a time."""
    with as_started(rank, RANKS), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        own = {**GENERATION, "per_device_train_batch_size": batch, "steps_per_generation": 1}
        trainer = oomb.hf.GRPOTrainer(
            model=model(True),
            reward_funcs=judge,
            args=trl.GRPOConfig(**settings(folder, **own)),
            train_dataset=prompts(6).select_columns(["prompt"]),
            processing_class=tokenizer(),
            oomb_config=CONFIG,
        )
    said = [str(one.message) for one in found if "generation_batch_size" in str(one.message)]
    return said, trainer.args.generation_batch_size


def test_how_many_completions_are_generated_is_said(world: World, tmp_path: Path) -> None:
    """TRL counts a batch for each process: 16 completions where four share each of 4."""
    said, *others = world.run(made, tmp_path, 4)
    assert others == [([], 4)] * 3
    assert said[1] == 4
    (text,) = said[0]
    assert text.startswith(
        "generation_batch_size: 4 completions are generated at a time, where TRL"
    )
    assert "counted 16: 4 processes share each of them" in text
