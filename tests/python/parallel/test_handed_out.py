"""Sharded weights that rank 0 alone has read: the same bits as where every rank has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

from engine.models import make
from oomb.hf import Trainer
from trainer.runs import CONFIG, arguments, logged, packed

from .world import World, as_started

RANKS = 4
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


class Found(NamedTuple):
    """What a rank has after two steps."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    beside: dict[str, torch.Tensor]  # buffers, and a tensor that a module keeps
    tied: bool


def without_weights(model: Any, **changes: int) -> Any:
    """The same model on the meta device, in another dtype than a file may say."""
    config = type(model.config)(**{**model.config.to_dict(), **changes})
    with torch.device("meta"):
        bare = type(model)(config).to(torch.bfloat16).eval()
    bare.set_attn_implementation(model.config._attn_implementation)
    return bare


def trainer_of(model: Any, folder: Path) -> Trainer:
    """Two pairs of ranks, each with shards of its own."""
    layout = ParallelismConfig(dp_shard_size=2, cp_size=2)
    settings = arguments(folder, max_steps=2, parallelism_config=layout)
    return Trainer(model, settings, train_dataset=packed(), oomb_config=CONFIG, shard_weights=True)


def trained(rank: int, folder: Path, name: str, by_first: bool) -> Found:
    adapted = name == "adapters"
    bare = by_first and rank > 0
    dtype = torch.bfloat16 if adapted else torch.float32
    base: Any = make("qwen2-tied" if adapted else name, dtype, **HEADS)
    base = without_weights(base) if bare else base
    base.model.layers[1].kept = torch.arange(3.0, device="meta" if bare else "cpu")
    model = base
    if adapted:  # in fp32, so FSDP2 leaves them whole
        torch.manual_seed(rank if by_first else 0)  # rank 0's draw is all ranks'
        settings = {"r": 3, "target_modules": ["q_proj"], "init_lora_weights": False}
        model = get_peft_model(base, LoraConfig(**settings))
    with as_started(rank, RANKS):
        trainer = trainer_of(model, folder)
        trainer.train()
        trainer.engine.close()
    parameters = dict(model.named_parameters())
    assert all(isinstance(p, DTensor) != ("lora" in n) for n, p in parameters.items())
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    return Found(
        logged(trainer, "loss"),
        {name: tensor.detach() for name, tensor in whole.items()},
        {**dict(model.named_buffers()), "kept": base.model.layers[1].kept},
        base.lm_head.weight is base.model.embed_tokens.weight,
    )


@pytest.mark.parametrize("name", ["qwen3-tied", "gemma2", "adapters"])
@pytest.mark.sampled(2)
def test_the_bits_of_reading_everywhere(world: World, tmp_path: Path, name: str) -> None:
    """Tied embeddings; buffers that no file has: angles, and Gemma's scale of embeddings."""
    everywhere = world.run(trained, tmp_path, name, False)
    by_first = world.run(trained, tmp_path, name, True)
    assert any("embed_scale" in x for x in everywhere[0].beside) == (name == "gemma2")
    for mine, theirs in zip(by_first, everywhere, strict=True):
        assert mine.losses == theirs.losses and len(set(mine.losses)) == 2
        assert mine.tied and theirs.tied
        for own, other in ((mine.weights, theirs.weights), (mine.beside, theirs.beside)):
            assert own.keys() == other.keys()
            for key, value in other.items():
                assert own[key].dtype == value.dtype and torch.equal(own[key], value), key


def refused(rank: int, folder: Path) -> list[str]:
    """What trainers say of models without weights on rank 0, and of another model on rank 2."""
    model: Any = make("qwen3-tied", torch.float32, **HEADS)
    texts = []
    with as_started(rank, RANKS):
        for given in (
            without_weights(model),
            without_weights(model, intermediate_size=24) if rank == 2 else model,
            without_weights(model, tie_word_embeddings=False) if rank == 2 else model,
        ):
            with pytest.raises(ValueError) as error:
                trainer_of(given, folder)
            texts.append(str(error.value))
    return texts


def test_what_cannot_be_handed_out(world: World, tmp_path: Path) -> None:
    for nothing, shapes, tied in world.run(refused, tmp_path):
        assert "model: expected weights on rank 0, got a model on the meta device" in nothing
        assert (
            "model: expected on rank 2 the parameters of rank 0, which has model.layers" in shapes
        )
        assert "which has lm_head.weight as ('model.embed_tokens.weight'" in tied


def short_of_memory(rank: int, folder: Path) -> str:
    """What trainers say where rank 2 has no memory for its shards."""
    model: Any = make("qwen3-tied", torch.float32, **HEADS)
    given = without_weights(model) if rank else model
    if rank == 2:

        def to_empty(**_: object) -> None:
            raise torch.OutOfMemoryError("no room for shards")

        given.to_empty = to_empty
    with as_started(rank, RANKS), pytest.raises(Exception) as error:
        trainer_of(given, folder)
    return f"{error.type.__name__}: {error.value}"


def test_a_rank_without_memory_is_told_to_all(world: World, tmp_path: Path) -> None:
    for text in world.run(short_of_memory, tmp_path):
        assert "no room for shards" in text


def short_while_saving(rank: int, folder: Path) -> str:
    """What ranks say where rank 2 has no memory to gather whole weights; then it has."""
    model: Any = make("qwen3-tied", torch.float32, **HEADS)
    with as_started(rank, RANKS):
        trainer = trainer_of(model, folder)
        plain, asked = torch.Tensor.new_empty, list[object]()

        def new_empty(*arguments: Any, **keywords: Any) -> torch.Tensor:
            asked.append(arguments)
            if len(asked) == 1:
                raise torch.OutOfMemoryError("no room to gather")
            return plain(*arguments, **keywords)

        with pytest.MonkeyPatch.context() as patched:
            if rank == 2:
                patched.setattr(torch.Tensor, "new_empty", new_empty)
            with pytest.raises(Exception) as error, trainer.whole_weights():
                pass
            with trainer.whole_weights():
                whole = trainer._whole_weights
    assert whole is not None and (rank != 0) == (whole["lm_head.weight"] is None)
    return f"{error.type.__name__}: {error.value}"


def test_a_rank_without_memory_to_gather_is_told_to_all(world: World, tmp_path: Path) -> None:
    for text in world.run(short_while_saving, tmp_path):
        assert "[rank 2] no room to gather" in text
