"""TRL's generating trainers in groups of processes with completions of their own."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import trl
from accelerate import PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import gather, gather_object
from datasets import Dataset
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.utils import RepeatSampler

import oomb
import oomb.hf
from engine.reference import EXACT, relative_error
from oomb.checkpoint import CheckpointError
from trainer.runs import CONFIG, prompts, tokenizer
from trainer.two_pass_runs import Gradients, model, settings, write_log_softmax_out, written
from trainer.two_pass_runs import plain_log_softmax as plain_log_softmax

from .test_generation_over_ranks import whole
from .test_trainer_over_ranks import SavesAndStops
from .world import World, as_started

RANKS = 4
# Each generation is used twice. Its completions are those of one prompt, or of two.
GENERATION: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "max_completion_length": 9,
    "num_iterations": 2,
    "max_steps": 3,
    "learning_rate": 0.3,
    "log_completions": True,
}
# Trainer; its arguments.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {"loss_type": "dapo", "beta": 0.04}),
    "entropies": ("GRPO", {"loss_type": "grpo", "beta": 0.04, "top_entropy_quantile": 0.5}),
    "rloo": ("RLOO", {"beta": 0.05, "normalize_advantages": True, "learning_rate": 1e-3}),
}


def questions() -> Dataset:
    """Of one length: rotary angles are in fp32, and what TRL pads with moves them."""
    rows = prompts(6)
    texts = [f"{row['prompt']}{row['completion']}".split()[:12] for row in rows]
    return Dataset.from_dict({"prompt": [" ".join(words) + " " for words in texts]})


class Found(NamedTuple):
    """What a process saw of a run."""

    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    log: list[dict[str, float]]
    table: dict[str, list[Any]]
    random: torch.Tensor


def judge(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    """Of a text's own; what it notes, it gathers first."""
    own = [float(zlib.crc32(text.encode()) % 11) for text in completions]
    everyone = gather_object(own)
    assert everyone == gather(torch.tensor(own)).tolist()
    state, number = PartialState(), len(own)
    assert len(everyone) == number * state.num_processes
    assert everyone[number * state.process_index :][:number] == own
    log_metric("judged", sum(everyone))
    log_extra("drawn", own)
    return own


def made(
    rank: int, name: str, folder: Path, groups: int, stock: bool = False, **others: Any
) -> tuple[Any, Gradients]:
    """A trainer in ``groups`` groups; ``rank`` -1: the stock one, which accumulates instead.

    Those of a group share weights by a ``policy``, where there is one.
    """
    kind, own = CASES[name]
    policy = others.pop("policy", "")
    size: dict[str, Any] = {"num_generations": 4, **GENERATION, **own}
    given: dict[str, Any] = {"reward_funcs": judge, **others.pop("given", {})}
    size |= others
    if rank < 0:
        size["gradient_accumulation_steps"] = 2 * groups
        size["per_device_eval_batch_size"] *= groups
    elif not stock:
        if groups > 1:
            size["parallelism_config"] = ParallelismConfig(dp_shard_size=groups)
        given["oomb_config"] = CONFIG
        if policy:
            given["oomb_config"] = replace(CONFIG, sharded_weights=policy)
            given["shard_weights"] = True
    data = questions()
    seen = Gradients()
    trainer = getattr(oomb.hf if rank >= 0 and not stock else trl, f"{kind}Trainer")(
        model=model(True),
        args=getattr(trl, f"{kind}Config")(**settings(folder, **size)),
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        processing_class=tokenizer(),
        callbacks=[seen],
        **given,
    )
    return trainer, seen


def run(
    rank: int, name: str, folder: Path, groups: int, stock: bool = False, **others: Any
) -> Found:
    """Three steps and an evaluation, with completions that are not drawn nor shuffled."""
    with as_started(rank, RANKS), written_completions() as patch:
        if stock:
            write_log_softmax_out(patch)
        trainer, seen = made(rank, name, folder, groups, stock, **others)
        trainer.train()
        trainer.evaluate()
    return found_of(trainer, seen)


@contextmanager
def written_completions() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (grpo_trainer, rloo_trainer):
            patch.setattr(module, "shuffle_sequence_dict", lambda given: given)
        patch.setattr(trl.GRPOTrainer, "_generate_single_turn", lambda *x: (written(*x), None))
        patch.setattr(trl.RLOOTrainer, "_generate_single_turn", written)
        yield patch


def found_of(trainer: Any, seen: Gradients) -> Found:
    named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    logs = trainer._logs
    return Found(
        [whole({key.removeprefix("module."): x for key, x in step.items()}) for step in seen.steps],
        whole({name: x.detach() for name, x in named}),
        trainer.state.log_history,
        {
            **{name: list(logs[name]) for name in ("prompt", "completion", "advantages")},
            **{name: list(rows) for name, rows in logs["rewards"].items()},
            **{name: list(rows) for name, rows in logs["extra"].items()},
        },
        torch.get_rng_state(),
    )


def assert_same(found: Found, expected: Found, kept: tuple[str, ...] = ()) -> None:
    """Gradients, weights, the table of completions, and the log: of it what ``kept`` names."""
    own, table = dict(found.table), dict(expected.table)
    advantages = own.pop("advantages"), table.pop("advantages")
    assert own == table
    assert advantages[0] == pytest.approx(advantages[1], rel=EXACT)
    assert len(found.gradients) == len(expected.gradients) == GENERATION["max_steps"]
    for step, (mine, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert set(mine) == set(theirs)
        largest = max(float(grad.norm()) for grad in theirs.values())
        assert largest > 1e-4
        for key, grad in theirs.items():
            scale = max(float(grad.norm()), 1e-3 * largest)
            assert float((mine[key] - grad).norm()) <= EXACT * (1 + 9 * step) * scale, key
    for key, weight in expected.weights.items():
        assert relative_error(found.weights[key], weight) < EXACT
    assert any("eval_reward" in line for line in expected.log)
    for mine, theirs in zip(found.log, expected.log, strict=True):
        assert set(theirs) <= set(mine)
        for key, value in theirs.items():
            timed = key.endswith(("runtime", "per_second", "time"))
            if not timed and (not kept or any(part in key for part in kept)):
                assert mine[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


@pytest.mark.parametrize(
    ("name", "of_prompt", "policy"),
    [
        ("grpo", 8, ""),
        pytest.param("grpo", 4, "zero2", marks=pytest.mark.slow),
        pytest.param("rloo", 4, "", marks=pytest.mark.slow),
        pytest.param("rloo", 8, "zero2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_pairs_as_the_stock_trainer_in_one_process(
    world: World, tmp_path: Path, name: str, of_prompt: int, policy: str
) -> None:
    """Two pairs take in two micro-batches what it takes in four; of 8 completions of a prompt each
    pair has a half. Metrics that it weighs by micro-batch are left out."""
    others = {"num_generations": of_prompt}
    world.start(run_of, name, tmp_path / "ranks", 2, others | {"policy": policy})
    expected = run(-1, name, tmp_path / "stock", 2, **others)
    kept = ("reward", "judged", "completions/", "num_tokens", "grad_norm")
    for found in world.answers():
        assert_same(found, expected, kept)


def run_of(rank: int, name: str, folder: Path, groups: int, others: dict[str, Any]) -> Found:
    return run(rank, name, folder, groups, **others)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.sampled(1)
def test_groups_as_the_stock_trainer_of_processes(world: World, tmp_path: Path, name: str) -> None:
    """Every metric too; four processes have eight completions of a prompt, two each."""
    stock = world.run(run, name, tmp_path / "stock", RANKS, True)
    for found in world.run(run, name, tmp_path / "ranks", RANKS):
        assert_same(found, stock[0])


class Drawn(NamedTuple):
    """Of a run that samples."""

    found: Found
    judged: int


def draw(
    rank: int, folder: Path, groups: int, steps: int, resume: bool = False, policy: str = ""
) -> Drawn:
    """Steps with completions that the model draws; a step's checkpoint is kept."""
    calls = 0

    def judge_by_chance(completions: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        random.seed(torch.randint(9**9, (rank + 1,))[-1].item())
        return [random.random() for _ in completions]

    with as_started(rank, RANKS):
        others: dict[str, Any] = {
            "num_generations": 8 if groups == 2 else 16,
            "num_iterations": 1,
            "max_steps": steps,
            "save_strategy": "steps",
            "save_steps": 1,
            "policy": policy,
            "given": {"reward_funcs": judge_by_chance},
        }
        trainer, seen = made(rank, "grpo", folder, groups, **others)
        trainer.train(resume_from_checkpoint=resume)
    return Drawn(found_of(trainer, seen), calls)


@pytest.mark.parametrize("groups", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_groups_draw_completions_of_their_own(world: World, tmp_path: Path, groups: int) -> None:
    """All are of one prompt, and judges draw as well; after them ranks draw alike."""
    answers = world.run(draw, tmp_path, groups, 1)
    sharing = RANKS // groups
    assert [answer.judged for answer in answers] == [1, *[0] * (sharing - 1)] * groups
    for answer in answers:
        table = answer.found.table
        assert len(set(table["prompt"])) == 1
        assert len(table["completion"]) == len(set(table["completion"])) == 4 * groups
        assert table == answers[0].found.table
        assert torch.equal(answer.found.random, answers[0].found.random)
        for name, weight in answers[0].found.weights.items():
            assert torch.equal(answer.found.weights[name], weight)


@pytest.mark.parametrize("policy", ["zero3", pytest.param("", marks=pytest.mark.slow)])
def test_a_resumed_run_draws_as_the_unbroken_one(world: World, tmp_path: Path, policy: str) -> None:
    unbroken = world.run(draw, tmp_path / "unbroken", 2, 2, False, policy)
    first = world.run(draw, tmp_path / "resumed", 2, 1, False, policy)
    second = world.run(draw, tmp_path / "resumed", 2, 2, True, policy)
    for mine, begun, theirs in zip(second, first, unbroken, strict=True):
        assert begun.found.table["completion"] != theirs.found.table["completion"]
        assert mine.found.table == theirs.found.table
        for name, weight in theirs.found.weights.items():
            assert torch.equal(mine.found.weights[name], weight)


def test_an_epoch_has_the_order_that_trl_draws() -> None:
    """One after another; here each is asked for by its number."""
    of_prompts = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "seed": 5}
    sampler = RepeatSampler(range(20), **of_prompts)
    expected = [list(sampler) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.GRPOTrainer, "_get_train_sampler", lambda _: sampler)
        found = oomb.hf.GRPOTrainer._get_train_sampler(object.__new__(oomb.hf.GRPOTrainer))
    for epoch in (2, 0, 1, 2):
        found.set_epoch(epoch)
        assert list(found) == expected[epoch]


DIVIDED = [  # groups, batch size, accumulation, policy, last step; an epoch has three
    (2, 2, 2, "zero3", 1),
    (1, 2, 4, "", 2),
    (4, 2, 1, "", 4),
    (1, 4, 2, "zero2", 6),
]


def refused(rank: int, folder: Path) -> str:
    """What a run says that would generate four completions at a time, and no longer eight."""
    with pytest.raises(CheckpointError) as found:
        divided(rank, folder, (1, 4, 2, "", 6), True, steps_per_generation=1)
    return str(found.value)


def divided(
    rank: int, folder: Path, division: tuple[Any, ...], resume: bool, **others: Any
) -> Found:
    """A part of a run of eight completions a step, of two prompts; ``rank`` -1: the stock one."""
    groups, batch, accumulation, policy, last = division
    with as_started(rank, RANKS), written_completions():
        others |= {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "num_iterations": 1,
            "max_steps": 6,
            "save_strategy": "steps",
            "save_steps": 6,
            "policy": policy,
        }
        trainer, seen = made(rank, "grpo", folder, groups, **others)
        trainer.add_callback(SavesAndStops(last))
        trainer.train(resume_from_checkpoint=resume)
    return found_of(trainer, seen)


@pytest.mark.slow
@pytest.mark.release
def test_goes_on_in_other_groups(world: World, tmp_path: Path) -> None:
    """Each step takes the prompts that it has in the stock trainer's run without a break, also in
    the second epoch."""
    expected = divided(-1, tmp_path / "stock", (2, 2, 4, "", 6), False)
    gradients = []
    for part, division in enumerate(DIVIDED):
        if division is DIVIDED[-1]:
            for text in world.run(refused, tmp_path / "run"):
                assert text.startswith(
                    "steps_per_generation: expected one that makes 8 completions"
                )
        found = world.run(divided, tmp_path / "run", division, part > 0)
        gradients += found[-1].gradients
    norms = [[float(grad.norm()) for grad in step.values()] for step in gradients]
    theirs = [[float(grad.norm()) for grad in step.values()] for step in expected.gradients]
    assert len(norms) == 6 and norms == [pytest.approx(step, rel=1e-9) for step in theirs]
    for one in found:
        assert one.table["prompt"] == expected.table["prompt"][-8:]
        for name, weight in expected.weights.items():
            assert relative_error(one.weights[name], weight) < 1e-10


def failed(rank: int, folder: Path, failing: int) -> str:
    """What training raises where one judge fails."""

    def judge_or_fail(completions: list[str], **_: Any) -> list[float]:
        if rank == failing:
            raise oomb.OutOfMemoryError("no room", needed_bytes=2, available_bytes=1)
        return [0.0] * len(completions)

    with pytest.raises(oomb.OutOfMemoryError) as found:
        run(rank, "grpo", folder, 2, given={"reward_funcs": judge_or_fail})
    return str(found.value)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_in_one_group_ends_all(world: World, tmp_path: Path, failing: int) -> None:
    assert all("no room" in text for text in world.run(failed, tmp_path, failing))


def counted(rank: int, folder: Path, groups: int, batch: int, completions: int) -> Any:
    """How many completions a trainer generates at a time and what it warned of, or its refusal."""
    with as_started(rank, RANKS), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            trainer, _ = made(
                rank,
                "grpo",
                folder,
                groups,
                per_device_train_batch_size=batch,
                num_generations=completions,
            )
        except ValueError as error:
            return str(error)
    said = [str(one.message) for one in found if "generation_batch_size" in str(one.message)]
    return trainer.args.generation_batch_size, len(said)


def test_how_many_completions_are_generated(world: World, tmp_path: Path) -> None:
    """Two in a batch, two batches, of each group; TRL counts those of each process."""
    assert world.run(counted, tmp_path, 2, 2, 8) == [(8, 1), (8, 0), (8, 0), (8, 0)]
    assert world.run(counted, tmp_path, 4, 2, 16) == [(16, 0)] * RANKS
    for text in world.run(counted, tmp_path, 2, 2, 16):
        assert text.startswith(
            "per_device_train_batch_size: expected, times steps_per_generation=2 and 2 groups, a "
            "multiple of 16 completions of a prompt, got 2: 2 processes share each completion"
        )
