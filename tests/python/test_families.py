"""docs/models.md says of each family what an engine says of it, and what is measured."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

import oomb

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
families: Any = __import__("model_families")
PAGE = (ROOT / "docs" / "models.md").read_text()
EXACT = {row[0].strip("`"): row for row in families.table_rows(PAGE)}
REFUSED = families.listed(PAGE, "Refused")
OTHERS = families.listed(PAGE, "Wrong") | families.listed(PAGE, "Not built")

# One of each kind: soft caps, sinks, other head dims, latents, blocks, states, kernels of a class's
# own; refused for positions, a recurrence, an indexer, two calls, several streams, its own forward,
# a bias on scores, a cache of its own.
_KINDS = [
    *("llama", "gemma2", "gpt_oss", "mimo_v2_flash", "gemma3n", "gemma4_text", "deepseek_v3"),
    *("llama4_text", "qwen3_5_text", "bamba", "lfm2", "kimi_linear", "zaya", "phimoe", "bart"),
    *("rwkv", "mamba", "deepseek_v32", "qwen4_exp", "diffllama", "musicgen", "gemma4_assistant"),
    *("xglm", "inkling2_text", "inkling_text", "deepseek_v4"),
]
_REST = sorted(set(families.FAMILIES) - set(_KINDS))
QUICK = [*_KINDS, *random.Random(0).sample(_REST, 26)]

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        f"transformers {transformers.__version__}" not in " ".join(PAGE.split()),
        reason="the page is of another transformers",
    ),
]


def test_every_family_is_on_the_page_once() -> None:
    assert sorted([*EXACT, *REFUSED, *OTHERS]) == sorted(families.FAMILIES)


def test_the_page_counts_what_it_lists() -> None:
    words = " ".join(PAGE.split())
    assert f"{len(EXACT)} of {len(families.FAMILIES)} families are exact" in words
    assert f"{len(REFUSED)} are refused, 0 are wrong or crash" in words


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow, pytest.mark.release])
        for name in families.FAMILIES
    ],
)
def test_the_page_says_what_is_measured(family: str) -> None:
    found = families.verdict(family)
    if family in EXACT:
        name, order, *others = EXACT[family]
        assert found.kind == "exact", found
        assert found.error < 10 * float(order)  # rounding differs between processors
        measured = families.cells(family, found)
        assert [name, *others] == [measured[0], *measured[2:]]
    else:
        assert found.kind == ("refused" if family in REFUSED else "not built"), found
        assert _without_numbers(found.reason) == _without_numbers(
            REFUSED.get(family) or OTHERS[family]
        )


def _without_numbers(reason: str) -> str:
    """How far off something was depends on the processor."""
    return re.sub(r"by \d\.\de[-+]\d+ of", "by … of", reason)


@pytest.mark.parametrize("family", REFUSED)
def test_a_refusal_says_where_and_why(family: str) -> None:
    where, why = REFUSED[family].split(": ", 1)
    assert re.search(r"^[\w.]+( \d+)?( \(\w+\))?$", where)
    assert len(why) > 20
    assert not re.search(r"tensor\(|out of (bounds|range)|…$", REFUSED[family])


def test_gradients_that_are_not_numbers_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    run = oomb.Engine.forward_backward

    def broken(engine: oomb.Engine, *args: Any, **settings: Any) -> oomb.Step:
        step = run(engine, *args, **settings)
        for parameter in engine._model.causal.parameters():
            parameter.grad.fill_(float("nan"))
        return step

    monkeypatch.setattr(oomb.Engine, "forward_backward", broken)
    assert families.verdict("llama").kind == "wrong"
