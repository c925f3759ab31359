"""``oomb.hf.Trainer`` in four processes that share sequences, have replicas, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from engine.models import make
from engine.reference import relative_error
from engine.router_models import routed
from oomb.hf import Trainer
from oomb.hf.ranks import ReplicaAccelerator
from oomb.parallel.replicas import Replicas
from trainer.runs import (
    CONFIG,
    arguments,
    logged,
    masked,
    packed,
    prompts,
    sft_arguments,
    tokenizer,
)

from .world import World, as_started, meshes

RANKS = 4
STEPS = 3


class Found(NamedTuple):
    """What a process saw of a run."""

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    weights: dict[str, torch.Tensor]
    tokens: int
    records: list[dict[str, Any]]


class Observer:
    """Keeps the records of steps."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def tiny() -> Any:
    return make("llama", num_key_value_heads=4, num_attention_heads=4, num_hidden_layers=2)


def sharded_by_hand() -> Any:
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer, mesh=meshes[RANKS])
    return fully_shard(model, mesh=meshes[RANKS])


def trained(rank: int, folder: Path, replicas: int, examples: Any, shards: str = "") -> Found:
    """A run of four sequences a step; ``rank`` -1: in one process."""
    with as_started(rank, RANKS):
        layout = {}
        if rank >= 0:
            sizes = {"dp_shard_size": replicas, "cp_size": RANKS // replicas}
            layout = {"parallelism_config": ParallelismConfig(**sizes)}
        values = {
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 1,
            "gradient_accumulation_steps": 4 // replicas,
            "max_steps": STEPS,
            "max_grad_norm": 0.1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "include_num_input_tokens_seen": "all",
            **layout,
        }
        observer: Any = Observer()
        trainer = Trainer(
            sharded_by_hand() if shards == "given" and rank >= 0 else tiny(),
            arguments(folder, **values),
            train_dataset=examples(8),
            eval_dataset=examples(5, seed=8),
            oomb_config=CONFIG,
            observer=observer,
            shard_weights=shards == "asked",
        )
        trainer.train()
        trainer.engine.close()
        parameters = dict(trainer.model.named_parameters())
        has_shards = any(isinstance(x, DTensor) for x in parameters.values())
        assert has_shards == (rank >= 0 and bool(shards))
        weights = {
            name: x.full_tensor().detach() if isinstance(x, DTensor) else x.detach().clone()
            for name, x in parameters.items()
        }
    return Found(
        logged(trainer, "loss"),
        logged(trainer, "grad_norm"),
        logged(trainer, "eval_loss"),
        weights,
        trainer.state.num_input_tokens_seen,
        observer.records,
    )


@pytest.mark.parametrize(
    ("replicas", "examples", "shards"),
    [
        (1, packed, ""),
        (2, packed, ""),
        (2, masked, ""),
        (4, masked, ""),
        (1, packed, "given"),
        (2, masked, "asked"),
    ],
)
@pytest.mark.sampled(3)
def test_as_in_one_process(
    world: World, tmp_path: Path, replicas: int, examples: Any, shards: str
) -> None:
    """With whole weights, and with weights that the ranks of a sequence share."""
    world.start(trained, tmp_path / "ranks", replicas, examples, shards)
    alone = trained(-1, tmp_path / "alone", 1, examples)
    found = world.answers()
    first = found[0]
    assert len(alone.losses) == STEPS
    assert first.losses == pytest.approx(alone.losses, rel=1e-6)  # logged in fp32
    assert first.norms == pytest.approx(alone.norms, rel=1e-11)
    assert min(alone.norms) > 0.1, "the clipping has to bite"
    assert first.evaluated == pytest.approx(alone.evaluated, rel=1e-11)
    assert first.tokens == alone.tokens
    for name, weight in alone.weights.items():
        assert relative_error(first.weights[name], weight) < 1e-10
        assert all(torch.equal(one.weights[name], first.weights[name]) for one in found)
    for mine, whole in zip(first.records, alone.records, strict=True):
        assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert mine["tokens"] == whole["tokens"]
        assert len(mine["exchange_seconds_by_rank"]) == mine["ranks"] == RANKS
    assert not any(one.records for one in found[1:])


DIVIDED = [  # groups (0: one process), batch size, accumulation, last step
    (2, 1, 2, 1),
    (0, 1, 4, 3),
    (4, 1, 1, 4),
    (1, 2, 2, 5),
]


def divided(rank: int, folder: Path, division: tuple[int, ...], resume: bool) -> Any:
    """A part of a run of four sequences a step, in two steps an epoch: losses, norms, weights."""
    groups, batch, accumulation, last = division
    layout: dict[str, Any] = {}
    if rank >= 0:
        sizes = {"dp_shard_size": groups, "cp_size": RANKS // groups}
        layout = {"parallelism_config": ParallelismConfig(**sizes)}
    with as_started(rank, RANKS):
        settings = arguments(
            folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            max_steps=5,
            save_strategy="steps",
            save_steps=5,
            **layout,
        )
        trainer = Trainer(
            tiny(),
            settings,
            train_dataset=masked(8),
            callbacks=[SavesAndStops(last)],
            oomb_config=CONFIG,
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.engine.close()
    return logged(trainer, "loss"), logged(trainer, "grad_norm"), trainer.model.state_dict()


class SavesAndStops(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == self._step


def test_goes_on_in_other_groups(world: World, tmp_path: Path) -> None:
    """As if nothing had changed: each step takes the next four sequences of the epoch."""
    losses, norms, weights = divided(-1, tmp_path / "unbroken", (0, 1, 4, 5), False)
    assert len(set(losses)) == 5
    for part, division in enumerate(DIVIDED):
        given = tmp_path / "run", division, part > 0
        found = [divided(-1, *given)] if division[0] == 0 else world.run(divided, *given)
    for one in found:
        assert one[0] == pytest.approx(losses, rel=1e-6)  # logged in fp32
        assert one[1] == pytest.approx(norms, rel=1e-11)
        for name, weight in weights.items():
            assert relative_error(one[2][name], weight) < 1e-10


def test_a_part_of_each_replica() -> None:
    """Of tensors in any structure, as ``preprocess_logits_for_metrics`` may give them."""

    class Others:
        """The second replica has four more."""

        device = torch.device("cpu")

        def all_gather(self, own: torch.Tensor) -> torch.Tensor:
            return torch.stack([own, own + 4])

    accelerator = object.__new__(ReplicaAccelerator)
    accelerator.replicas = replicas = object.__new__(Replicas)
    replicas.number, replicas._others = 2, Others()  # type: ignore[assignment]
    own = torch.tensor([[0, 1], [2, 3]])
    first, named = accelerator.gather((own, {"second": own[:, 0]}))
    assert first.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert named["second"].tolist() == [0, 2, 4, 6]
    assert accelerator.gather(torch.tensor(3)).tolist() == [3, 7]
    reduced = {how: accelerator.reduce(own[0], how).tolist() for how in ("sum", "mean", "max")}
    assert reduced == {"sum": [4, 6], "mean": [2, 3], "max": [4, 5]}


def in_fsdp_environment(rank: int, folder: Path) -> str:
    """What a trainer says where accelerate would wrap the model."""
    with as_started(rank, RANKS), pytest.MonkeyPatch.context() as patch:
        settings = arguments(folder)
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(ValueError) as refused:
            Trainer(tiny(), settings, oomb_config=CONFIG)
    return str(refused.value)


def test_fsdp_of_accelerate_is_refused(world: World, tmp_path: Path) -> None:
    found = world.run(in_fsdp_environment, tmp_path)
    assert all("ACCELERATE_USE_FSDP: expected unset" in text for text in found), found


def with_optimizer(rank: int, folder: Path) -> str:
    """What a trainer says that is to shard weights of which an optimizer is there already."""
    with as_started(rank, RANKS):
        model = tiny()
        optimizers = (torch.optim.SGD(model.parameters()), None)
        settings = {"optimizers": optimizers, "shard_weights": True, "oomb_config": CONFIG}
        with pytest.raises(ValueError) as refused:
            Trainer(model, arguments(folder), **settings)
        assert not any(isinstance(x, DTensor) for x in model.parameters())
    return str(refused.value)


def test_an_optimizer_of_whole_weights_is_refused(world: World, tmp_path: Path) -> None:
    """It would step on parameters that the shards have replaced."""
    found = world.run(with_optimizer, tmp_path)
    assert all("optimizers: expected no optimizer beside" in text for text in found), found


def objects_of(rank: int) -> list[list[int]]:
    """What ranks gather as objects, where two share a sequence."""
    with as_started(rank, RANKS):
        accelerator: Any = Accelerator(cpu=True)
        accelerator.__class__ = ReplicaAccelerator
        accelerator.replicas = Replicas(RANKS, 2, torch.device("cpu"))
        own = accelerator.replicas.own
        try:
            tensors = accelerator.gather_for_metrics(torch.tensor([own, own + 2]), True)
            return [[int(x) for x in tensors], accelerator.gather_for_metrics([own], True)]
        finally:
            accelerator.replicas.close()


def test_objects_of_each_replica(world: World) -> None:
    """``eval_use_gather_object=True``."""
    assert world.run(objects_of) == [[[0, 2, 1, 3], [0, 1]]] * RANKS


def with_routers(rank: int, folder: Path, replicas: int) -> Any:
    """Losses, evaluations and weights of a mixture of experts; or why it is refused."""
    layout = {}
    if rank >= 0:
        sizes = {"dp_shard_size": replicas, "cp_size": RANKS // replicas}
        layout = {"parallelism_config": ParallelismConfig(**sizes)}
    with as_started(rank, RANKS):
        given = {"args": arguments(folder, max_steps=2, **layout), "oomb_config": CONFIG}
        data = masked()
        try:
            trainer = Trainer(
                routed("Qwen3Moe"), train_dataset=data, eval_dataset=data[:3], **given
            )
        except ValueError as error:
            return str(error)
        trainer.train()
        trainer.evaluate()
        trainer.engine.close()
    return logged(trainer, "loss"), logged(trainer, "eval_loss"), trainer.model.state_dict()


@pytest.mark.slow
def test_a_loss_of_routers(world: World, tmp_path: Path) -> None:
    """Ranks of one sequence add it once; groups of them would each add it whole."""
    world.start(with_routers, tmp_path / "ranks", 1)
    losses, evaluated, weights = with_routers(-1, tmp_path / "alone", 1)
    for found in world.answers():
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(evaluated, rel=1e-6)
        for name, weight in weights.items():
            assert relative_error(found[2][name], weight) < 1e-10
    for text in world.run(with_routers, tmp_path / "groups", 2):
        assert "cp_size: expected all processes to share each sequence, got 2 groups" in text


def fine_tuned(rank: int, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """TRL's trainer on packed text: losses, evaluations, tokens."""
    from oomb.hf import SFTTrainer

    with as_started(rank, RANKS):
        layout = {} if rank < 0 else {"dp_shard_size": 2, "cp_size": 2}
        config = {"parallelism_config": ParallelismConfig(**layout)} if layout else {}
        settings = sft_arguments(
            folder,
            max_length=64,
            packing=True,
            max_steps=2,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=2 if layout else 4,
            eval_strategy="steps",
            eval_steps=2,
            **config,
        )
        trainer = SFTTrainer(
            tiny(),
            args=settings,
            train_dataset=prompts(),
            eval_dataset=prompts(6),
            processing_class=tokenizer(),
            oomb_config=CONFIG,
        )
        trainer.train()
        trainer.engine.close()
    return tuple(logged(trainer, name) for name in ("loss", "eval_loss", "num_tokens"))  # type: ignore[return-value]


@pytest.mark.slow
def test_sft_as_in_one_process(world: World, tmp_path: Path) -> None:
    world.start(fine_tuned, tmp_path / "ranks")
    losses, evaluated, tokens = fine_tuned(-1, tmp_path / "alone")
    for found in world.answers():
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(evaluated, rel=1e-6)
        assert found[2] == tokens
