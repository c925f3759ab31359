"""TRL's preference trainers in four processes that share sequences, against the stock ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import oomb
import oomb.hf
from engine.reference import EXACT
from oomb.parallel.whole import is_sharded
from trainer import two_pass_runs
from trainer.runs import CONFIG, tokenizer
from trainer.two_pass_runs import (
    classifier,
    judged,
    preferences,
    reward,
    settings,
    trained,
    write_log_softmax_out,
)
from trainer.two_pass_runs import plain_log_softmax as plain_log_softmax

from .world import World, as_started, meshes

RANKS = 4

# Trainer; its arguments; its data; how it is made.
CASES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "dpo": ("DPO", {"ld_alpha": 0.5, "max_length": 64}, preferences, {"with_reference": True}),
    "dpo, adapter": ("DPO", {"loss_type": ["ipo"], "max_length": 64}, preferences, {}),
    # So large that each batch has both labels: without one TRL gathers an fp32 zero among fp64.
    "kto": (
        "KTO",
        {"max_length": 64, "per_device_train_batch_size": 4},
        judged,
        {"with_reference": True},
    ),
    "reward": (
        "Reward",
        {"center_rewards_coefficient": 0.1, "max_length": 64},
        preferences,
        {"make_model": lambda adapted: two_pass_runs.classifier(adapted)},
    ),
}


def run(
    rank: int, name: str, folder: Path, groups: int = 1, stock: bool = False, policy: str = ""
) -> Any:
    """Gradients of two steps and what was logged; ``rank`` -1: of the stock trainer.

    A step is two micro-batches of each group, or of each process of the stock trainer's. Groups of
    one process evaluate as well, and so do processes that share weights by a ``policy``.
    """
    kind, own, data, others = CASES[name]
    others = dict(others)
    adapted = not others.get("with_reference", False)
    size: dict[str, Any] = {"per_device_train_batch_size": 2, **own}
    if groups == RANKS or policy:
        size |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
        others["eval_dataset"] = data(16)
    if rank < 0:
        size["gradient_accumulation_steps"] = 2 * groups
    elif not stock:
        others["oomb_config"] = CONFIG
        if policy and rank >= 0:
            others["oomb_config"] = replace(CONFIG, sharded_weights=policy)
            others["shard_weights"] = True
        layout = ParallelismConfig(dp_shard_size=groups, cp_size=RANKS // groups)
        size["parallelism_config"] = layout
    with as_started(rank, RANKS):
        args = getattr(trl, f"{kind}Config")(**settings(folder, **size))
        trainer = getattr(trl if rank < 0 or stock else oomb.hf, f"{kind}Trainer")
        return trained(trainer, adapted, args, data(8 * groups), **others)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("dpo", 1),
        ("dpo", 2),
        pytest.param("dpo, adapter", 1, marks=pytest.mark.slow),
        pytest.param("kto", 1, marks=pytest.mark.slow),
        pytest.param("reward", 1, marks=pytest.mark.slow),
        pytest.param("reward", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_as_the_stock_trainer_in_one_process(
    world: World, tmp_path: Path, name: str, groups: int
) -> None:
    """Which has as many micro-batches in a step as all groups together; TRL weighs some metrics
    by the tokens of those that are run at a time."""
    world.start(run, name, tmp_path / "ranks", groups)
    expected, log = run(-1, name, tmp_path / "stock", groups)
    if groups > 1:
        kept = ("loss", "grad_norm", "num_tokens", "epoch")
        log = [{key: line[key] for key in kept if key in line} for line in log]
    assert_same(world.answers(), expected, log)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "reward"])
@pytest.mark.sampled(1)
def test_groups_as_the_stock_trainer_of_processes(world: World, tmp_path: Path, name: str) -> None:
    """Of KTO the baseline too is a mean over processes, which no accumulation makes."""
    stock = world.run(run_stock, name, tmp_path / "stock")
    assert_same(world.run(run, name, tmp_path / "ranks", RANKS), *stock[0])


def run_stock(rank: int, name: str, folder: Path) -> Any:
    """In as many processes, each with sequences of its own."""
    with pytest.MonkeyPatch.context() as patch:
        write_log_softmax_out(patch)
        found, log = run(rank, name, folder, RANKS, stock=True)
    return [{key.removeprefix("module."): x for key, x in step.items()} for step in found], log


def assert_same(
    answers: list[Any], expected: list[dict[str, torch.Tensor]], log: list[dict[str, float]]
) -> None:
    for found, own in answers:
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


@pytest.mark.parametrize(
    ("name", "groups", "policy"),
    [
        ("dpo", 2, "zero3"),
        pytest.param("dpo", 1, "zero2", marks=pytest.mark.slow),
        pytest.param("dpo, adapter", 2, "zero1", marks=pytest.mark.slow),
        pytest.param("kto", 1, "zero3", marks=pytest.mark.slow),
        ("reward", 1, "zero3"),
        pytest.param("reward", 2, "zero1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_shards_as_the_stock_trainer_in_one_process(
    world: World, tmp_path: Path, name: str, groups: int, policy: str
) -> None:
    """Model and reference; gradients are gathered here."""
    world.start(with_shards, name, tmp_path / "ranks", groups, policy)
    expected, log = run(-1, name, tmp_path / "stock", groups, policy=policy)
    kept = ("loss", "grad_norm", "num_tokens", "epoch", "eval_loss")
    log = [{key: line[key] for key in kept if key in line} for line in log]
    assert any("eval_loss" in line for line in log)
    assert_same(world.answers(), expected, log)


def with_shards(rank: int, name: str, folder: Path, groups: int, policy: str) -> Any:
    """:func:`run`; ranks but the first begin without weights, of the reference too."""
    kind = getattr(oomb.hf, f"{CASES[name][0]}Trainer")
    train = kind.train

    def looked_at(self: Any) -> Any:
        assert self.ref_model is None or is_sharded(self.ref_model)
        return train(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "train", looked_at)
        for made in ("model", "reference", "classifier"):
            if rank > 0 and "adapter" not in name:  # which TRL copies
                make = getattr(two_pass_runs, made)
                patch.setattr(two_pass_runs, made, lambda *x, make=make: make(*x).to("meta"))
        found, log = run(rank, name, folder, groups, policy=policy)
    assert any(isinstance(x, DTensor) for x in found[0].values())
    whole = [
        {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in step.items()}
        for step in found
    ]
    return whole, log


def shards_of(
    rank: int, kind: str, folder: Path, steps: int, resume: bool
) -> dict[str, torch.Tensor]:
    """Whole weights after steps of sharded ones, each of which leaves a checkpoint."""
    with as_started(rank, RANKS):
        own: dict[str, Any] = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1}
        own |= {"optim": "adamw_torch", "max_length": 64}
        scores = kind == "Reward"
        reference = {} if scores else {"ref_model": two_pass_runs.reference()}
        trainer = getattr(oomb.hf, f"{kind}Trainer")(
            model=classifier(False) if scores else two_pass_runs.model(False),
            **reference,
            args=getattr(trl, f"{kind}Config")(**settings(folder, **own)),
            train_dataset=preferences(),
            processing_class=tokenizer(),
            oomb_config=replace(CONFIG, sharded_weights="zero3"),
            shard_weights=True,
        )
        trainer.train(resume_from_checkpoint=resume)
        if not scores:
            with pytest.raises(ValueError, match="^prediction_loss_only: expected True beside sh"):
                trainer.predict(trainer.train_dataset)
    named = dict(trainer.model.named_parameters())
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", pytest.param("Reward", marks=pytest.mark.release)])
def test_shards_go_on_from_a_checkpoint(world: World, tmp_path: Path, kind: str) -> None:
    expected = world.run(shards_of, kind, tmp_path / "unbroken", 2, False)[0]
    begun = world.run(shards_of, kind, tmp_path / "resumed", 1, False)[0]
    found = world.run(shards_of, kind, tmp_path / "resumed", 2, True)[0]
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert not all(torch.equal(begun[name], weight) for name, weight in expected.items())


def failed(rank: int, folder: Path) -> str:
    """What training raises where the loss of one rank fails."""
    compute = trl.DPOTrainer._compute_loss

    def failing(self: Any, *args: Any) -> Any:
        loss = compute(self, *args)
        if rank == 1:
            raise oomb.OutOfMemoryError("no room", needed_bytes=2, available_bytes=1)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.DPOTrainer, "_compute_loss", failing)
        with pytest.raises(oomb.OutOfMemoryError) as found:
            run(rank, "dpo", folder, 2)
    return str(found.value)


def test_a_failure_in_one_group_ends_all(world: World, tmp_path: Path) -> None:
    assert all("no room" in text for text in world.run(failed, tmp_path))


def sharded_classifier(_: bool) -> Any:
    model = classifier(False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=meshes[RANKS])
    return fully_shard(model, mesh=meshes[RANKS])


def no_metrics(_: Any) -> dict[str, float]:
    return {}


def refused(rank: int, folder: Path, kind: str, own: dict[str, Any]) -> str:
    """What a trainer says; whole models are those that are given."""
    with as_started(rank, RANKS):
        own = dict(own)
        others: dict[str, Any] = own.pop("others", {})
        if kind != "GRPO":
            own["parallelism_config"] = ParallelismConfig(cp_size=RANKS)
        args = getattr(trl, f"{kind}Config")(**settings(folder), **own)
        trainer = getattr(oomb.hf, f"{kind}Trainer")
        with pytest.raises(ValueError) as found:
            trained(trainer, False, args, preferences(), oomb_config=CONFIG, **others)
    return str(found.value)


SHARDS = {"shard_weights": True}


@pytest.mark.parametrize(
    ("kind", "own", "text"),
    [
        ("DPO", {"precompute_ref_log_probs": True}, "log_probs: expected False in 4 processes"),
        (
            "DPO",
            {"others": SHARDS | {"with_reference": True}, "sync_ref_model": True},
            "sync_ref_model: expected False beside sharded weights",
        ),
        (
            "DPO",
            {"others": SHARDS | {"with_reference": True, "compute_metrics": no_metrics}},
            "compute_metrics: expected None beside sharded weights",
        ),
        (
            "GRPO",
            {"others": SHARDS | {"reward_funcs": reward}, "cache_implementation": "static"},
            "cache_implementation: expected None beside sharded_weights='zero3', got 'static'",
        ),
        (
            "Reward",
            {"others": {"make_model": sharded_classifier}},
            "model: expected a whole head beside sharded weights",
        ),
    ],
)
def test_what_is_refused(
    world: World, tmp_path: Path, kind: str, own: dict[str, Any], text: str
) -> None:
    assert all(text in found for found in world.run(refused, tmp_path, kind, own))
