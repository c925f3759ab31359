"""Ranks that share a sequence get the loss and gradients of one process, and of ordinary training.

Every case says how a model is called; it runs on 2, 3 and 4 ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import oomb
from engine.layer_classes import CLASSES
from engine.layer_classes import make as make_classes
from engine.models import make
from engine.reference import (
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    take_gradients,
)

from .world import World, one_group

SLOT = 2 * 8 * 8 * 8  # bytes of a page for one KV head of the tests' models


# Of so many chunks that the outputs which are gone leave room for what a chunk keeps.
FALLING: dict[str, Any] = {"recompute": "layer", "keep_outputs": "all"}
WIDE = {"intermediate_size": 512}  # whose MLPs' outputs are worth a copy


@dataclass(frozen=True)
class Case:
    """A model, settings, and a call."""

    model: str = "qwen2"
    sizes: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    tokens: int = 75
    call: str = "plain"  # how :func:`arguments` makes the rest of the call
    is_ordinary: bool = True  # equals ordinary training; else one process alone
    slots: int | None = None  # of the device tier, for each KV head of a rank
    heads: tuple[int, int] | None = None  # query and key/value heads; None: what ranks divide


@dataclass(frozen=True)
class Widest(oomb.PageRule):
    """A rule of the user's own, in which each list depends on all heads."""

    share: Any = "all_heads"

    @property
    def max_pages(self) -> int:
        return 2

    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: oomb.Past) -> torch.Tensor:
        group = q.shape[1] // summaries.shape[2]
        keys = summaries[:, : past.num_pages].repeat_interleave(group, dim=2)
        heads = torch.einsum("bhtd,bphd->bthp", q, keys).abs()
        heads = heads.max(dim=2, keepdim=True).values - heads if self.share == "kv_head" else heads
        blocks = torch.stack([part.sum(1) for part in heads.split(past.page_size, dim=1)], dim=1)
        blocks = blocks.unflatten(2, (-1, group)).sum(3)
        if self.share == "all_heads":
            blocks = blocks.amax(dim=2, keepdim=True)
        lists = blocks.topk(2, dim=-1).indices.sort(dim=-1).values
        return lists.to(torch.int32).contiguous()


CASES = {
    "dense": Case(),
    "recompute": Case(config={"recompute": "layer"}, batch=2),
    "batch": Case(batch=2, call="masked"),
    "padding": Case(batch=3, call="padded"),
    "documents": Case(batch=2, call="documents"),
    "weights": Case(call="weights"),
    "a loss of one's own": Case(batch=2, call="token_loss", is_ordinary=False),
    "window": Case(model="mistral", batch=2),
    "sinks": Case(model="gpt-oss"),
    "soft caps": Case(model="gemma2", batch=2),
    "soft caps, recompute, two tiers": Case(
        model="gemma2", config={"recompute": "layer"}, slots=26, tokens=140
    ),
    "sinks, recompute": Case(model="gpt-oss", config={"recompute": "layer"}),
    "tied, norms of heads": Case(model="qwen3-tied"),
    "one rank's slice ignored": Case(call="slice ignored"),
    "shared keys, other head dims": Case(
        model="gemma4-e2b", config={"recompute": "layer"}, batch=2
    ),
    "two tiers": Case(slots=26, tokens=140),
    "kept outputs": Case(config={"keep_outputs": "all"}),
    "kept outputs, two tiers": Case(config={"keep_outputs": 0.5}, slots=26, tokens=140),
    "outputs of MLPs": Case(sizes=WIDE, batch=2, call="documents"),
    "outputs of MLPs, two tiers": Case(
        sizes=WIDE, config={"recompute": "layer"}, slots=26, tokens=140
    ),
    "outputs of MLPs, groups of heads": Case(sizes=WIDE, heads=(8, 4), config={"head_groups": 2}),
    "less again as outputs go": Case(config=FALLING, sizes={"num_hidden_layers": 4}, tokens=700),
    "pages": Case(config={"attention": oomb.TopKPages(budget=2)}, is_ordinary=False, tokens=120),
    "pages by softmax": Case(
        config={"attention": oomb.TopKPages(budget=3, score="token_softmax", sink_pages=1)},
        is_ordinary=False,
        tokens=120,
        batch=2,
    ),
    "pages per head": Case(
        config={"attention": oomb.TopKPages(budget=2, share="kv_head", chunk_budget=4)},
        is_ordinary=False,
        tokens=120,
    ),
    "pages by bounds": Case(
        config={
            "attention": oomb.TopKPages(budget=3, summary="bounds", score="token_softmax"),
        },
        is_ordinary=False,
        tokens=120,
        batch=2,
    ),
    "pages that spill": Case(
        config={"attention": oomb.TopKPages(budget=2), "recompute": "layer"},
        is_ordinary=False,
        tokens=160,
        slots=26,
    ),
    "own rule": Case(config={"attention": Widest()}, is_ordinary=False, tokens=120, batch=2),
    "own rule per head": Case(
        config={"attention": Widest(share="kv_head")}, is_ordinary=False, tokens=120
    ),
    "sampled": Case(
        config={"backward": oomb.SampledChunks(keep=0.6, seed=3)}, is_ordinary=False, tokens=120
    ),
    "truncated": Case(
        config={"backward": oomb.TruncatedChunks(window=1)}, is_ordinary=False, tokens=91
    ),
    "yarn, far": Case(
        sizes={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 40,
            },
            "max_position_embeddings": 160,
        },
        model="llama",
    ),
}
# More ranks than key/value heads: ranks hold copies of them, and divide the queries of each.
CASES |= {
    "copies": Case(heads=(7, 1)),
    "copies of two": Case(heads=(14, 2), batch=2, call="masked"),
    "copies, recompute": Case(heads=(14, 2), config={"recompute": "layer"}),
    "copies, documents": Case(heads=(8, 1), batch=2, call="documents"),
    "copies, padding": Case(heads=(14, 2), batch=3, call="padded"),
    "copies, window": Case(model="mistral", heads=(10, 2)),
    "copies, sinks": Case(model="gpt-oss", heads=(14, 2)),
    "copies, two tiers": Case(heads=(14, 2), slots=26, tokens=140),
    "copies, kept outputs": Case(heads=(14, 2), config={"keep_outputs": "all"}),
    "copies, 3 tokens": Case(heads=(7, 1), tokens=3),
    "copies, shared keys": Case(model="gemma4-e2b", heads=(8, 2)),
}
CASES |= {
    f"copies, {name}": Case(
        heads=(14, 2),
        config={"attention": rule},
        is_ordinary=False,
        tokens=120,
        batch=2,
    )
    for name, rule in {
        "pages": oomb.TopKPages(budget=2, score="token_softmax"),
        "pages per head": oomb.TopKPages(budget=2, share="kv_head", chunk_budget=4),
        "pages by bounds": oomb.TopKPages(budget=2, share="kv_head", summary="bounds"),
        "own rule": Widest(share="kv_head"),
    }.items()
}
# The same, but ranks that share a head hold a part of its pages each.
DIVIDED: dict[str, Any] = {"divide_pages": True}
CASES |= {
    "divided": Case(heads=(7, 1), config=DIVIDED),
    "divided, two heads": Case(heads=(14, 2), config=DIVIDED, batch=2, call="masked"),
    "divided, recompute": Case(heads=(14, 2), config={**DIVIDED, "recompute": "layer"}),
    "divided, documents": Case(heads=(8, 1), config=DIVIDED, batch=2, call="documents"),
    "divided, padding": Case(heads=(14, 2), config=DIVIDED, batch=3, call="padded"),
    "divided, two tiers": Case(heads=(14, 2), config=DIVIDED, slots=14, tokens=140),
    "divided, kept outputs": Case(heads=(7, 1), config={**DIVIDED, "keep_outputs": "all"}),
    "divided, kept outputs, two tiers": Case(
        heads=(14, 2), config={**DIVIDED, "keep_outputs": 0.5}, slots=14, tokens=140
    ),
    "divided, sinks": Case(model="gpt-oss", heads=(14, 2), config=DIVIDED),
    "divided, soft caps": Case(model="gemma2", heads=(8, 2), config=DIVIDED, batch=2),
    "divided, shared keys": Case(model="gemma4-e2b", heads=(8, 2), config=DIVIDED),
    "divided, 3 tokens": Case(heads=(7, 1), config=DIVIDED, tokens=3),
    "divided, a token behind a border": Case(heads=(7, 1), config=DIVIDED, tokens=18),
    "divided, two chunks": Case(heads=(7, 1), config=DIVIDED, tokens=30),
    "divided, sampled": Case(
        heads=(14, 2),
        config={**DIVIDED, "backward": oomb.SampledChunks(keep=0.6, seed=3)},
        is_ordinary=False,
        tokens=120,
    ),
    "divided, truncated": Case(
        heads=(7, 1),
        config={**DIVIDED, "backward": oomb.TruncatedChunks(window=3)},
        is_ordinary=False,
        tokens=120,
    ),
}
CASES |= {
    f"divided, {name}": Case(
        heads=(14, 2),
        config={**DIVIDED, "attention": rule},
        is_ordinary=False,
        tokens=140,
        batch=3 if call == "padded" else 2,
        call=call,
        slots=slots,
    )
    for name, rule, call, slots in (
        ("pages", oomb.TopKPages(budget=2, score="token_softmax"), "plain", None),
        (
            "pages per head",
            oomb.TopKPages(budget=3, share="kv_head", chunk_budget=4),
            "plain",
            None,
        ),
        ("pages by bounds", oomb.TopKPages(budget=2, summary="bounds"), "documents", None),
        ("pages, padding", oomb.TopKPages(budget=2, share="kv_head"), "padded", None),
        ("pages, two tiers", oomb.TopKPages(budget=2, share="kv_head"), "plain", 30),
        ("own rule", Widest(share="kv_head"), "plain", None),
    )
}
# A layer's heads are exchanged in groups, of which each rank has a share.
CASES |= {
    f"groups, {name}": Case(
        model=model,
        heads=heads,
        config={"head_groups": groups, **config},
        batch=1 if call == "plain" else 3 if call == "padded" else 2,
        tokens=140 if slots else 75,
        call=call,
        slots=slots,
    )
    for name, model, heads, groups, config, call, slots in (
        ("two", "qwen2", (16, 8), 2, {}, "masked", None),
        ("one head each", "qwen2", (24, 12), 4, {}, "documents", None),
        ("three", "qwen2", (24, 12), 3, {}, "padded", None),
        ("recompute", "qwen2", (16, 8), 2, {"recompute": "layer"}, "documents", None),
        ("sinks", "gpt-oss", (16, 8), 2, {}, "plain", None),
        ("soft caps", "gemma2", (8, 4), 2, {}, "masked", None),
        ("window", "mistral", (8, 4), 2, {}, "plain", None),
        ("shared keys", "gemma4-e2b", (8, 4), 2, {}, "plain", None),
        ("two tiers", "qwen2", (16, 8), 2, {}, "plain", 30),
        ("kept outputs", "qwen2", (16, 8), 2, {"keep_outputs": "all"}, "plain", None),
        ("kept, two tiers", "qwen2", (16, 8), 2, {"keep_outputs": 0.5}, "plain", 30),
    )
}
CASES |= {
    "groups, 3 tokens": Case(heads=(16, 8), config={"head_groups": 2}, tokens=3),
    "groups, sampled": Case(
        heads=(16, 8),
        config={"head_groups": 2, "backward": oomb.SampledChunks(keep=0.6, seed=3)},
        is_ordinary=False,
        tokens=120,
    ),
}
CASES |= {
    "28 heads": Case(heads=(28, 4), batch=2, call="masked"),
    "28 heads, recompute": Case(heads=(28, 4), config={"recompute": "layer"}),
    "28 heads, 2 keys, pages": Case(
        heads=(28, 2),
        config={"attention": oomb.TopKPages(budget=2, share="kv_head")},
        is_ordinary=False,
        tokens=120,
    ),
    "28 heads, pages": Case(
        heads=(28, 4),
        config={"attention": oomb.TopKPages(budget=2)},
        is_ordinary=False,
        tokens=120,
    ),
    "28 heads, pages, two tiers": Case(
        heads=(28, 4),
        config={"attention": oomb.TopKPages(budget=2), "keep_outputs": 0.5},
        slots=26,
        is_ordinary=False,
        tokens=140,
    ),
    "28 heads, kept outputs": Case(heads=(28, 4), config={"keep_outputs": "all"}),
    "28 heads, kept outputs, two tiers": Case(
        heads=(28, 4), config={"keep_outputs": 0.5}, slots=26, tokens=140
    ),
    "28 heads, 3 tokens": Case(heads=(28, 4), tokens=3),
    "28 heads, divided": Case(heads=(28, 4), config=DIVIDED, batch=2, call="masked"),
    "28 heads, divided, pages": Case(
        heads=(28, 2),
        config={**DIVIDED, "attention": oomb.TopKPages(budget=2, recent_pages=1)},
        is_ordinary=False,
        tokens=120,
    ),
    "28 heads, 2 keys, divided": Case(
        heads=(28, 2), config={**DIVIDED, "keep_outputs": 0.5}, slots=10, tokens=140
    ),
    "32 heads, norms of heads": Case(model="qwen3", heads=(32, 8), batch=2, call="documents"),
    "32 heads, two tiers": Case(model="qwen3", heads=(32, 8), slots=26, tokens=140),
}
CASES |= {f"{n} tokens behind a border": Case(tokens=17 + n) for n in range(1, 10)}
CASES |= {f"{n} tokens": Case(tokens=n) for n in (3, 4)}


def heads(ranks: int, case: Case | None = None) -> dict[str, int]:
    """Heads of a case; or such that ``ranks`` divide: two queries a key."""
    kv_heads = 3 if ranks == 3 else 4
    queries, keys = (2 * kv_heads, kv_heads) if case is None or case.heads is None else case.heads
    return {"num_key_value_heads": keys, "num_attention_heads": queries}


def model_of(case: Case, ranks: int) -> Any:
    if case.model in CLASSES:
        return make_classes(case.model, **heads(ranks, case))
    return make(case.model, **{**heads(ranks, case), "num_hidden_layers": 2, **case.sizes})


def config_of(case: Case, ranks: int, kv_heads: int) -> oomb.Config:
    memory: dict[str, Any] = {}
    if case.slots is not None:
        memory["device_memory"] = case.slots * SLOT * kv_heads // math.gcd(ranks, kv_heads)
        memory["host_memory"] = 4 << 20
    settings = {"chunk_size": 16, "page_size": 8, "recompute": "none", "record_selection": True}
    return oomb.Config(**{**settings, **memory, **case.config})


def arguments(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the engine, and of ordinary training."""
    ids = random_ids(case.batch, case.tokens)
    labels = ids.clone()
    given: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if case.call == "masked":
        labels[0, 14:40] = -100
    elif case.call == "slice ignored":
        labels[:, 32:45] = -100
        labels[:, :9] = -100
    elif case.call == "padded":
        lengths = torch.tensor([[75], [33], [9]])
        mask = (torch.arange(case.tokens)[None] < lengths).long()
        labels[mask == 0] = -100
        given["attention_mask"] = theirs["attention_mask"] = mask
    elif case.call == "weights":
        given["loss_weights"] = theirs["loss_weights"] = torch.linspace(0.1, 2, case.tokens)[None]
        given["num_items_in_batch"] = theirs["num_items_in_batch"] = 50
    elif case.call == "token_loss":
        given["token_loss"] = focal
    elif case.call == "documents":
        ends = torch.tensor([[3, 20, 24, 48, 61], [8, 16, 17, 50, 51]])  # in slices, at borders
        positions = torch.arange(case.tokens).expand(case.batch, -1)
        documents = (positions[..., None] >= ends[:, None]).sum(-1)
        starts = torch.zeros_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        given["document_ids"] = documents
        first = torch.where(starts, positions, 0).cummax(dim=1).values
        allowed = documents[:, :, None] == documents[:, None]
        allowed &= torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril()
        bias = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
        theirs = {"starts": starts, "position_ids": positions - first}
        theirs["attention_mask"] = bias[:, None]
    both = {"input_ids": ids, "labels": labels}
    return both | given, both | theirs


def focal(logits: torch.Tensor, rows: oomb.TokenRows) -> torch.Tensor:
    """Knows the place of each row."""
    at_target = logits.log_softmax(-1).gather(1, rows.targets[:, None])[:, 0]
    return -((1 - at_target.exp()) ** 2) * at_target * (1 + rows.sequences) * rows.positions.sqrt()


def over_ranks(rank: int, name: str, ranks: int) -> tuple[Result, Result] | None:
    """Two calls of one engine on a rank; None where it has no part in them."""
    case = CASES[name]
    mesh = one_group[ranks]
    if mesh.get_coordinate() is None:
        return None
    model = model_of(case, ranks)
    given, _ = arguments(case)
    config = config_of(case, ranks, heads(ranks, case)["num_key_value_heads"])

    def call(engine: oomb.Engine) -> Result:
        engine.load_state_dict({**engine.state_dict(), "step": 0})
        step = engine.forward_backward(**given)
        assert (len(step.stats.recomputed) > 1) == (name == "less again as outputs go")
        if case.sizes is WIDE:
            even = config.chunk_size % ranks == 0
            assert (step.stats.kept_mlp_output_bytes > 0) == even
        return Result(step.loss, take_gradients(model), step)

    with oomb.Engine(model, config, mesh=mesh) as engine:
        return call(engine), call(engine)


# Heads of Qwen2.5-7B and of Qwen3-8B.
EIGHT = [name for name in CASES if name.startswith(("28 heads", "32 heads"))]

# Run each time on more than two ranks too; the others on 3 and 4 are slow.
QUICK = (
    "dense",
    "recompute",
    "less again as outputs go",
    "outputs of MLPs",
    "sinks",
    "documents",
    "pages",
    *(n for n in CASES if "border" in n),
)
SHARED = ("copies", "divided")
COPIES = {
    *(("copies", ranks) for ranks in (2, 3, 4)),
    *((f"copies, {name}", 4) for name in ("recompute", "sinks", "pages", "own rule")),
    ("copies of two", 3),
    ("copies, documents", 3),
    *(("divided", ranks) for ranks in (2, 3, 4)),
    *(
        (f"divided, {name}", 4)
        for name in ("padding", "kept outputs, two tiers", "sinks", "soft caps", "shared keys")
    ),
    *((f"divided, {name}", 3) for name in ("documents", "two chunks", "truncated")),
}


def has_part(name: str, ranks: int) -> bool:
    """Whether a case is one of so many ranks."""
    case = CASES[name]
    if name.startswith(SHARED):
        return ranks == 4 or (name, ranks) in COPIES
    groups = case.config.get("head_groups", 1)
    return groups == 1 or (case.heads is not None and case.heads[1] % (ranks * groups) == 0)


def is_quick(name: str, ranks: int) -> bool:
    if name.startswith(SHARED):
        return (name, ranks) in COPIES
    return ranks == 2 or name in QUICK


WHERE = [
    pytest.param(name, ranks, marks=[] if is_quick(name, ranks) else pytest.mark.slow)
    for name in CASES
    if name not in EIGHT
    for ranks in (2, 3, 4)
    if has_part(name, ranks)
]


@pytest.mark.parametrize(("name", "ranks"), WHERE)
@pytest.mark.sampled(28, slow=12)
def test_case(world: World, name: str, ranks: int) -> None:
    compare(world, name, ranks)


@pytest.mark.slow
def test_eight_ranks() -> None:
    with World(8) as world:
        for name in EIGHT:
            compare(world, name, 8)


def compare(world: World, name: str, ranks: int) -> None:
    case = CASES[name]
    world.start(over_ranks, name, ranks)
    model = model_of(case, ranks)
    given, theirs = arguments(case)
    config = config_of(case, 1, heads(ranks, case)["num_key_value_heads"])
    alone = chunked(model, config, **given)
    expected = ordinary(model, **theirs) if case.is_ordinary else alone
    results = [found for found in world.answers() if found is not None]
    assert len(results) == ranks
    first = results[0][0]
    assert_equal(first, alone)
    assert_equal(first, expected)
    for found, again in results:
        assert_identical(found, first)
        assert_identical(again, first)
        assert found.step is not None and alone.step is not None
        same_lists(found.step.selection, alone.step.selection)
        assert found.step.num_valid_tokens == alone.step.num_valid_tokens


def same_lists(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or torch.equal(mine, other)
