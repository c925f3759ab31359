"""Pages of a key/value head that ranks divide: who has which, how much memory, which calls."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch.distributed.fsdp import fully_shard

import oomb
from engine.models import make
from engine.reference import EXACT, Result, assert_equal, chunked, random_ids, take_gradients
from engine.test_shared_prefixes import GROUPS, Batch, assert_same
from engine.test_shared_prefixes import ordinary as ordinary_of_rows
from engine.two_pass_losses import values_of
from oomb.core.divided_chunks import Division, KeyNumbers
from oomb.core.layout import Chunks, GradientReach
from oomb.core.page_demand import PageDemand
from oomb.core.tiers import PageLayout
from oomb.core.tree import TreeChunks
from oomb.engine.ranks import shapes_here
from oomb.model.layer_shape import LayerShape
from oomb.parallel.list_parts import closed_up, joined
from oomb.plan.duration import forward_seconds
from oomb.plan.exchange import exchange_seconds
from oomb.plan.machine import Machine
from oomb.plan.planner import Planner
from oomb.trace.meter import Work
from oomb.trace.trace import Trace

from .world import World, meshes

PLAIN: dict[str, Any] = {"chunk_size": 16, "page_size": 8}
SLOT = 2 * 8 * 8 * 8  # bytes of a page for one KV head

# Who has what ------------------------------------------------------------------------------------

WHOLE = {
    "plain": Chunks(100, 16, 8),
    "a tail of one token": Chunks(97, 16, 8),
    "fewer chunks than ranks": Chunks(20, 16, 8),
    "chunks of several sizes": TreeChunks(
        64, 24, 8, (16, 40, 48, 64), (((0, 0),), ((0, 2),), ((0, 5),), ((0, 6),)), (0, 2, 5, 6, 6)
    ),
    "branches": TreeChunks.of_stretches([(-1, 40), (0, 48), (0, 21), (1, 5)], 16, 8, 8),
}


def numbers_of_pages(whole: Chunks, ranks: int) -> list[dict[int, int]]:
    """Of each rank: its number of each page of the sequence that it has."""
    numbers: list[dict[int, int]] = [{} for _ in range(ranks)]
    for chunk in range(whole.number):
        own = numbers[chunk % ranks]
        for page in range(*whole.pages(chunk)):
            own[page] = len(own)
    return numbers


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", WHOLE)
def test_ranks_have_every_page_once(name: str, ranks: int) -> None:
    whole = WHOLE[name]
    for rank, own in enumerate(numbers_of_pages(whole, ranks)):
        division = Division(ranks, rank)
        chunks = division.chunks(whole)
        assert chunks.first_page(whole.number) == len(own)
        for chunk in range(whole.number):
            assert chunks.span(chunk) == whole.span(chunk)
            theirs = [own[page] for page in range(*whole.pages(chunk)) if page in own]
            assert list(range(*chunks.pages(chunk))) == theirs
            assert bool(theirs) <= division.owns(chunk)
            seen = [page for past in whole.past(chunk) for page in range(*past)]
            found = [page for past in chunks.past(chunk) for page in range(*past)]
            assert found == [own[page] for page in seen if page in own]
            places = iter(range(len(found)))
            numbers = [next(places) if page in own else -1 for page in seen]
            assert division.numbers(whole, whole.past(chunk)).tolist() == numbers
            assert chunks.past_tokens(chunk) == 8 * len(found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [name for name in WHOLE if name != "branches"])
def test_keys_of_a_rank_are_numbered_in_order(name: str, ranks: int) -> None:
    whole = WHOLE[name]
    owner = [c % ranks for c in range(whole.number) for _ in range(*whole.span(c))]
    keys = torch.arange(whole.tokens + 1, dtype=torch.int32).expand(2, -1)
    for rank in range(ranks):
        numbers = KeyNumbers.of(Division(ranks, rank), whole, keys.device)
        found = numbers.of_keys(keys)
        expected = [sum(x == rank for x in owner[:key]) for key in range(whole.tokens + 1)]
        assert found.dtype == torch.int32
        assert found.tolist() == [expected, expected]


# Memory ------------------------------------------------------------------------------------------


def demand(config: oomb.Config, tokens: int, ranks: int, windows: tuple[int, ...]) -> PageDemand:
    shapes = [LayerShape(8, 1, 8, window) for window in windows]
    here = shapes_here(shapes, ranks, config)
    chunks = Chunks.of(config, tokens)
    swept = config.backward.draw(chunks.number, 0)
    layout = PageLayout.of_layers(here, 8, 16, torch.float64, "float32", chooses=False)
    return PageDemand(
        chunks=chunks,
        reach=GradientReach.of(config.backward, swept),
        shapes=here,
        layout=layout,
        batch=2,
        device_type="cpu",
        selection=None,
        lengths=(tokens, 40),
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "backward",
    [oomb.AllChunks(), oomb.SampledChunks(keep=0.5, seed=1), oomb.TruncatedChunks(window=5)],
)
def test_pages_that_are_counted(backward: Any, ranks: int) -> None:
    """A rank's share, rounded up to whole chunks. No rank has more than is counted for all."""
    config = oomb.Config(**PLAIN, backward=backward, divide_pages=True)
    copies = replace(config, divide_pages=False)
    counted = demand(config, 800, ranks, (0, 0)).page_slots
    whole = demand(copies, 800, ranks, (0, 0)).page_slots
    chunk = 2 * 2 * 2 * 2  # its pages and their gradients, in two layers of two rows
    uneven = isinstance(backward, oomb.SampledChunks)  # gradients are
    assert whole / ranks <= counted <= whole / ranks + (3 if uneven else 1) * chunk
    own = [replace(demand(config, 800, ranks, (0, 0)), rank=r)._own_slots for r in range(ranks)]
    assert max(own) == own[0] == counted


def test_chunks_of_several_sizes_are_counted() -> None:
    """The first rank has less of them: two pages, where another one has three."""
    config = oomb.Config(**PLAIN, divide_pages=True)
    whole = WHOLE["chunks of several sizes"]
    call = replace(demand(config, 64, 3, (0, 0)), chunks=whole, lengths=None)
    call = replace(call, reach=GradientReach(range(whole.number), None))
    own = [replace(call, rank=rank)._own_slots for rank in range(3)]
    assert call.page_slots == max(own) == own[1] > own[0]


def test_windows_are_not_divided() -> None:
    config = oomb.Config(**PLAIN, divide_pages=True)
    copies = replace(config, divide_pages=False)
    windows = (24, 24)
    assert demand(config, 800, 4, windows).page_slots == demand(copies, 800, 4, windows).page_slots


def held(rank: int, divide: bool) -> tuple[list[int], float]:
    """Bytes of pages on a rank at the end of each chunk of the fill; the loss."""
    model, ids, taken = tiny(), random_ids(1, 150), []

    def note(progress: oomb.Progress) -> None:
        if progress.phase == "fill":
            taken.append(progress.device_bytes)

    config = oomb.Config(**PLAIN, divide_pages=divide, keep_outputs="none")
    with oomb.Engine(model, config, mesh=meshes[4]) as engine:
        step = engine.forward_backward(ids, ids, on_progress=note)
    return taken, float(step.loss)


def tiny(**settings: Any) -> Any:
    sizes = {"num_key_value_heads": 1, "num_attention_heads": 8, "num_hidden_layers": 2}
    return make("qwen2", **{**sizes, **settings})


def test_a_rank_has_its_share(world: World) -> None:
    copies, divided = (world.run(held, divide) for divide in (False, True))
    per_chunk = copies[0][0][0]
    assert [taken for taken, _ in copies] == [[per_chunk * n for n in range(1, 10)]] * 4
    for rank, (taken, loss) in enumerate(divided):
        assert taken == [per_chunk * ((n + 3 - rank) // 4) for n in range(1, 10)]
        assert abs(loss / copies[0][1] - 1) < EXACT


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_lists_are_parted_and_joined(name: str, ranks: int) -> None:
    """Rows of lists, full and short and empty; the parts of all ranks make the whole again."""
    whole, generator = WHOLE[name], torch.Generator().manual_seed(1)
    for chunk in range(whole.number):
        past = whole.past_pages(chunk)
        rows = [torch.randperm(past, generator=generator)[:n].sort().values for n in (0, 1, 3, 4)]
        lists = torch.full((4, 4), -1)
        for row, pages in zip(lists, rows, strict=True):
            row[: len(pages)] = pages
        parts = []
        for rank in range(ranks):
            pages = torch.from_numpy(Division(ranks, rank).numbers(whole, whole.past(chunk)))
            here = torch.cat([pages, torch.tensor([-1], dtype=torch.int32)])[lists]
            part = closed_up(here)
            assert [[x for x in row if x >= 0] for row in here.tolist()] == [
                [x for x in row if x >= 0] for row in part.tolist()
            ]
            own = torch.cat([(pages >= 0).nonzero()[:, 0], torch.tensor([-1])])
            parts.append(own[part.long()])
        assert joined(parts).tolist() == lists.tolist()


@pytest.mark.parametrize("slots", [None, 40])
@pytest.mark.sampled(1)
def test_plan_under_a_page_rule(world: World, slots: int | None) -> None:
    """Pools to the byte where nothing moves; with two tiers what moves is drawn, not known."""
    rule = oomb.TopKPages(budget=4)
    world.start(pools_of, slots, rule)
    machine, config = Machine.here("cpu").of_rank(4, 4, "replicated"), in_tiers(slots, rule)
    predicted = Planner(tiny(), machine).predict(1500, config, optimizer=None, timed=False)
    found = world.answers()
    assert predicted.device_pool_bytes == found[0][0] == max(device for device, *_ in found)
    if slots is None:
        assert predicted.host_pool_bytes == found[0][1] == 0
    else:
        assert predicted.host_pool_bytes == pytest.approx(found[0][1], rel=0.1)
        assert found[0][2] > 0


@pytest.mark.parametrize("slots", [None, 14])
@pytest.mark.sampled(1)
def test_plan_is_of_the_rank_that_has_most(world: World, slots: int | None) -> None:
    world.start(pools_of, slots)
    machine = Machine.here("cpu").of_rank(4, 4, "replicated")
    predicted = Planner(tiny(), machine).predict(1500, in_tiers(slots), optimizer=None, timed=False)
    found = world.answers()
    assert predicted.device_pool_bytes == found[0][0] == max(device for device, *_ in found)
    assert predicted.host_pool_bytes == found[0][1]
    assert predicted.h2d_bytes == found[0][2]
    assert bool(predicted.h2d_bytes) == (slots is not None)


def in_tiers(slots: int | None, attention: Any = oomb.Dense()) -> oomb.Config:  # noqa: B008
    tiers: dict[str, Any] = {}
    if slots is not None:
        tiers = {"device_memory": slots * SLOT, "host_memory": "8MiB"}
    settings = {"divide_pages": True, "keep_outputs": 0.5, "attention": attention}
    return oomb.Config(**PLAIN, **settings, **tiers)


def pools_of(
    rank: int,
    slots: int | None,
    attention: Any = oomb.Dense(),  # noqa: B008  # a constant
) -> tuple[int, int, int]:
    ids = random_ids(1, 1500)
    with oomb.Engine(tiny(), in_tiers(slots, attention), mesh=meshes[4]) as engine:
        stats = engine.forward_backward(ids, ids).stats
    return stats.device_peak_bytes, stats.host_peak_bytes, stats.h2d_bytes


def test_exchanges_are_planned(world: World) -> None:
    """What divided pages send more than copies is what a plan counts more."""
    sent = [world.run(received_bytes, divide)[0] for divide in (False, True)]
    machine, planned = Machine.described(gpu="h200").of_rank(4, 4, "replicated"), []
    assert machine.gpu is not None
    for divide in (False, True):
        config = oomb.Config(**PLAIN, divide_pages=divide)
        call = demand(config, 64, 4, (0, 0))
        call = replace(call, batch=1, lengths=None, outputs=call.keeping.share(1.0))
        trace = Trace(fill_peak_bytes=0, sweep_peak_bytes=0, sum_bytes=0, fill=Work(), sweep=Work())
        rates: Any = SimpleNamespace(matrix=1.0)
        seconds = exchange_seconds(call, trace, machine, rates, products=0.0)  # type: ignore[arg-type]
        planned.append(seconds * machine.gpu.peer_bytes_per_second)
    assert planned[1] - planned[0] == pytest.approx(sent[1] - sent[0], rel=1e-9)


def test_the_chunks_own_keys_take_one_rank_longer() -> None:
    """Of a first chunk, which has no past, one of four ranks computes what four did."""
    rates: Any = SimpleNamespace(own_forward=1.0, past_forward=1.0, matrix=1.0, widest_cost=1.0)
    seconds: list[list[float]] = []
    for divide in (False, True):
        call: Any = demand(oomb.Config(**PLAIN, divide_pages=divide), 800, 4, (0, 24))
        by_layer = [[shape] for shape in call.shapes]
        seconds.append([forward_seconds(call, rates, [0], layer) for layer in by_layer])
    copies, divided = seconds
    assert divided == [4 * copies[0], copies[1]]


def received_bytes(rank: int, divide: bool) -> int:
    """What a rank gets of others in a call."""
    total, ids = 0, random_ids(1, 65)
    config = oomb.Config(**PLAIN, divide_pages=divide, keep_outputs="all")
    with oomb.Engine(tiny(), config, mesh=meshes[4]) as engine:
        group: Any = engine._placement.group  # type: ignore[attr-defined]
        exchange = group.all_to_all

        def counted(
            send: torch.Tensor, sizes: list[int], received: list[int], largest: int
        ) -> torch.Tensor:
            nonlocal total
            assert largest >= max(*sizes, *received)
            total += (sum(received) - received[rank]) * send.element_size()
            return exchange(send, sizes, received, largest)

        group.all_to_all = counted
        engine.forward_backward(ids, ids)
    return total


def within(rank: int, divide: bool, memory: int) -> str | Result:
    model, ids = tiny(), random_ids(1, 300)
    config = oomb.Config(**PLAIN, divide_pages=divide, device_memory=memory, host_memory=4 * memory)
    with oomb.Engine(model, config, mesh=meshes[4]) as engine:
        planned = engine.plan(300).fits
        try:
            step = engine.forward_backward(ids, ids)
        except oomb.OutOfMemoryError as error:
            assert not planned
            return str(error)
        assert planned
        return Result(step.loss, take_gradients(model), step)


def test_fits_where_copies_do_not(world: World) -> None:
    memory = 25 * SLOT
    assert all("out of memory" in text for text in world.run(within, False, memory))
    ids = random_ids(1, 300)
    alone = chunked(tiny(), oomb.Config(**PLAIN), ids, ids)
    for found in world.run(within, True, memory):
        assert_equal(found, alone)
        assert found.step.stats.h2d_bytes > 0


# Calls -------------------------------------------------------------------------------------------


def with_adapters() -> Any:
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"])
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny(), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def train_adapters(rank: int) -> tuple[Result, torch.Tensor]:
    model, ids = with_adapters(), random_ids(2, 75)
    with oomb.Engine(model, oomb.Config(**PLAIN, divide_pages=True), mesh=meshes[4]) as engine:
        step = engine.forward_backward(ids, ids)
        logprobs = engine.evaluate(ids, ids, return_logprobs=True).logprobs
    assert logprobs is not None
    return Result(step.loss, take_gradients(model), step), logprobs


def test_adapters_and_evaluation(world: World) -> None:
    world.start(train_adapters)
    ids = random_ids(2, 75)
    alone = chunked(with_adapters(), oomb.Config(**PLAIN), ids, ids)
    for found, logprobs in world.answers():
        assert_equal(found, alone)
        assert abs(float(-logprobs.sum() / 148 / alone.loss) - 1) < EXACT


def with_shards(rank: int, policy: Any) -> Result:
    model, ids = tiny(), random_ids(2, 75)
    for layer in model.model.layers:
        fully_shard(layer, mesh=meshes[4])
    fully_shard(model, mesh=meshes[4])
    config = oomb.Config(**PLAIN, divide_pages=True, sharded_weights=policy, recompute="layer")
    with oomb.Engine(model, config, mesh=meshes[4]) as engine:
        step = engine.forward_backward(ids, ids)
    gradients: dict[str, Any] = take_gradients(model)
    return Result(step.loss, {name: x.full_tensor() for name, x in gradients.items()}, step)


def test_weights_may_be_sharded(world: World) -> None:
    world.start(with_shards, "zero3")
    ids = random_ids(2, 75)
    alone = chunked(tiny(), oomb.Config(**PLAIN), ids, ids)
    for found in world.answers():
        assert_equal(found, alone)


def tree_of(rank: int, group: str, settings: dict[str, Any], prompt: int = 0) -> Any:
    """``prompt``: tokens before all rows."""
    rows = [torch.cat([random_ids(1, prompt)[0], row]) for row in GROUPS[group]]
    model, batch = tiny(), Batch(rows)
    config = oomb.Config(**{**PLAIN, "divide_pages": True, **settings})
    with (
        oomb.Engine(model, config, mesh=meshes[4]) as engine,
        engine.two_pass(
            **batch.arguments,  # type: ignore[arg-type]
            entropies=True,
            share_prefixes=True,
        ) as call,
    ):
        batch.loss(values_of(call)).backward()
        found = {name: value.detach() for name, value in values_of(call).items()}
        call.sweep()
    return found, take_gradients(model)


@pytest.mark.parametrize(
    ("group", "settings"),
    [
        ("nested", {}),
        ("prompt of 33", {"keep_outputs": "all", "device_memory": 16 * SLOT}),
    ],
)
def test_rows_that_begin_alike(world: World, group: str, settings: dict[str, Any]) -> None:
    world.start(tree_of, group, settings)
    expected = ordinary_of_rows(tiny(), Batch(GROUPS[group]))
    for found in world.answers():
        assert_same(found, expected)


def test_rows_that_begin_alike_under_a_page_rule(world: World) -> None:
    """As with copies of the pages, which choose the same, among pages with holes between them."""
    rule = {"attention": oomb.TopKPages(budget=3)}
    expected = world.run(tree_of, "nested", {**rule, "divide_pages": False}, 48)[0]
    for found in world.run(tree_of, "nested", rule, 48):
        assert_same(found, expected)


# Mistakes ----------------------------------------------------------------------------------------


def test_the_setting_is_a_bool() -> None:
    with pytest.raises(ValueError, match="divide_pages: expected a bool, got 1"):
        oomb.Config(divide_pages=1)  # type: ignore[arg-type]


def test_pages_of_latents_are_refused() -> None:
    latents = LayerShape(query_heads=8, kv_heads=4, head_dim=64, window=0, latent=100)
    config = oomb.Config(**PLAIN, divide_pages=True)
    text = "divide_pages: expected a model whose pages hold keys and values, got one whose pages"
    with pytest.raises(oomb.UnsupportedModelError, match=text):
        shapes_here([latents], 8, config)
    (here,) = shapes_here([latents], 4, config)
    assert not here.divided
    (here,) = shapes_here([replace(latents, latent=600)], 8, config)
    assert here.divided
