"""``oomb train`` in four processes: what it prints and saves, how it stops, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import oomb
from oomb.core.attention import ChunkAttention

from .world import World, as_started

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from test_tasks import prepare as prepare_task
from test_tasks import steps as steps_of_task
from tiny_runs import prepare, run, save_model

RANKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four key/value heads, a text, and the settings of a run."""
    folder = tmp_path_factory.mktemp("ranks")
    evaluation = {"every_steps": 3, "max_sequences": 2}
    prepare(folder, saving={"every_steps": 2}, evaluation=evaluation)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    save_model(folder / "model", **heads)
    return folder


def _reads_nothing(*_: Any, **__: Any) -> Any:
    raise AssertionError("rank 0 alone reads weights")


def trained(rank: int, folder: Path, name: str, *arguments: str, fail: str = "") -> tuple[int, str]:
    """Exit code and output of ``oomb train`` on one rank; -1: in one process."""
    with as_started(rank, RANKS), pytest.MonkeyPatch.context() as patch:
        if fail and rank == 1:
            begin_to_fail(patch, fail)
        if rank > 0 and any(x.startswith("parallel.weights=zero") for x in arguments):
            for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
                patch.setattr(kind, "from_pretrained", _reads_nothing)
        result = run(folder / "run.yaml", f"output_dir={folder / name}", *arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def failing(rank: int, folder: Path, name: str, how: str, *arguments: str) -> tuple[int, str]:
    return trained(rank, folder, name, *arguments, fail=how)


def begin_to_fail(patch: pytest.MonkeyPatch, how: str) -> None:
    """In the backward of the third call on this rank, or in its first evaluation."""
    backward, calls = ChunkAttention.backward, []
    evaluate = oomb.Engine.evaluate

    def stopped(self: oomb.Engine, *tensors: Any, **others: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *tensors, **others)

    if how == "SIGTERM in an evaluation":
        patch.setattr(oomb.Engine, "evaluate", stopped)
        return

    def counted(self: ChunkAttention, layer: int, *tensors: Any) -> Any:
        calls.append(layer)
        if len(calls) == 20:
            if how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise oomb.OutOfMemoryError("no room", needed_bytes=2, available_bytes=1)
        return backward(self, layer, *tensors)

    patch.setattr(ChunkAttention, "backward", counted)


def losses(run: Path, event: str = "step") -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {x["step"]: x["loss"] for x in map(json.loads, lines) if x["event"] == event}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """A run of six steps in one process."""
    code, output = trained(-1, folder, "alone", "training.steps=6")
    assert code == 0, output
    return folder / "alone"


def assert_same(run: Path, alone: Path) -> None:
    for event in ("step", "eval"):
        expected = losses(alone, event)
        assert losses(run, event) == pytest.approx(expected, rel=1e-6)


def test_goes_on_with_another_number_of_ranks(world: World, folder: Path, alone: Path) -> None:
    for steps, ranks, resume in (
        ("2", RANKS, []),
        ("4", 1, ["--resume"]),
        ("6", RANKS, ["--resume"]),
    ):
        arguments = [f"training.steps={steps}", *resume]
        if ranks == 1:
            assert trained(-1, folder, "resumed", *arguments)[0] == 0
            continue
        found = world.run(trained, folder, "resumed", *arguments)
        assert [code for code, _ in found] == [0] * RANKS, found
        assert f"step {steps}/{steps}" in found[0][1]
        assert [output for _, output in found[1:]] == [""] * (RANKS - 1)
    assert losses(folder / "resumed") == pytest.approx(losses(alone), rel=1e-6)
    assert (folder / "resumed" / "report.html").exists()
    model = (folder / "resumed" / "model" / "model.safetensors").stat().st_size
    assert model == (alone / "model" / "model.safetensors").stat().st_size


def test_replicas_of_pairs(world: World, folder: Path, alone: Path) -> None:
    """Two replicas take in one call what one process takes in two."""
    arguments = ["training.steps=3", "training.accumulation_steps=2"]
    code, output = trained(-1, folder, "accumulated", *arguments)
    assert code == 0, output
    found = world.run(trained, folder, "pairs", "training.steps=3", "parallel.cp=2")
    assert [code for code, _ in found] == [0] * RANKS, found
    assert_same(folder / "pairs", folder / "accumulated")
    plan = json.loads((folder / "pairs" / "plan.json").read_text())
    assert plan["predicted"]["ranks"] == 2
    assert plan["predicted"]["device_pool_bytes"] == plan["measured"]["device_pool_bytes"]


def test_goes_on_with_another_number_of_groups(world: World, folder: Path) -> None:
    """Two pairs, one process that accumulates, two pairs; four processes as one would repeat."""
    accumulated = "training.accumulation_steps=2"
    code, output = trained(-1, folder, "unbroken", "training.steps=4", accumulated)
    assert code == 0, output
    pairs = ["parallel.cp=2", "training.accumulation_steps=1"]
    start(world, folder, "regrouped", "training.steps=2", *pairs)
    again = world.run(trained, folder, "regrouped", "training.steps=3", "--resume")
    assert [code for code, _ in again] == [2] * RANKS, again
    assert "training.accumulation_steps: expected 2, so that" in again[0][1], again
    code, output = trained(-1, folder, "regrouped", "training.steps=3", accumulated, "--resume")
    assert code == 0, output
    start(world, folder, "regrouped", "training.steps=4", *pairs, "--resume")
    assert losses(folder / "regrouped") == pytest.approx(losses(folder / "unbroken"), rel=1e-6)


def test_a_signal_to_one_rank(world: World, folder: Path, alone: Path) -> None:
    found = world.run(failing, folder, "stopped", "SIGTERM", "training.steps=6")
    assert [code for code, _ in found] == [0] * RANKS, found
    assert "--resume goes on" in found[0][1]
    assert [output for _, output in found[1:]] == [""] * (RANKS - 1)
    stopped = max(losses(folder / "stopped"))
    assert stopped < 6
    found = world.run(trained, folder, "stopped", "training.steps=6", "--resume")
    assert [code for code, _ in found] == [0] * RANKS, found
    assert_same(folder / "stopped", alone)


def test_a_signal_to_one_pair_that_evaluates(world: World, folder: Path) -> None:
    """The other pair, which has its value already, does not wait for one."""
    name, how = "stopped-evaluation", "SIGTERM in an evaluation"
    found = world.run(failing, folder, name, how, "training.steps=6", "parallel.cp=2")
    assert [code for code, _ in found] == [0] * RANKS, found
    assert "step 3, the last finished one, is saved" in found[0][1]
    assert "--resume goes on" in found[0][1]


def test_one_rank_without_memory(world: World, folder: Path, alone: Path) -> None:
    """All end, and one of them says why; the last checkpoint is there."""
    found = world.run(failing, folder, "failed", "memory", "training.steps=6")
    assert [code for code, _ in found] == [1] * RANKS, found
    assert "[rank 1]" in found[1][1].splitlines()[-1] and "no room" in found[1][1]
    assert not any("no room" in output for rank, (_, output) in enumerate(found) if rank != 1)
    found = world.run(trained, folder, "failed", "training.steps=6", "--resume")
    assert [code for code, _ in found] == [0] * RANKS, found
    assert_same(folder / "failed", alone)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("parallel.cp=3", "parallel.cp: expected a divisor of the 4 processes that were started"),
        ("model.name=./nowhere/model", "model.name: expected"),
        ("optimizer.name=unknown", "optimizer.name: expected a name that transformers knows"),
    ],
)
def test_bad_input(world: World, folder: Path, setting: str, text: str) -> None:
    found = world.run(trained, folder, "bad", setting)
    assert [code for code, _ in found] == [2] * RANKS, found
    assert text in found[0][1]
    assert [output for _, output in found[1:]] == [""] * (RANKS - 1)
    assert not (folder / "bad").exists()


# Sharded weights ----------------------------------------------------------------------------------

NO_SHARDS = "parallel.weights=replicated"


def start(world: World, folder: Path, name: str, *arguments: str) -> None:
    found = world.run(trained, folder, name, *arguments)
    assert [code for code, _ in found] == [0] * RANKS, found


@pytest.mark.parametrize("policy", ["zero1", "zero3"])
@pytest.mark.sampled(1)
def test_goes_on_with_other_shards(world: World, folder: Path, alone: Path, policy: str) -> None:
    """Shards on four ranks, one process, shards again, whole weights on four ranks."""
    name, sharded = f"sharded-{policy}", f"parallel.weights={policy}"
    start(world, folder, name, "training.steps=2", sharded)
    assert trained(-1, folder, name, "training.steps=4", sharded, "--resume")[0] == 0
    start(world, folder, name, "training.steps=5", sharded, "--resume")
    start(world, folder, name, "training.steps=6", NO_SHARDS, "--resume")
    assert losses(folder / name) == pytest.approx(losses(alone), rel=1e-6)
    mine = load_file(folder / name / "model" / "model.safetensors")
    theirs = load_file(alone / "model" / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for key, weight in theirs.items():
        assert torch.allclose(mine[key], weight, rtol=1e-3, atol=1e-5), key


def test_pairs_that_share_weights(world: World, folder: Path, alone: Path) -> None:
    """Groups add the gradients of their shards; the model is saved whole."""
    arguments = ["training.steps=3", "training.accumulation_steps=2"]
    assert trained(-1, folder, "two-calls", *arguments)[0] == 0
    sharded = ["training.steps=3", "parallel.cp=2", "parallel.weights=zero2"]
    start(world, folder, "sharded-pairs", *sharded)
    assert_same(folder / "sharded-pairs", folder / "two-calls")
    config = AutoConfig.from_pretrained(folder / "sharded-pairs" / "model")
    assert config.architectures == ["Qwen2ForCausalLM"]


@pytest.mark.slow
def test_answers_that_the_first_rank_writes(world: World, tmp_path: Path) -> None:
    """``task: grpo``: the first draws as one process does."""
    prepare_task(tmp_path, "grpo")
    save_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4)
    world.start(trained, tmp_path, "ranks")
    assert trained(-1, tmp_path, "alone")[0] == 0
    found = world.answers()
    assert [code for code, _ in found] == [0] * RANKS, found
    expected = steps_of_task(tmp_path / "alone")
    for mine, theirs in zip(steps_of_task(tmp_path / "ranks"), expected, strict=True):
        assert theirs["grad_norm"] > 1e-3
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def told(rank: int, folder: Path, name: str, *arguments: str) -> tuple[int, str]:
    """:func:`trained`, with answers that are made up."""
    import trl

    from trainer.two_pass_runs import written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.GRPOTrainer, "_generate_single_turn", lambda *x: (written(*x), None))
        return trained(rank, folder, name, *arguments)


@pytest.mark.slow
def test_answers_of_two_pairs(world: World, tmp_path: Path) -> None:
    """``task: grpo``: two pairs of processes, answers of each, as one process that accumulates."""
    prepare_task(tmp_path, "grpo", rewards=["test_tasks.by_text"])
    save_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4)
    world.start(told, tmp_path, "pairs", "parallel.cp=2", "training.accumulation_steps=1")
    assert told(-1, tmp_path, "alone")[0] == 0
    found = world.answers()
    assert [code for code, _ in found] == [0] * RANKS, found
    for mine, theirs in zip(
        steps_of_task(tmp_path / "pairs"), steps_of_task(tmp_path / "alone"), strict=True
    ):
        assert theirs["grad_norm"] > 1e-3
        assert mine["tokens"] == theirs["tokens"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_preferences_of_two_pairs(world: World, tmp_path: Path) -> None:
    """``task: dpo``: two pairs of processes, a batch each, as one process that accumulates."""
    prepare_task(tmp_path, "dpo")
    save_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4)
    world.start(trained, tmp_path, "pairs", "parallel.cp=2", "training.accumulation_steps=1")
    assert trained(-1, tmp_path, "alone")[0] == 0
    found = world.answers()
    assert [code for code, _ in found] == [0] * RANKS, found
    for mine, theirs in zip(
        steps_of_task(tmp_path / "pairs"), steps_of_task(tmp_path / "alone"), strict=True
    ):
        assert theirs["grad_norm"] > 1e-3
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["tokens"] == theirs["tokens"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "lora"),
    [("dpo", []), ("dpo", ["lora.r=4"]), ("reward", []), ("reward", ["lora.r=4"]), ("grpo", [])],
)
@pytest.mark.sampled(1)
def test_tasks_with_shared_weights(
    world: World, tmp_path: Path, task: str, lora: list[str]
) -> None:
    """Rank 0 alone reads model and reference, but all read what TRL copies: adapters; TRL itself
    reads the reference of ``grpo``."""
    prepare_task(tmp_path, task, parallel={"weights": "zero3"})
    save_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4)
    all_read = task == "grpo" or (task == "dpo" and lora)
    read_by_first = [] if all_read else ["parallel.weights=zero3"]
    world.start(trained, tmp_path, "ranks", *lora, *read_by_first)
    assert trained(-1, tmp_path, "alone", *lora, NO_SHARDS)[0] == 0
    found = world.answers()
    assert [code for code, _ in found] == [0] * RANKS, found
    for mine, theirs in zip(
        steps_of_task(tmp_path / "ranks"), steps_of_task(tmp_path / "alone"), strict=True
    ):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def test_adapters_on_shared_weights(world: World, folder: Path) -> None:
    """Rank 0 draws the adapters; their first product is 0, so the second step shows them."""
    arguments = ["training.steps=2", "lora.r=4"]
    assert trained(-1, folder, "adapters", *arguments)[0] == 0
    start(world, folder, "adapters-shared", *arguments, "parallel.weights=zero3")
    assert_same(folder / "adapters-shared", folder / "adapters")


def test_damaged_weights_that_rank_0_reads(world: World, folder: Path) -> None:
    """All end, and it is said once."""
    shutil.copytree(folder / "model", folder / "damaged")
    file = folder / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    arguments = [f"model.name={folder / 'damaged'}", "parallel.weights=zero3"]
    found = world.run(trained, folder, "unread", *arguments)
    assert [code for code, _ in found] == [2] * RANKS, found
    assert "model.name: expected weights, got " in found[0][1]
    assert [output for _, output in found[1:]] == [""] * (RANKS - 1)
    assert not (folder / "unread").exists()
