"""Optimizer states of which each rank writes its rows: the same bits on any number of ranks, here
and in a process that has only torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

import oomb
from engine.models import make
from oomb.checkpoint import CheckpointError, CheckpointStore, load_state, save_state
from oomb.checkpoint.rows import expect_rows, load_rows, save_rows
from oomb.hf import Trainer
from oomb.hf.optimizer_files import OptimizerFiles
from oomb.parallel.job import Job
from trainer.runs import CONFIG, arguments, logged, packed

from . import plain_reader
from .world import Died, World, as_started, meshes

RANKS = 4


class Found(NamedTuple):
    """What a process has at the end: values by name."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def trained(rank: int, folder: Path, groups: int, steps: int, resume: bool) -> Found:
    """Up to a step, with shards in each group; ``rank`` -1: in one process, whole."""
    layout = {}
    if rank >= 0:
        sizes = {"dp_shard_size": groups, "cp_size": RANKS // groups}
        layout = {"parallelism_config": ParallelismConfig(**sizes)}
    with as_started(rank, RANKS):
        settings = arguments(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4 // max(1, groups),
            max_steps=steps,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=1,
            **layout,
        )
        trainer = Trainer(
            make("llama", num_key_value_heads=4, num_attention_heads=4, num_hidden_layers=2),
            settings,
            train_dataset=packed(8),
            oomb_config=CONFIG,
            shard_weights=rank >= 0,
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.engine.close()
    named = dict(trainer.model.named_parameters())
    assert any(isinstance(x, DTensor) for x in named.values()) == (rank >= 0)
    states = {
        f"{name}.{key}": whole(value)
        for name, parameter in named.items()
        for key, value in trainer.optimizer.state[parameter].items()
    }
    weights = {name: whole(parameter) for name, parameter in named.items()}
    return Found(logged(trainer, "loss"), weights, states)


def plainly_read(rank: int, checkpoint: Path) -> dict[str, torch.Tensor]:
    """By torch alone, with shards on four ranks."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    return plain_reader.states(fully_shard(model, mesh=meshes[RANKS]), str(checkpoint))


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def as_before(checkpoint: Path, store: CheckpointStore) -> None:
    """The same checkpoint as it was written when an optimizer's state had no folder of its own."""
    state = load_state(checkpoint / "optimizer", "optimizer")
    names = state["param_groups"][0]["params"] + state["param_groups"][1]["params"]
    first = len(state["param_groups"][0]["params"])
    for group, numbers in zip(
        state["param_groups"], (range(first), range(first, len(names))), strict=True
    ):
        group["params"] = list(numbers)
    state["state"] = {names.index(name): of for name, of in state["state"].items()}

    def write(folder: Path) -> None:
        others = shutil.ignore_patterns("optimizer", "training*.json", "COMPLETE", "MANIFEST.json")
        shutil.copytree(checkpoint, folder, ignore=others, dirs_exist_ok=True)
        (folder / "training-00001.safetensors").unlink()
        shutil.copy(checkpoint / "training_args.json", folder)
        save_state(folder, "training", {**load_state(checkpoint, "training"), "optimizer": state})

    saved = store.verified(checkpoint)
    store.save(saved.step, write, identity=saved.identity)


def test_rows_of_pairs_have_the_same_bits_everywhere(world: World, tmp_path: Path) -> None:
    """Loaded where no step is left: by four ranks and one process, and by torch alone."""
    folder = tmp_path / "run"
    saved = world.run(trained, folder, 2, 2, False)[0]
    checkpoint = folder / "checkpoints" / "step-00000002"
    files = sorted(file.name for file in (checkpoint / "optimizer").iterdir())
    assert files[0] == "optimizer.json"
    assert all(name.startswith("shard-0000") for name in files[1:])
    assert {name[:11] for name in files[1:]} >= {"shard-00001", "shard-00002"}

    for found in world.run(trained, folder, 1, 2, True)[1], trained(-1, folder, 0, 2, True):
        assert_same_bits(found.states, saved.states)
        assert_same_bits(found.weights, saved.weights)
    assert_same_bits(world.run(plainly_read, checkpoint)[2], saved.states)
    script, values = Path(plain_reader.__file__), tmp_path / "values.safetensors"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-P", str(script), str(checkpoint), str(values)]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    assert_same_bits(load_file(values), saved.states)

    torn = checkpoint / "optimizer" / files[-1]
    content = torn.read_bytes()
    torn.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"optimizer/{files[-1]}: expected \d+ bytes"):
        CheckpointStore.verified(checkpoint)
    torn.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"optimizer/{files[-1]}: its contents changed"):
        CheckpointStore.verified(checkpoint)


@pytest.mark.slow
def test_steps_after_a_break(world: World, tmp_path: Path) -> None:
    """Of pairs to the bit those of a run without one; of one process alike, and back on pairs."""
    folder = tmp_path / "run"
    world.run(trained, folder, 2, 2, False)
    shutil.copytree(folder, tmp_path / "alone")
    unbroken = world.run(trained, tmp_path / "unbroken", 2, 4, False)[0]
    resumed = world.run(trained, folder, 2, 4, True)[0]
    assert len(set(unbroken.losses)) == 4 and resumed.losses == unbroken.losses
    assert_same_bits(resumed.weights, unbroken.weights)
    assert_same_bits(resumed.states, unbroken.states)
    of_one = trained(-1, tmp_path / "alone", 0, 4, True)
    assert of_one.losses == pytest.approx(unbroken.losses, rel=1e-6)  # logged in fp32

    # Whole states of one process, as they are written now and as they were before.
    last = tmp_path / "alone" / "checkpoints" / "step-00000004"
    as_before(last, CheckpointStore(tmp_path / "before" / "checkpoints"))
    for name in ("alone", "before"):
        on_ranks = world.run(trained, tmp_path / name, 2, 4, True)[1]
        assert_same_bits(on_ranks.states, of_one.states)
    assert_same_bits(trained(-1, tmp_path / "before", 0, 4, True).states, of_one.states)


# States of all kinds ------------------------------------------------------------------------------


def values(rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(dtype)


def state_of(cut: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Rows that four ranks share evenly, unevenly, and of which some have none; and whole ones."""
    states: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (8, 5, 1):
            tensor = values(rows, dtype)
            states[f"layer.{rows}.{str(dtype)[6:]}"] = {
                "exp_avg": cut(tensor),
                "scale": tensor[0].clone(),
                "step": torch.tensor(7.0),
            }
    return {"state": states, "param_groups": [{"betas": (0.9, 0.95), "lr": 1e-3}]}


def shards_of(ranks: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """As FSDP2 deals the rows."""
    holder = fully_shard(nn.Linear(1, 1), mesh=meshes[ranks])
    placements = next(iter(holder.parameters())).placements  # type: ignore[attr-defined]
    return lambda tensor: distribute_tensor(tensor, meshes[ranks], placements, src_data_rank=None)


def all_whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: all_whole(value) for key, value in state.items()}
    return whole(state) if isinstance(state, torch.Tensor) else state


def saved_rows(rank: int, folder: Path, ranks: int) -> None:
    def by_first(work: Callable[[], Any]) -> None:
        if rank == 0:
            work()

    state = state_of(shards_of(ranks))
    save_rows(folder, "optimizer", state, by_first=by_first, file_bytes=40)


def loaded_rows(rank: int, folder: Path, ranks: int) -> Any:
    cut = shards_of(ranks)
    states = state_of(cut)["state"]
    like = {f"optimizer.state.{name}": of["exp_avg"] for name, of in states.items()}
    found = load_rows(folder, "optimizer", like)
    for name, of in found["state"].items():
        assert isinstance(of["exp_avg"], DTensor) and not isinstance(of["step"], DTensor), name
    return all_whole(found)


def test_rows_of_each_shape_and_dtype(world: World, tmp_path: Path) -> None:
    expected = state_of(lambda tensor: tensor)
    for written in (2, 4):
        folder = tmp_path / str(written)
        folder.mkdir()
        world.run(saved_rows, folder, written)
        assert len(list(folder.glob("shard-00001-*"))) > 1  # pieces of 40 bytes
        for read in (2, 4):
            for found in world.run(loaded_rows, folder, read):
                assert_same_state(found, expected)
        assert_same_state(load_rows(folder, "optimizer", {}), expected)


def assert_same_state(found: Any, expected: Any) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for name, of in expected["state"].items():
        assert_same_bits(found["state"][name], of)


# What goes wrong ----------------------------------------------------------------------------------


def begun(rank: int) -> tuple[Job, OptimizerFiles]:
    """A job's rows of one layer."""
    model = fully_shard(nn.Linear(6, 6), mesh=meshes[2])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter.detach())
    with as_started(rank, int(os.environ["LOCAL_WORLD_SIZE"])):
        job = Job()
    return job, OptimizerFiles(optimizer, model, job)


def saved_with_errors(rank: int, folder: Path) -> list[str]:
    """Errors of a full disk on one rank, and of a folder that one rank does not have."""
    job, files = begun(rank)
    store, texts = CheckpointStore(folder), []

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def failing(checkpoint: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(filesystem, "_write_files_from_queue", no_space)
            files.save(checkpoint)

    def elsewhere(checkpoint: Path) -> None:
        files.save(checkpoint / "elsewhere" if rank == 3 else checkpoint)

    store.save(1, files.save, by_first=job.by_first)
    for write in (failing, elsewhere):
        try:
            store.save(2, write, by_first=job.by_first)
        except oomb.Error as error:
            texts.append(str(error))
    store.save(3, files.save, by_first=job.by_first)
    job.close()
    return texts


def test_errors_of_one_rank_are_raised_by_all(world: World, tmp_path: Path) -> None:
    for full, elsewhere in world.run(saved_with_errors, tmp_path):
        assert full.startswith("the checkpoint of step 2 was not saved in")
        assert "[rank 1] [Errno 28] No space left on device; those before it are as" in full
        assert "output_dir: expected a folder that all ranks share" in elsewhere
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    store.verified(store.path_of(3))


def killed(rank: int, folder: Path) -> None:
    """All die when rows are written and the manifest is not."""
    job, files = begun(rank)
    store = CheckpointStore(folder)
    store.save(1, files.save, by_first=job.by_first)

    def write(checkpoint: Path) -> None:
        files.save(checkpoint)
        os.kill(os.getpid(), signal.SIGKILL)

    store.save(2, write, by_first=job.by_first)


def test_killed_when_rows_are_written(tmp_path: Path) -> None:
    with World(2) as pair:
        pair.start(killed, tmp_path)
        assert all(isinstance(answer, Died) for answer in pair.answers())
    left = tmp_path / ".unfinished-step-00000002" / "optimizer"
    assert list(left.glob("shard-*"))
    store = CheckpointStore(tmp_path)
    found = store.newest_intact()
    assert found is not None and found.step == 1 and store.rejected == []
    state = load_rows(found.path / "optimizer", "optimizer", {})["state"]
    assert torch.equal(state["weight"]["momentum_buffer"], torch.ones(6, 6))


def refused(rank: int, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dcp, "HuggingFaceStorageWriter")
        try:
            trained(rank, folder, 1, 1, False)
        except CheckpointError as error:
            return str(error)
    return "no error"


def test_a_torch_that_is_too_old(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are refused before training; whole states need no such torch."""
    expected = f"save_distributed, for optimizer states .* got {torch.__version__}"
    for text in world.run(refused, tmp_path):
        assert text.startswith("torch: expected one whose HuggingFaceStorageWriter knows")
    monkeypatch.delattr(dcp, "HuggingFaceStorageWriter")
    with pytest.raises(CheckpointError, match=expected.replace("+", r"\+")):
        expect_rows()
    assert trained(-1, tmp_path / "alone", 0, 1, False).states
