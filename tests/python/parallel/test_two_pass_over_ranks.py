"""Losses of per-token values on ranks that share sequences, against one ordinary backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import oomb
from engine.models import make
from engine.reference import EXACT, Gradients, relative_error, take_gradients
from engine.test_shared_prefixes import GROUPS, Batch, assert_same
from engine.test_shared_prefixes import ordinary as ordinary_of_rows
from engine.two_pass_losses import (
    IDS,
    LABELS,
    LOSSES,
    MASK,
    assert_close,
    ordinary,
    ordinary_values,
    values_of,
    wanted,
)
from oomb.core.token_values import STATISTICS

from .test_exact_over_ranks import heads
from .world import World, meshes

PLAIN: dict[str, Any] = {"chunk_size": 16, "page_size": 8}
SLOT = 2 * 8 * 8 * 8  # bytes of a page for one KV head


def model_for(ranks: int, name: str = "qwen3") -> Any:
    return make(name, **heads(ranks), num_hidden_layers=2)


def here(ranks: int) -> bool:
    return meshes[ranks].get_coordinate() is not None


# Losses -------------------------------------------------------------------------------------------


def sweep_of(rank: int, loss: str, ranks: int, settings: dict[str, Any], between: bool) -> Any:
    """Gradients of two steps of one engine; ``between``: a call comes between two passes."""
    if not here(ranks):
        return None
    model, (function, names) = model_for(ranks), LOSSES[loss]
    found = []
    with oomb.Engine(model, oomb.Config(**{**PLAIN, **settings}), mesh=meshes[ranks]) as engine:
        for _ in range(2):
            with engine.two_pass(IDS, LABELS, attention_mask=MASK, **wanted(names)) as call:
                if between:
                    engine.evaluate(IDS, LABELS)
                function(values_of(call)).backward()
                stats = call.sweep()
            found.append(take_gradients(model))
    assert stats.exchange_seconds > 0
    return found


def compare(world: World, loss: str, ranks: int, settings: dict[str, Any], between: bool) -> None:
    world.start(sweep_of, loss, ranks, settings, between)
    expected = ordinary(model_for(ranks), LOSSES[loss][0])
    answers = [found for found in world.answers() if found is not None]
    for first, again in answers:
        assert_close(first, expected)
        for gradients in (first, again):
            assert all(torch.equal(x, answers[0][0][name]) for name, x in gradients.items())


QUICK = [("grpo", 2), ("last-token", 2), ("contrastive", 3), ("dpo", 4)]


@pytest.mark.parametrize(
    ("loss", "ranks"),
    [*QUICK, *(pytest.param(loss, 3, marks=pytest.mark.slow) for loss in LOSSES)],
)
@pytest.mark.sampled(3)
def test_equals_one_backward(world: World, loss: str, ranks: int) -> None:
    compare(world, loss, ranks, {}, between=False)


SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "layer"},
    "kept outputs": {"keep_outputs": "all"},
    "two tiers": {"device_memory": 26 * SLOT * 2, "host_memory": "4MiB"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(world: World, name: str) -> None:
    compare(world, "grpo", 2, SETTINGS[name], between=False)


def test_another_call_between_the_passes(world: World) -> None:
    compare(world, "last-token", 2, {}, between=True)


# Values -------------------------------------------------------------------------------------------


def values(rank: int) -> Any:
    model = model_for(2)
    arguments: dict[str, Any] = {"entropies": True, "hidden": True, "statistics": STATISTICS}
    with (
        oomb.Engine(model, oomb.Config(**PLAIN), mesh=meshes[2]) as engine,
        torch.no_grad(),
        engine.two_pass(IDS, LABELS, attention_mask=MASK, temperature=0.7, **arguments) as call,
    ):
        return values_of(call), call.statistics


def test_each_rank_has_all_values(world: World) -> None:
    world.start(values)
    with torch.no_grad():
        expected = ordinary_values(model_for(2), 0.7)
    for found, statistics in world.answers():
        for name, value in (found | statistics).items():
            rows = MASK == 1 if name == "hidden" else torch.ones_like(MASK, dtype=torch.bool)
            error = relative_error(value[rows].double(), expected[name][rows].double())
            assert error <= EXACT, name


# Rows that begin alike ----------------------------------------------------------------------------


def tree_of(rank: int, group: str, settings: dict[str, Any], ranks: int) -> Any:
    if not here(ranks):
        return None
    model, batch = model_for(ranks), Batch(GROUPS[group])
    mesh = meshes[ranks]
    with oomb.Engine(model, oomb.Config(**{**PLAIN, **settings}), mesh=mesh) as engine:
        arguments: dict[str, Any] = {"entropies": True, "share_prefixes": True}
        with engine.two_pass(**batch.arguments, **arguments) as call:  # type: ignore[arg-type]
            batch.loss(values_of(call)).backward()
            found = {name: value.detach() for name, value in values_of(call).items()}
            call.sweep()
    return found, take_gradients(model)


@pytest.mark.parametrize(
    ("group", "ranks", "settings"),
    [
        ("nested", 2, {}),
        ("prompt of 33", 4, {}),
        ("nested", 2, {"recompute": "layer", "keep_outputs": "all"}),
        pytest.param("completions up to borders", 3, {}, marks=pytest.mark.slow),
    ],
)
def test_rows_that_begin_alike(
    world: World, group: str, ranks: int, settings: dict[str, Any]
) -> None:
    world.start(tree_of, group, settings, ranks)
    expected = ordinary_of_rows(model_for(ranks), Batch(GROUPS[group]))
    for found in world.answers():
        if found is not None:
            assert_same(found, expected)


# Mistakes -----------------------------------------------------------------------------------------


def mistaken(rank: int, what: str) -> tuple[str, bool, Gradients]:
    """A rank's error, whether its gradients stayed, and those of the next call."""
    model, odd = model_for(2), rank == 2
    loss = LOSSES["dpo"][0]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    text = "no error"
    with oomb.Engine(model, oomb.Config(**PLAIN), mesh=meshes[2]) as engine:
        try:
            with engine.two_pass(
                IDS, LABELS, attention_mask=MASK, entropies=odd and what == "values"
            ) as call:
                if odd and what == "exception":
                    raise ZeroDivisionError("in a loss")
                if odd and what == "leaves":
                    sweeps = False
                else:
                    sweeps = True
                    (loss(values_of(call)) * (2 if odd and what == "loss" else 1)).backward()
                if odd and what == "no gradient":
                    call.logprobs.grad = None
                if sweeps:
                    call.sweep()
        except (ZeroDivisionError, ValueError, oomb.Error) as error:
            text = f"{type(error).__name__}: {error}"
        kept = all(bool((p.grad == 0.5).all()) for p in model.parameters())
        model.zero_grad()
        with engine.two_pass(IDS, LABELS, attention_mask=MASK) as call:
            loss(values_of(call)).backward()
            call.sweep()
    return text, kept, take_gradients(model)


MISTAKES = {
    "values": "ValueError: entropies: expected the same on all ranks of a sequence, got another on "
    "rank 2",
    "exception": "Error: [rank 2] ZeroDivisionError: in a loss",
    "leaves": "ValueError: call.sweep(): expected the same on all ranks of a sequence, got another "
    "on rank 2",
    "no gradient": "Error: [rank 2] call.sweep: expected a gradient on call.logprobs, got none",
    "loss": "call.logprobs.grad: expected the same on all ranks of a sequence, got another on rank",
}


@pytest.mark.parametrize("what", MISTAKES)
def test_every_rank_says_what_is_wrong(world: World, what: str) -> None:
    world.start(mistaken, what)
    expected = ordinary(model_for(2), LOSSES["dpo"][0])
    answers = world.answers()
    for rank, (text, kept, following) in enumerate(answers):
        if rank in (1, 3):
            assert text == "no error"
            continue
        own = what == "exception" and rank == 2
        assert ("ZeroDivisionError: in a loss" if own else MISTAKES[what]) in text, answers
        assert kept
        assert_close(following, expected)


class OfEachRank(oomb.SampledChunks):
    """A rule that draws by the rank, as one with a generator that nobody seeded would."""

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return [meshes[2].get_local_rank(), num_chunks - 1]


def drawn_alone(rank: int) -> str:
    if not here(2):
        return ""
    model = model_for(2)
    rule = OfEachRank(keep=0.5)
    with oomb.Engine(model, oomb.Config(**PLAIN, backward=rule), mesh=meshes[2]) as engine:
        try:
            with engine.two_pass(IDS, LABELS, attention_mask=MASK) as call:
                call.logprobs.sum().backward()
                call.sweep()
        except ValueError as error:
            assert all(p.grad is None for p in model.parameters())
            return str(error)
    return "no error"


def test_ranks_that_draw_other_chunks(world: World) -> None:
    expected = "backward.draw: expected the same on all ranks of a sequence, got another on rank"
    said = [text for text in world.run(drawn_alone) if text]
    assert len(said) >= 2 and all(expected in text for text in said), said


# Sharded weights ----------------------------------------------------------------------------------


def with_shards(rank: int, policy: Any) -> Gradients:
    model = model_for(2)
    for layer in model.model.layers:
        fully_shard(layer, mesh=meshes[2])
    fully_shard(model, mesh=meshes[2])
    loss, names = LOSSES["grpo"]
    config = oomb.Config(**PLAIN, sharded_weights=policy)
    with (
        oomb.Engine(model, config, mesh=meshes[2]) as engine,
        engine.two_pass(IDS, LABELS, attention_mask=MASK, **wanted(names)) as call,
    ):
        loss(values_of(call)).backward()
        call.sweep()
    gradients: dict[str, Any] = take_gradients(model)
    return {name: gradient.full_tensor() for name, gradient in gradients.items()}


@pytest.mark.parametrize("policy", ["zero1", "zero3"])
def test_weights_may_be_sharded(world: World, policy: str) -> None:
    world.start(with_shards, policy)
    expected = ordinary(model_for(2), LOSSES["grpo"][0])
    for found in world.answers():
        assert_close(found, expected)
