"""A page rule of the user's own is exact for what it chooses, and is checked."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import oomb

from .dense_mask import Visible
from .models import make
from .reference import assert_equal, assert_identical, chunked, random_ids
from .test_sparse import CHUNK, PAGE, TOKENS, run

EXAMPLE = Path(__file__).parents[3] / "examples" / "page_rule.py"
TwoLevels = runpy.run_path(str(EXAMPLE))["TwoLevels"]
SPILLED = {"device_memory": 12 * 2 * 2 * PAGE * 8 * 8, "host_memory": "1MiB"}


@dataclass(frozen=True, kw_only=True)
class Drawn(oomb.PageRule):
    """Random lists of random lengths, one for each key/value head, some of them empty."""

    budget: int = 3
    share: str = "kv_head"  # type: ignore[assignment]

    @property
    def max_pages(self) -> int:
        return self.budget

    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: oomb.Past) -> torch.Tensor:
        generator = torch.Generator().manual_seed(97 * past.layer + past.chunk)
        shape = (q.shape[0], -(-q.shape[2] // past.page_size), summaries.shape[2])
        ranks = torch.rand((*shape, past.num_pages), generator=generator)
        lists = ranks.topk(self.budget).indices
        absent = torch.rand(lists.shape, generator=generator) < 0.4
        lists = lists.masked_fill(absent, past.num_pages).sort(-1).values
        return lists.masked_fill(lists == past.num_pages, -1).to(torch.int32)


OWN = {"two levels": TwoLevels(budget=3), "drawn": Drawn()}


@pytest.mark.parametrize("tiers", [{}, SPILLED], ids=["device", "spilled"])
@pytest.mark.parametrize("inputs", ["plain", "padded", "documents"])
@pytest.mark.parametrize("rule", OWN)
def test_equals_dense_attention_under_the_selected_mask(
    rule: str, inputs: str, tiers: dict[str, Any]
) -> None:
    result, expected, visible = run("llama", OWN[rule], inputs, **tiers)
    assert any(lists is not None for layer in visible.selection for lists in layer)
    assert_equal(result, expected)


def test_two_levels_choose_the_best_pages_of_the_best_groups() -> None:
    """Against loops over the keys and queries that the model has."""
    rule = TwoLevels(budget=3)
    _, _, visible = run("llama", rule)
    compared = 0
    for layer, per_chunk in enumerate(visible.selection):
        for chunk, lists in enumerate(per_chunk):
            for block in range(0 if lists is None else lists.shape[1]):
                scores = _page_scores(visible, layer, chunk, block)
                groups = [scores[i : i + rule.group] for i in range(0, len(scores), rule.group)]
                means = [sum(group) / rule.group for group in groups]  # a short one counts as less
                best = sorted(range(len(groups)), key=lambda g: -means[g])[: rule.groups]
                pages = [p for p in range(len(scores)) if p // rule.group in best]
                wanted = sorted(sorted(pages, key=lambda p: -scores[p])[: rule.budget])
                assert lists is not None
                assert lists[0, block, 0].tolist() == wanted + [-1] * (rule.budget - len(wanted))
                compared += 1
    assert compared > 20


def _page_scores(visible: Visible, layer: int, chunk: int, block: int) -> list[float]:
    q, k = visible.seen[layer]
    begin = chunk * CHUNK + block * PAGE
    queries = q[0, :, begin : min(begin + PAGE, TOKENS - 1)].mean(1)  # the last token is not run
    keys = k[0].repeat_interleave(q.shape[1] // k.shape[1], dim=0)
    pages = range(chunk * CHUNK // PAGE)
    return [float((keys[:, p * PAGE : (p + 1) * PAGE].mean(1) * queries).sum()) for p in pages]


def test_the_same_bits_wherever_pages_lie() -> None:
    model, ids = make("llama", torch.float32), random_ids(2, TOKENS)
    settings: dict[str, Any] = {"chunk_size": CHUNK, "page_size": PAGE, "attention": Drawn()}
    inside = chunked(model, oomb.Config(**settings), ids, ids)
    assert_identical(chunked(model, oomb.Config(**settings, **SPILLED), ids, ids), inside)


@dataclass(frozen=True, kw_only=True)
class Wrong(Drawn):
    """What ``Drawn`` gives, spoilt."""

    fault: str = ""

    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: oomb.Past) -> torch.Tensor:
        lists = super().choose(q, summaries, past)
        spoilt: dict[str, Any] = {
            "no tensor": None,
            "dtype": lists.long(),
            "heads": lists[:, :, :1],
            "blocks": torch.cat((lists, lists), dim=1),
            "room": lists[..., :-1].contiguous(),
            "too high": torch.full_like(lists, -1).index_fill(3, torch.tensor([0]), 10**6),
            "negative": torch.full_like(lists, -2),
            "twice": torch.zeros_like(lists),
            "descending": lists.flip(-1),
        }
        return spoilt[self.fault]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no tensor", "got NoneType"),
        ("dtype", "got int64"),
        ("heads", r"got int32 \[1, 4, 1, 3\]"),
        ("blocks", r"got int32 \[1, 8, 2, 3\]"),
        ("room", r"got int32 \[1, 4, 2, 2\]"),
        ("too high", r"pages in \[0, 4\) or -1, got -1 … 1000000 at layer 0, chunk 1"),
        ("negative", "or -1, got -2"),
        ("twice", r"ascending pages, then -1, got \[0, 0, 0\] at layer 0, chunk 1"),
        ("descending", "ascending pages, then -1"),
    ],
)
def test_wrong_lists_are_refused(fault: str, message: str) -> None:
    model, ids = make("llama"), random_ids(1, TOKENS)
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, attention=Wrong(fault=fault))
    with oomb.Engine(model, config) as engine:
        with pytest.raises(ValueError, match=rf"^Wrong\.choose: expected .*{message}"):
            engine.forward_backward(ids, ids)
        assert all(p.grad is None for p in model.parameters())


def test_a_rule_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^attention: expected oomb\.Dense\(\)"):
        oomb.Config(attention=Drawn)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^attention\.max_pages: expected an int >= 1, got 0"):
        oomb.Config(attention=Drawn(budget=0))
    with pytest.raises(ValueError, match=r"^attention\.share: expected 'all_heads' or 'kv_head'"):
        oomb.Config(attention=Drawn(share="each"))
