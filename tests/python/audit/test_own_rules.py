"""Audits of page rules that a user wrote."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rich.console import Console

import oomb
from engine.models import make
from engine.reference import random_ids
from oomb.audit import audit
from oomb.cli.audit_tables import show

from .likeness import CLOSE, CONFIG, PAGE, TOKENS, assert_close, likeness
from .test_audit import explicit_mass, runs

EXAMPLE = Path(__file__).parents[3] / "examples" / "page_rule.py"
TwoLevels = runpy.run_path(str(EXAMPLE))["TwoLevels"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Learned(oomb.PageRule):
    """As in docs/recipes.md: it holds a module, which no JSON can."""

    projection: torch.nn.Linear = field(default_factory=lambda: torch.nn.Linear(8, 4).double())
    max_pages: int = 3

    def choose(self, q: torch.Tensor, summaries: torch.Tensor, past: oomb.Past) -> torch.Tensor:
        blocks = q.mean(1)[:, :: past.page_size]
        keys = summaries[:, : past.num_pages].mean(2)
        scores = self.projection(blocks) @ self.projection(keys).transpose(1, 2)
        lists = scores.topk(self.max_pages).indices.sort().values
        return lists[:, :, None].to(torch.int32)


@pytest.mark.parametrize("rule", [TwoLevels(budget=3), Learned()])
def test_errors_and_mass_are_those_of_ordinary_runs(rule: oomb.PageRule) -> None:
    found = runs("llama", rule)
    (one,) = found.audit.sparse
    assert one.rule is rule
    pair = [torch.cat([g[n].flatten() for n in found.exact]) for g in (found.masked, found.exact)]
    assert one.gradient.error > 0.01
    assert_close(one.gradient, likeness(*pair))
    for index, layer in enumerate(one.layers):
        outputs = found.masked_outputs[index][:, :-1], found.exact_outputs[index][:, :-1]
        assert_close(layer.output, likeness(*outputs))
        mass, past_mass = explicit_mass(found, index, torch.arange(TOKENS - 1))
        assert layer.mass is not None and layer.past_mass is not None
        assert abs(layer.mass - mass) < CLOSE and abs(layer.past_mass - past_mass) < CLOSE


def test_they_are_named_beside_others_of_as_many_pages() -> None:
    model, ids = make("llama"), random_ids(1, TOKENS)
    most = TOKENS // PAGE + 1
    tried = [TwoLevels(budget=most), oomb.TopKPages(budget=most), Learned()]
    told: list[str] = []
    found = audit(model, ids, ids, config=CONFIG, attention=tried, on_call=told.append)
    assert told.count(f"budget {most} (TwoLevels): gradient") == 1
    assert told.count(f"budget {most}: gradient") == 1
    (sentence,) = found.advice
    assert f"is the smallest of 3 (Learned), {most} (TwoLevels), {most} whose" in sentence
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        show(console, found)
    assert f"{most} (TwoLevels)" in shown.get() and "3 (Learned)" in shown.get()
    rules = [one["rule"] for one in json.loads(json.dumps(found.as_dict()))["sparse"]]
    assert rules[0] == repr(tried[0]) and rules[1]["budget"] == most
    assert rules[2].startswith("Learned(projection=Linear(")


def test_what_is_wrong_with_one_is_said_before_anything_runs() -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="attention.max_pages: expected an int >= 1, got 0"):
        audit(
            make("llama"),
            random_ids(1, TOKENS),
            random_ids(1, TOKENS),
            config=CONFIG,
            attention=[Learned(max_pages=0)],
            on_call=told.append,
        )
    assert not told


def test_only_rules_that_rank_by_means_are_told_of_bounds() -> None:
    model, ids = make("llama"), random_ids(1, TOKENS)
    for rule, told in ((Learned(), False), (oomb.TopKPages(budget=3), True)):
        found = audit(model, ids, ids, config=CONFIG, attention=[rule], tolerance=1e-9)
        assert ("summary bounds" in found.advice[0]) == told
