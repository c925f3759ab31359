"""Images among tokens of a sequence that ranks share: towers, deepstack, tokens seen both ways."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

import oomb
from engine.image_models import Batch, batch_of, make_with_images
from engine.recurrent_models import nothing_rounds_to_float32
from engine.reference import (
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    take_gradients,
)
from engine.test_images import PLACES, image

from .world import World, one_group


@dataclass(frozen=True)
class Case:
    """A model, a batch and a call."""

    family: str
    places: tuple[list[int], ...] = PLACES["around borders"]
    tokens: int = 70
    heads: tuple[int, int] = (4, 2)  # of queries and keys
    trained: str = "all"  # or "decoder", or "tower", or "all but embeddings"
    config: dict[str, Any] = field(default_factory=dict)
    spills: bool = False


CASES = {
    **{
        f"{family}, {name}": Case(family, places)
        for family in ("qwen3-vl", "gemma3")
        for name, places in PLACES.items()
    },
    **{family: Case(family) for family in ("qwen3.5", "gemma4")},
    **{family: Case(family, ([5, 30], [13])) for family in ("qwen2.5-vl", "qwen3-vl-moe")},
    "recompute": Case("qwen3-vl", config={"recompute": "layer"}),
    "both ways, recompute": Case("gemma3", config={"recompute": "layer"}),
    "states, recompute": Case("qwen3.5", config={"recompute": "layer"}),
    "two tiers": Case("qwen3-vl", tokens=100, spills=True, config={"recompute": "layer"}),
    "frozen tower": Case("qwen3-vl", trained="decoder"),
    "both ways, frozen tower": Case("gemma3", trained="decoder"),
    "tower alone": Case("qwen3-vl", trained="tower"),
    "both ways, tower alone": Case("gemma4", trained="tower"),
    "on one rank alone": Case("qwen3-vl", ([0], [16])),
    "on one rank alone, frozen embedding": Case(
        "qwen3-vl", ([0], [16]), trained="all but embeddings"
    ),
    "tower alone, on one rank alone": Case("qwen3-vl", ([0], [16]), trained="tower"),
    "tail of one token": Case("qwen3-vl", ([11, 31],), tokens=66),
    "one token, an image's": Case("qwen3-vl", ([59],), tokens=66),
}
SIX = {
    "three ranks": Case("qwen3-vl", heads=(6, 3)),
    "three ranks, both ways": Case("gemma3", heads=(6, 3)),
    "three ranks, tail of two": Case("qwen3-vl", heads=(6, 3), tokens=67),
}
COPIES = {
    "copies": Case("qwen3-vl", heads=(6, 2)),
    "copies, both ways": Case("gemma3", heads=(6, 2)),
    "divided, both ways": Case("gemma3", heads=(6, 2), config={"divide_pages": True}),
}


def model_of(case: Case) -> Any:
    queries, keys = case.heads
    sizes = {"num_attention_heads": queries, "num_key_value_heads": keys}
    model = make_with_images(case.family, **sizes)
    if case.trained == "all but embeddings":
        model.get_input_embeddings().requires_grad_(False)
    elif case.trained != "all":
        for name, parameter in model.named_parameters():
            of_tower = "vis" in name or "projector" in name
            wanted = parameter.requires_grad and of_tower == (case.trained == "tower")
            parameter.requires_grad_(wanted)
    return model


def config_of(case: Case) -> oomb.Config:
    settings: dict[str, Any] = {"chunk_size": 16, "page_size": 4, "recompute": "none"}
    if case.family.startswith("gemma"):  # chunks end between images
        settings |= {"chunk_size": 32, "page_size": 2}
    if case.spills:
        settings |= {"device_memory": 64 * 2**10, "host_memory": 2**24}
    return oomb.Config(**{**settings, **case.config})


def batch_for(case: Case) -> Batch:
    rows = [[image(case.family, begin) for begin in row] for row in case.places]
    return batch_of(case.family, rows, case.tokens)


def over_ranks(rank: int, case: Case, ranks: int) -> tuple[Result, Result] | None:
    """Two calls of one engine on a rank; None where it has no part in them."""
    if one_group[ranks].get_coordinate() is None:
        return None
    with nothing_rounds_to_float32():
        model, batch, results = model_of(case), batch_for(case), []
        with oomb.Engine(model, config_of(case), mesh=one_group[ranks]) as engine:
            for _ in range(2):
                step = engine.forward_backward(batch.input_ids, batch.input_ids, **batch.arguments)
                results.append(Result(step.loss, take_gradients(model), step))
            loss = engine.evaluate(batch.input_ids, batch.input_ids, **batch.arguments).loss
            assert abs(float(loss / step.loss) - 1) < 1e-13
    return results[0], results[1]


QUICK = (
    "qwen3-vl, around borders",
    "gemma3, around borders",
    "qwen3.5",
    "gemma4",
    "recompute",
    "frozen tower",
    "tower alone",
    "one token, an image's",
    "three ranks, both ways",
    "copies, both ways",
    "divided, both ways",
)
WHERE = [
    pytest.param(name, ranks, marks=[] if name in QUICK else pytest.mark.slow)
    for ranks, cases in ((2, CASES), (3, SIX), (4, COPIES))
    for name in cases
]


@pytest.mark.parametrize(("name", "ranks"), WHERE)
@pytest.mark.sampled(11, slow=3)
def test_case(world: World, name: str, ranks: int) -> None:
    case = (CASES | SIX | COPIES)[name]
    world.start(over_ranks, case, ranks)
    with nothing_rounds_to_float32():
        model, batch = model_of(case), batch_for(case)
        expected = ordinary(model, batch.input_ids, batch.input_ids, **batch.arguments)
        ids = batch.input_ids
        alone = chunked(model, config_of(case), ids, ids, **batch.arguments)
    assert any("vis" in name for name in expected.gradients) == (case.trained != "decoder")
    results = [found for found in world.answers() if found is not None]
    assert len(results) == ranks
    held = []
    for found, again in results:
        assert_equal(found, expected)
        assert_identical(found, results[0][0])
        assert_identical(again, found)
        assert found.step is not None
        held.append(found.step.stats.image_feature_bytes)
        assert not case.spills or found.step.stats.h2d_bytes > 0
    assert alone.step is not None
    sequences = len(results) // ranks
    assert sum(held) == sequences * alone.step.stats.image_feature_bytes > 0


def two_pass(rank: int, case: Case) -> Result | None:
    if one_group[2].get_coordinate() is None:
        return None
    with nothing_rounds_to_float32():
        model, batch = model_of(case), batch_for(case)
        with (
            oomb.Engine(model, config_of(case), mesh=one_group[2]) as engine,
            engine.two_pass(batch.input_ids, **batch.arguments) as call,
        ):
            loss = (call.logprobs[:, 1:].exp().sum() * 3).tanh()
            loss.backward()
            call.sweep()
        return Result(loss.detach(), take_gradients(model))


@pytest.mark.parametrize("family", [pytest.param("qwen3-vl", marks=pytest.mark.slow), "gemma3"])
def test_two_passes(world: World, family: str) -> None:
    case = Case(family)
    world.start(two_pass, case)
    with nothing_rounds_to_float32():
        model, batch = model_of(case), batch_for(case)
        ids = batch.input_ids
        logits = model(input_ids=ids, use_cache=False, **batch.arguments).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
        loss = (logprobs.exp().sum() * 3).tanh()
        loss.backward()
        expected = Result(loss.detach(), take_gradients(model))
    for found in filter(None, world.answers()):
        assert_equal(found, expected)


def without_room(*_: Any, **__: Any) -> None:
    raise oomb.OutOfMemoryError("no room for the tower", needed_bytes=2, available_bytes=1)


def sharded(rank: int, case: Case, policy: str) -> Result | None:
    if one_group[2].get_coordinate() is None:
        return None
    mesh = one_group[2]
    with nothing_rounds_to_float32():
        model, batch = model_of(case), batch_for(case)
        for layer in model.model.language_model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model.model.visual.blocks[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        settings = replace(config_of(case), sharded_weights=policy)
        ids, images = batch.input_ids, batch.arguments
        with oomb.Engine(model, settings, mesh=mesh) as engine:
            step = engine.forward_backward(ids, ids, **images)
            gradients: Any = take_gradients(model)
            assert abs(float(engine.evaluate(ids, ids, **images).loss / step.loss) - 1) < 1e-13
            # One rank without images, where all gather weights for them.
            given = images if mesh.get_local_rank() == 0 else {}
            with pytest.raises(ValueError, match="arguments for images: expected the same"):
                engine.evaluate(ids, ids, **given)
            with pytest.MonkeyPatch.context() as patch:
                if mesh.get_local_rank() == 1:
                    patch.setattr(model.model.visual, "forward", without_room)
                with pytest.raises(oomb.OutOfMemoryError, match="no room for the tower"):
                    engine.evaluate(ids, ids, **images)
            assert abs(float(engine.evaluate(ids, ids, **images).loss / step.loss) - 1) < 1e-13
    return Result(step.loss, {name: grad.full_tensor() for name, grad in gradients.items()})


@pytest.mark.parametrize(
    "policy", [pytest.param(x, marks=pytest.mark.slow) for x in ("zero1", "zero2")] + ["zero3"]
)
@pytest.mark.sampled(1)
def test_sharded_weights(world: World, policy: str) -> None:
    case = Case("qwen3-vl", config={"recompute": "layer"})
    world.start(sharded, case, policy)
    with nothing_rounds_to_float32():
        batch = batch_for(case)
        ids = batch.input_ids
        expected = ordinary(model_of(case), ids, ids, **batch.arguments)
    for found in filter(None, world.answers()):
        assert_equal(found, expected)


def differing(rank: int, what: str) -> list[str] | None:
    """What each call of a rank says, where one rank's images are not the other's."""
    if one_group[2].get_coordinate() is None:
        return None
    case = Case("qwen3-vl")
    model, batch = model_of(case), batch_for(case)
    ids, images = batch.input_ids, dict(batch.arguments)
    local = one_group[2].get_local_rank()
    if what == "pixels" and local == 1:
        images["pixel_values"] = images["pixel_values"] + 1
    elif what == "none" and local == 0:
        del images["pixel_values"]
    elif what == "grid" and local == 1:
        images["image_grid_thw"] = images["image_grid_thw"][:1]
    texts = []
    with oomb.Engine(model, config_of(case), mesh=one_group[2]) as engine:
        for call in (engine.forward_backward, engine.evaluate, engine.two_pass):
            with pytest.raises(Exception) as caught:  # torch's, on its own rank
                call(ids, ids, **images)
            texts.append(str(caught.value))
        assert all(p.grad is None for p in model.parameters())
        step = engine.evaluate(ids, ids, **batch.arguments)
        assert bool(step.loss.isfinite())
    return texts


@pytest.mark.parametrize("what", ["pixels", "none"])
def test_ranks_with_other_images_are_told_so(world: World, what: str) -> None:
    for found in filter(None, world.run(differing, what)):
        assert all(text.startswith("pixel_values: expected the same") for text in found), found


def test_an_error_of_one_ranks_tower_is_raised_by_all(world: World) -> None:
    of_first, of_other = world.run(differing, "grid")[::2]
    assert len(of_first) == 3
    for ours, theirs in zip(of_first, of_other, strict=True):
        assert "must match the size of tensor" in theirs
        assert ours == f"[rank 2] RuntimeError: {theirs}"
