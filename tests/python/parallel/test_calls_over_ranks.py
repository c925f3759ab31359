"""Calls over ranks beside plain training: adapters, dropout, evaluation, engines, bad input."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import oomb
from engine.models import make
from engine.reference import (
    Result,
    assert_equal,
    assert_identical,
    chunked,
    random_ids,
    relative_error,
    take_gradients,
)
from oomb.core.fit import Room
from oomb.core.pools import Pools
from oomb.parallel import group
from oomb.parallel.job import Job, of_ranks

from .world import World, meshes

CONFIG: dict[str, Any] = {"chunk_size": 16, "page_size": 8}
FOUR_HEADS = {"num_key_value_heads": 4, "num_attention_heads": 8, "num_hidden_layers": 2}


def small(**settings: Any) -> Any:
    return make("qwen2", **{**FOUR_HEADS, **settings})


def in_group(ranks: int) -> bool:
    return meshes[ranks].get_coordinate() is not None


# Adapters -----------------------------------------------------------------------------------------


def with_adapters(dropout: float = 0.0) -> Any:
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=dropout
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(small(), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model.double()


def train_adapters(rank: int, recompute: str, weights: Any) -> Result:
    model, ids = with_adapters(), random_ids(2, 75)
    config = oomb.Config(**CONFIG, recompute=recompute, weights=weights)
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        step = engine.forward_backward(ids, ids)
    return Result(step.loss, take_gradients(model), step)


@pytest.mark.parametrize(
    ("recompute", "weights"), [("none", "device"), ("layer", "device"), ("layer", "host")]
)
def test_adapters(world: World, recompute: str, weights: str) -> None:
    world.start(train_adapters, recompute, weights)
    ids = random_ids(2, 75)
    alone = chunked(with_adapters(), oomb.Config(**CONFIG), ids, ids)
    for found in world.answers():
        assert_equal(found, alone)


# Combinations -------------------------------------------------------------------------------------

TURNED = "model.layers.0.mlp.up_proj.weight"  # columns first in memory


def with_turned_weight(rank: int) -> Result:
    model = make("qwen2", torch.bfloat16, **FOUR_HEADS)
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().t().clone().t())
    ids = random_ids(2, 75)
    mesh = None if rank < 0 else meshes[2]
    with oomb.Engine(model, oomb.Config(**CONFIG), mesh=mesh) as engine:
        step = engine.forward_backward(ids, ids)
    return Result(step.loss, take_gradients(model), step)


def test_a_weight_with_columns_first(world: World) -> None:
    world.start(with_turned_weight)
    expected = with_turned_weight(-1).gradients[TURNED].double()
    found = world.answers()
    for one in found:
        assert_identical(one, found[0])
        assert relative_error(one.gradients[TURNED].double(), expected) < 2**-6  # bf16


def own_loss(logits: torch.Tensor, rows: oomb.TokenRows) -> torch.Tensor:
    """Cross-entropy with label smoothing, times a factor of the place."""
    terms = nn.functional.cross_entropy(logits, rows.targets, reduction="none", label_smoothing=0.1)
    return terms * (1 + rows.positions / 75 + rows.sequences)


def with_own_loss(rank: int) -> Result:
    model, ids = small(), random_ids(2, 75)
    mesh = None if rank < 0 else meshes[2]
    with oomb.Engine(model, oomb.Config(**CONFIG), mesh=mesh) as engine:
        step = engine.forward_backward(ids, ids, token_loss=own_loss)
    return Result(step.loss, take_gradients(model), step)


def test_a_loss_of_ones_own(world: World) -> None:
    world.start(with_own_loss)
    alone = with_own_loss(-1)
    found = world.answers()
    for one in found:
        assert_identical(one, found[0])
        assert_equal(one, alone)


class Recorded(nn.Module):
    """Dropout that notes what it drew, by layer and phase."""

    def __init__(self, notes: list[torch.Tensor]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (torch.rand_like(x) > 0.25).to(x.dtype)
        self.notes.append(mask.detach().clone())
        return x * mask / 0.75


def draw_numbers(rank: int, recompute: str) -> list[torch.Tensor]:
    model, notes = small(num_hidden_layers=1), []
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, Recorded(notes))
    torch.manual_seed(0)
    model.train()
    ids = random_ids(1, 33)
    with oomb.Engine(model, oomb.Config(**CONFIG, recompute=recompute), mesh=meshes[2]) as engine:
        notes.clear()
        engine.forward_backward(ids, ids)
    return notes


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_ranks_draw_other_numbers_and_each_pass_the_same(world: World, recompute: str) -> None:
    """One layer: the fill ends before its MLP, so a chunk's numbers are drawn in the sweep alone,
    and again where it is recomputed."""
    first, _, second, _ = world.run(draw_numbers, recompute)
    assert len(first) == (4 if recompute == "layer" else 2)
    if recompute == "layer":
        for notes in (first, second):
            assert torch.equal(notes[0], notes[1])
            assert torch.equal(notes[2], notes[3])
    assert not torch.equal(first[0], second[0])


# Evaluation ---------------------------------------------------------------------------------------


def evaluate(rank: int, every_token: bool) -> Any:
    model, ids = small(), random_ids(2, 43)
    labels = ids.clone()
    labels[1, 20:30] = -100
    seen: dict[int, torch.Tensor] = {}
    on_logits = seen.__setitem__ if every_token else None
    with oomb.Engine(model, oomb.Config(**CONFIG), mesh=meshes[2]) as engine:
        step = engine.evaluate(ids, labels, return_logprobs=True, on_logits=on_logits)
    assert all(p.grad is None for p in model.parameters())
    return step.loss, step.logprobs, seen


@pytest.mark.parametrize("every_token", [False, True])
def test_evaluation_has_all_log_probabilities_on_each_rank(world: World, every_token: bool) -> None:
    world.start(evaluate, every_token)
    model, ids = small(), random_ids(2, 43)
    labels = ids.clone()
    labels[1, 20:30] = -100
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    ours = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    expected = torch.zeros(2, 43, dtype=torch.float64)
    expected[:, 1:] = ours.masked_fill(labels[:, 1:] == -100, 0)
    found = world.answers()
    for loss, logprobs, _ in found:
        assert relative_error(logprobs, expected) <= 1e-12
        assert relative_error(loss, -expected.sum() / (labels[:, 1:] != -100).sum()) <= 1e-12
    if every_token:  # each rank is shown the logits of its own tokens
        parts = {**found[0][2], **found[2][2]}
        whole = torch.cat([parts[begin] for begin in sorted(parts)], dim=1)
        assert relative_error(whole, logits) <= 1e-12


# Engines ------------------------------------------------------------------------------------------


def take_turns(rank: int) -> list[Result]:
    """Two engines whose models have other heads, in turn."""
    models = [small(), small(num_key_value_heads=2, num_attention_heads=2, head_dim=16)]
    ids, found = random_ids(1, 43), []
    engines = [oomb.Engine(model, oomb.Config(**CONFIG), mesh=meshes[2]) for model in models]
    for turn in range(4):
        step = engines[turn % 2].forward_backward(ids, ids)
        found.append(Result(step.loss, take_gradients(models[turn % 2]), step))
    for engine in engines:
        engine.close()
    return found


def test_engines_take_turns(world: World) -> None:
    for first, second, again, once_more in world.run(take_turns):
        assert_identical(again, first)
        assert_identical(once_more, second)
        assert not torch.equal(first.loss, second.loss)


# Memory -------------------------------------------------------------------------------------------


def with_less_memory(rank: int, config: oomb.Config, least: int) -> Result:
    """Rank 2 finds room on the device for fewer pages than the call has."""
    model, ids = small(), random_ids(1, 160)
    room = Pools.room

    def less(*arguments: Any) -> Room:
        return replace(room(*arguments), driver=least)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(Pools, "room", less)
        with oomb.Engine(model, config, mesh=meshes[2]) as engine:
            step = engine.forward_backward(ids, ids)
    return Result(step.loss, take_gradients(model), step)


@pytest.mark.parametrize("keep_outputs", ["none", "auto"])
def test_all_take_what_the_poorest_rank_has(world: World, keep_outputs: str) -> None:
    """Chunks of a fill whose pages spill take turns: ranks that differed would send another order
    of messages."""
    settings = {"attention": oomb.TopKPages(budget=2), "host_memory": "64MiB"}
    config = oomb.Config(**CONFIG, **settings, keep_outputs=keep_outputs)  # type: ignore[arg-type]
    least = 26 * 2 * (2 * 8 * 8 * 8)  # pages of two heads
    world.start(with_less_memory, config, least)
    ids = random_ids(1, 160)
    alone = chunked(small(), config, ids, ids)
    first, second, third, _ = world.answers()
    assert_equal(first, alone)
    assert_identical(third, first)
    assert second.step is not None and second.step.stats.host_peak_bytes == 0
    whole = second.step.stats.device_peak_bytes
    for poor in (first, third):
        assert poor.step is not None and poor.step.stats.device_peak_bytes < whole
        assert poor.step.stats.host_peak_bytes > 0


def with_a_hook(rank: int, divides: bool) -> Result | None:
    """An observer of products on the first rank, where nothing of them can be kept then."""
    model, ids = small(intermediate_size=512), random_ids(1, 160)
    if not in_group(2):
        return None
    if rank < 2:  # 2 and 3 are the second of their sequences
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda module, x, y: None)
    heads = {"divide_pages": True} if divides else {}
    with oomb.Engine(model, oomb.Config(**CONFIG, **heads), mesh=meshes[2]) as engine:
        step = engine.forward_backward(ids, ids)
    return Result(step.loss, take_gradients(model), step)


@pytest.mark.parametrize("divides", [False, True])
def test_ranks_keep_what_all_of_them_can(world: World, divides: bool) -> None:
    world.start(with_a_hook, divides)
    ids = random_ids(1, 160)
    alone = chunked(small(intermediate_size=512), oomb.Config(**CONFIG), ids, ids)
    assert alone.step is not None and alone.step.stats.kept_mlp_output_bytes > 0
    for result in world.answers():
        assert result.step is not None
        assert_equal(result, alone)
        assert result.step.stats.kept_mlp_output_bytes == 0


# Bad input ----------------------------------------------------------------------------------------


def refused(rank: int, what: str) -> str:
    """The error that a rank gets; rank 2 is the second of its sequence and differs."""
    model, ids = small(), random_ids(1, 40)
    settings, keywords, mesh = dict(CONFIG), {}, meshes[2]
    odd = rank == 2
    labels = ids.clone()
    if what == "labels" and odd:
        labels[0, 5] = -100
    if what == "config" and odd:
        settings["chunk_size"] = 32
    if what == "weights" and odd:
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1e-9
    if what == "mode" and odd:
        model.train()
    if what == "bad argument" and odd:
        labels[0, 5] = 10**6
    if what == "weights per token" and odd:
        keywords["loss_weights"] = torch.ones(1, 40)
    if what == "token_loss" and odd:
        keywords["token_loss"] = own_loss
    if what == "autocast":
        model = model.float()
    if what == "heads":
        model = small(num_attention_heads=3, num_key_value_heads=3)
    if what == "names":
        mesh = DeviceMesh("cpu", list(range(4)), mesh_dim_names=("sp",))
    if what == "dimensions":
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))
    if what == "no mesh":
        mesh = object()  # type: ignore[assignment]
    if what == "rule":
        wrong = {"choose": lambda rule, q, *_: torch.zeros(1)}
        settings["attention"] = type("Mine", (oomb.TopKPages,), wrong)(budget=2)
    if what == "wrapped":
        model = nn.DataParallel(model) if odd else model
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast" and odd)
    try:
        with oomb.Engine(model, oomb.Config(**settings), mesh=mesh) as engine, autocast:
            engine.forward_backward(ids, labels, **keywords)
    except (ValueError, oomb.Error) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_value_of_each_rank_of_a_mesh(world: World) -> None:
    assert world.run(values_of_a_sequence) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def waiting_for_the_first(rank: int) -> str:
    """Work of rank 0 takes longer than a collective of a call may."""

    def work() -> str:
        time.sleep(1.5)
        return "tokens"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "TIMEOUT", timedelta(seconds=0.5))
        job = Job()
        try:
            return job.by_first(work)
        finally:
            job.close()


def test_the_ranks_of_a_job_wait_for_long_work_of_the_first(world: World) -> None:
    assert world.run(waiting_for_the_first) == ["tokens"] * 4


def values_of_a_sequence(rank: int) -> list[int]:
    return of_ranks(meshes[2], rank)


# what differs: text that each rank of the sequence of ranks 0 and 2 reads
DIFFERENT = {
    "labels": "ValueError: labels: expected the same on all ranks of a sequence, got another on "
    "rank 2 than on rank 0",
    "config": "ValueError: config: expected the same on all ranks",
    "weights": "ValueError: weights of the model: expected the same on all ranks",
    "mode": "ValueError: model: expected the same on all ranks",
    "token_loss": "ValueError: token_loss: expected the same on all ranks",
    "autocast": "ValueError: torch.autocast: expected the same on all ranks",
    "weights per token": "ValueError: loss_weights: expected the same on all ranks",
    "bad argument": "ValueError: [rank 2] labels: expected values in",
    "wrapped": "UnsupportedModelError: [rank 2] DataParallel: models wrapped for distributed",
}
EVERYWHERE = {
    "heads": "mesh: expected ranks that can share the 3/3 query/key heads of the model, got 2 "
    "ranks, of which some would have no queries: share a sequence among 1",
    "names": "mesh: expected a dimension named 'cp', got ('sp',)",
    "dimensions": "mesh: expected the dimension 'cp' alone, got also dp",
    "no mesh": "mesh: expected a torch.distributed.device_mesh.DeviceMesh with a dimension 'cp'",
    "rule": "Mine.choose: expected contiguous int32 [1, 1, 1, 2] on cpu, got float32 [1] on cpu",
}


@pytest.mark.parametrize("what", [*DIFFERENT, *EVERYWHERE])
def test_every_rank_says_what_is_wrong(world: World, what: str) -> None:
    found = world.run(refused, what)
    if what in EVERYWHERE:
        assert all(EVERYWHERE[what] in text for text in found), found
    else:
        assert found[0] == found[2] and found[0].startswith(DIFFERENT[what]), found
        assert found[1] == found[3] == "no error"  # the other sequence
