"""What ranks send around attention, and which products are computed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oomb
from engine.models import make
from engine.reference import Result, assert_identical, random_ids, take_gradients
from oomb.core import chunk_run
from oomb.core.early_sums import EarlySums, parameters_done_with
from oomb.core.main_grad import MainGrads
from oomb.parallel.group import Ranks
from oomb.parallel.heads_over_ranks import HeadsOverRanks

from .world import World, meshes

HEADS = {"num_key_value_heads": 4, "num_attention_heads": 8}
CHUNK = 16
EVEN = 4 * CHUNK  # tokens of chunks that two ranks divide evenly
LAYERS = 2
AT_BEST: dict[str, Any] = {"keep_outputs": "all"}

SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "recompute": {"recompute": "layer"},
    "pointwise": {"recompute": "pointwise"},
    "pages": {"attention": oomb.TopKPages(budget=2)},
    "sampled": {"backward": oomb.SampledChunks(keep=0.6, seed=3)},
    "two tiers": {"device_memory": 26 * 2 * 8 * 8 * 8 * 2, "host_memory": 4 << 20},
    "groups of heads": {"head_groups": 2},
}


def step_of(model: Any, ids: torch.Tensor, **settings: Any) -> Result:
    config = oomb.Config(chunk_size=CHUNK, page_size=8, **{"recompute": "none", **settings})
    with oomb.Engine(model, config, mesh=meshes[2]) as engine:
        step = engine.forward_backward(ids, ids)
        return Result(step.loss, take_gradients(model), step)


# The same bits --------------------------------------------------------------------------------


def kept_or_not(rank: int, settings: dict[str, Any], tokens: int, name: str) -> list[Result]:
    model = make(name, **HEADS, num_hidden_layers=LAYERS)
    ids = random_ids(2, tokens)
    return [step_of(model, ids, **settings, keep_outputs=x) for x in ("none", "all", 0.5)]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.sampled(3)
def test_kept_outputs_change_no_bit(world: World, name: str) -> None:
    """One border is not where chunks of an even number of tokens have it."""
    for none, *kept in world.run(kept_or_not, SETTINGS[name], EVEN + 11, "qwen2"):
        for one in kept:
            assert_identical(one, none)


def test_outputs_that_cannot_be_kept_by_tokens_change_no_bit(world: World) -> None:
    """Sinks scale an output by its log-sum-exp, which lies by heads."""
    for none, *kept in world.run(kept_or_not, {}, EVEN, "gpt-oss"):
        for one in kept:
            assert_identical(one, none)


# What is sent ---------------------------------------------------------------------------------


def messages(rank: int, settings: dict[str, Any]) -> dict[str, int]:
    """Elements that each kind of exchange sends to the other rank, by where it takes place."""
    sent = {"fill": 0, "forward": 0, "backward": 0}
    exchange = Ranks.all_to_all

    def noted(self: Ranks, send: torch.Tensor, sizes: list[int], *others: Any) -> torch.Tensor:
        run = chunk_run._current.get()
        if torch._C._current_graph_task_id() >= 0:
            sent["backward"] += sum(sizes)
        elif run is not None:  # else gradients are summed
            sent["fill" if run.phase == "fill" else "forward"] += sum(sizes)
        return exchange(self, send, sizes, *others)

    model, ids = make("qwen2", **HEADS, num_hidden_layers=LAYERS), random_ids(1, EVEN + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "all_to_all", noted)
        step_of(model, ids, **settings)
    return sent


def test_the_sweep_sends_nothing_forwards_where_outputs_are_kept(world: World) -> None:
    found = world.run(messages, AT_BEST)[0]
    without = world.run(messages, {"keep_outputs": "none"})[0]
    # Outputs of the last chunk and of the last layer are computed in the sweep alone.
    kept = (EVEN // CHUNK - 1) * (LAYERS - 1)
    of_kept = kept * without["forward"] // (EVEN // CHUNK * LAYERS)
    assert found["forward"] == without["forward"] - of_kept > 0
    assert found["fill"] == without["fill"]
    # These send the same later, and o back to where it came from.
    assert found["backward"] == without["backward"] + of_kept


# Meanwhile ------------------------------------------------------------------------------------


def events(rank: int, settings: dict[str, Any]) -> list[str]:
    """Of the sweep, in order: exchanges around attention, and products of a layer's weights."""
    model, ids = make("qwen2", **HEADS, num_hidden_layers=LAYERS), random_ids(1, EVEN + 1)
    names = {p: name.split(".")[-2] for name, p in model.named_parameters() if "proj" in name}
    found: list[str] = []
    exchange, add, beside = Ranks.all_to_all, MainGrads.add_product, HeadsOverRanks.sum_beside
    summing: list[bool] = []

    def sent(ranks: Ranks, x: torch.Tensor, *others: Any) -> torch.Tensor:
        if torch._C._current_graph_task_id() >= 0 and not summing:
            found.append("sent")
        return exchange(ranks, x, *others)

    def summed(*arguments: Any) -> None:
        summing.append(True)
        beside(*arguments)
        summing.pop()

    def added(self: MainGrads, parameter: Any, *others: Any) -> None:
        if parameter in names:  # the head's comes before
            found.append(names[parameter])
        add(self, parameter, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "all_to_all", sent)
        patch.setattr(HeadsOverRanks, "sum_beside", summed)
        patch.setattr(MainGrads, "add_product", added)
        step_of(model, ids, **settings)
    return found


@pytest.mark.parametrize(("settings", "sends"), [({"keep_outputs": "none"}, 1), (AT_BEST, 2)])
def test_two_products_of_a_layer_wait_for_its_exchanges(
    world: World, settings: dict[str, Any], sends: int
) -> None:
    found = world.run(events, settings)[0]
    first, later = 9, 9 + sends - 1  # seven products, and exchanges
    chunks = [found[: 2 * first]]
    for begin in range(2 * first, len(found), first + later):
        chunks.append(found[begin : begin + first + later])
    assert len(chunks) == EVEN // CHUNK and sum(map(len, chunks)) == len(found)
    waits = found[2]  # of gate_proj and up_proj the one that comes last
    for number, chunk in enumerate(chunks):
        # Of the last layer, and of the last chunk, no output is kept.
        for own, sent in (chunk[:first], 1), (chunk[first:], sends if number else 1):
            assert own[0] == "down_proj"
            meanwhile = [waits, *["sent"] * sent, "o_proj", "sent"]  # without a GPU: before it
            if number == 0:  # here it shows which two it is
                meanwhile = [waits, "o_proj", "sent", "sent"]
            assert own[2 : 2 + len(meanwhile)] == meanwhile
            assert set(own[2 + len(meanwhile) :]) == {"q_proj", "k_proj", "v_proj"}


# Sums -----------------------------------------------------------------------------------------

EARLY: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": ("qwen2", {}, EVEN),
    "recompute": ("qwen2", {"recompute": "layer"}, EVEN),
    "one chunk": ("qwen2", {}, CHUNK),
    "sampled": ("qwen2", {"backward": oomb.SampledChunks(keep=0.6, seed=3)}, 2 * EVEN),
    "no products of the MLP": ("gpt-oss", {}, EVEN),
    "bf16 sums": ("qwen2", {"main_grad_dtype": "bfloat16"}, EVEN),
    "on the host": ("qwen2", {"main_grad_device": "host"}, EVEN),
    "tied, norms of heads": ("qwen3-tied", {}, EVEN),
    "pages": ("qwen2", {"attention": oomb.TopKPages(budget=2)}, EVEN),
}


def early_or_not(rank: int, name: str) -> tuple[Result, Result, set[str]]:
    """A step, one whose sums over ranks all come at its end, and what was summed early."""
    kind, settings, tokens = EARLY[name]
    model = make(kind, **HEADS, num_hidden_layers=LAYERS)
    if "bf16" in name:
        model = model.bfloat16()
    names = {parameter: name for name, parameter in model.named_parameters()}
    ids, early = random_ids(1, tokens + 1), set[str]()
    begin = MainGrads.sum_early

    def noted(self: MainGrads, placement: Any, parameters: Any) -> None:
        early.update(names[p] for p in parameters)
        begin(self, placement, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MainGrads, "sum_early", noted)
        found = step_of(model, ids, **settings)
        patch.setattr(EarlySums, "watch", lambda *_: None)
        late = step_of(model, ids, **settings)
    return found, late, early


@pytest.mark.parametrize("name", EARLY)
def test_sums_that_begin_early_have_the_same_bits(world: World, name: str) -> None:
    for found, late, early in world.run(early_or_not, name):
        assert_identical(found, late)
        # The first layer's, and a head's that is the embedding too, come at the end.
        parts = ("layers.1.", "lm_head")
        inside = {n for n in found.gradients if any(part in n for part in parts)}
        elsewhere = {"one chunk": set(), "on the host": {"lm_head.weight"}}
        assert early == elsewhere.get(name, inside)


class Shared(torch.nn.Module):
    def __init__(self, own: torch.nn.Module, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.own, self.weight = own, weight


def test_what_others_use_too_is_no_layers_own() -> None:
    linears = [torch.nn.Linear(2, 2) for _ in range(3)]
    head, tied = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    embedding = torch.nn.Embedding(2, 2)
    embedding.weight = tied.weight
    between = torch.nn.Linear(2, 2)
    between.bias.requires_grad_(False)
    layers = torch.nn.ModuleList(
        [Shared(linears[0], head.weight), Shared(linears[1], linears[2].weight), between]
    )
    layers.append(Shared(torch.nn.Identity(), linears[2].weight))
    model = torch.nn.Module()
    model.layers, model.head, model.tied, model.embedding = layers, head, tied, embedding
    found = []
    for of_head in (None, head, tied):
        model.get_output_embeddings = lambda of_head=of_head: of_head
        found.append([{id(p) for p in own} for own in parameters_done_with(layers, model)])
    own = [
        {id(linears[0].weight), id(linears[0].bias)},
        {id(linears[1].weight), id(linears[1].bias)},
        {id(between.weight)},
    ]
    # The first layer has the head's weight too, and the embedding that of the other head.
    assert found == [[*own, set()], [*own, {id(head.bias)}], [*own, set()]]
