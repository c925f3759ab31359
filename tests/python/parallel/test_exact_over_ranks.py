"""Ranks that share a sequence get the loss and gradients of one process, and of ordinary training.

Every case says how a model is called; it runs on 2, 3 and 4 ranks.
"""

from __future__ import annotations

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

from .world import World, meshes

SLOT = 2 * 8 * 8 * 8  # bytes of a page for one KV head of the tests' models


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
    "sinks, recompute": Case(model="gpt-oss", config={"recompute": "layer"}),
    "tied, norms of heads": Case(model="qwen3-tied"),
    "one rank's slice ignored": Case(call="slice ignored"),
    "shared keys, other head dims": Case(
        model="gemma4-e2b", config={"recompute": "layer"}, batch=2
    ),
    "two tiers": Case(slots=26, tokens=140),
    "kept outputs": Case(config={"keep_outputs": "all"}),
    "kept outputs, two tiers": Case(config={"keep_outputs": 0.5}, slots=26, tokens=140),
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
    "pages that spill": Case(
        config={"attention": oomb.TopKPages(budget=2), "recompute": "layer"},
        is_ordinary=False,
        tokens=160,
        slots=26,
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
CASES |= {f"{n} tokens behind a border": Case(tokens=17 + n) for n in range(1, 10)}
CASES |= {f"{n} tokens": Case(tokens=n) for n in (3, 4)}


def heads(ranks: int) -> dict[str, int]:
    """Heads that ``ranks`` can share: two queries a key."""
    kv_heads = 3 if ranks == 3 else 4
    return {"num_key_value_heads": kv_heads, "num_attention_heads": 2 * kv_heads}


def model_of(case: Case, ranks: int) -> Any:
    if case.model in CLASSES:
        return make_classes(case.model, **heads(ranks))
    return make(case.model, **{**heads(ranks), "num_hidden_layers": 2, **case.sizes})


def config_of(case: Case, ranks: int, kv_heads: int) -> oomb.Config:
    memory: dict[str, Any] = {}
    if case.slots is not None:
        memory["device_memory"] = case.slots * SLOT * kv_heads // ranks
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
    mesh = meshes[ranks]
    if mesh.get_coordinate() is None:
        return None
    model = model_of(case, ranks)
    given, _ = arguments(case)
    config = config_of(case, ranks, heads(ranks)["num_key_value_heads"])

    def call(engine: oomb.Engine) -> Result:
        engine.load_state_dict({**engine.state_dict(), "step": 0})
        step = engine.forward_backward(**given)
        return Result(step.loss, take_gradients(model), step)

    with oomb.Engine(model, config, mesh=mesh) as engine:
        return call(engine), call(engine)


# Run each time on more than two ranks too; the others on 3 and 4 are slow.
QUICK = ("dense", "recompute", "sinks", "documents", "pages", *(n for n in CASES if "border" in n))
WHERE = [
    pytest.param(name, ranks, marks=pytest.mark.slow if ranks > 2 and name not in QUICK else [])
    for name in CASES
    for ranks in (2, 3, 4)
]


@pytest.mark.parametrize(("name", "ranks"), WHERE)
def test_case(world: World, name: str, ranks: int) -> None:
    case = CASES[name]
    world.start(over_ranks, name, ranks)
    model = model_of(case, ranks)
    given, theirs = arguments(case)
    config = config_of(case, 1, heads(ranks)["num_key_value_heads"])
    alone = chunked(model, config, **given)
    expected = ordinary(model, **theirs) if case.is_ordinary else alone
    results = [found for found in world.answers() if found is not None]
    assert len(results) == (4 if ranks == 2 else ranks)
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
