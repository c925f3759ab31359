"""Advice on memory that ``keep_outputs="auto"`` leaves alone until it is given by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import oomb
from oomb.plan import Machine, Recommendation, recommend
from oomb.units import seconds_text

MACHINE = Machine.described(gpu="h200", host_memory="125GiB")
WORDS = "leaves half of the memory"


def asked(tokens: int, machine: Machine = MACHINE, **settings: Any) -> Recommendation:
    config = oomb.Config(kv_grad_dtype="bfloat16", **settings)
    keep = frozenset({"kv_grad_dtype", "chunk_size"})
    return recommend(
        "qwen2.5-7b", tokens, machine=machine, config=config, keep=keep, optimizer=None
    )


def told(result: Recommendation) -> list[str]:
    return [sentence for sentence in result.advice if WORDS in sentence]


@pytest.mark.parametrize("machine", [MACHINE, MACHINE.of_rank(2)], ids=["one", "two"])
@pytest.mark.sampled(1)
def test_who_follows_it_gets_what_it_says(machine: Machine) -> None:
    first = asked(2**20, machine)
    (sentence,) = told(first)
    caps = dict(re.findall(r"(\w+_memory)='(\d+GiB)'", sentence))
    (share,) = re.findall(r"keep (\d+)% of", sentence)
    spared_text = sentence.split("the step take ")[1].removesuffix(" less")
    assert set(caps) == {"device_memory", "host_memory"}
    config = replace(first.config, **caps)
    then = recommend(
        "qwen2.5-7b",
        2**20,
        machine=machine,
        config=config,
        keep=frozenset({"kv_grad_dtype", "chunk_size", "recompute"}),
        optimizer=None,
    )
    assert then.fits and not told(then)
    assert then.prediction.kept_output_share == pytest.approx(int(share) / 100, abs=0.005)
    assert first.prediction.seconds is not None and then.prediction.seconds is not None
    spared = first.prediction.seconds - then.prediction.seconds
    assert seconds_text(spared) == spared_text
    assert then.prediction.host_bytes <= 0.9 * machine.host_bytes
    assert then.prediction.device_bytes <= 0.9 * machine.device_bytes


SILENT = {
    "all is kept": (2**17, {}),
    "nothing is asked for": (2**19, {"keep_outputs": "none"}),
    "a share is asked for": (2**19, {"keep_outputs": 0.1}),
    "both are given": (2**19, {"device_memory": "60GiB", "host_memory": "100GiB"}),
    "they spare little": (2**20, {"attention": oomb.TopKPages(budget=1)}),
}


@pytest.mark.parametrize("case", SILENT)
@pytest.mark.sampled(3)
def test_it_is_not_given_where(case: str) -> None:
    tokens, settings = SILENT[case]
    result = asked(tokens, **settings)
    assert result.fits and not told(result)
