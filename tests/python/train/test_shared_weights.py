"""``parallel.weights: auto``: shared among processes as little as memory allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers import Qwen2Config

from oomb.plan import Machine
from oomb.train import arguments, planning
from oomb.train.errors import BadInput
from oomb.train.settings import RunSettings

RANKS = 4
CONFIG = Qwen2Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    dtype="float32",
)


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "ranks_in_job", lambda: RANKS)
    monkeypatch.setattr(planning, "ranks_of_host", lambda: RANKS)


def settings(weights: str, **changes: Any) -> RunSettings:
    given: dict[str, Any] = {
        "output_dir": "run",
        "model": {"name": "model"},
        "data": {"train": "text.txt"},
        "context": 2048,
        "engine": {"chunk_size": 256, "page_size": 64},
        "training": {"steps": 1},
        "parallel": {"weights": weights},
    }
    return RunSettings.model_validate(given | changes)


def chosen(
    weights: str, fitting: set[str], monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> str | None:
    """How the plan has weights held, where only ``fitting`` fit; None: it refuses."""

    def predict(*_: object, machine: Machine, config: Any = None, **__: object) -> Any:
        return SimpleNamespace(machine=machine, fits=machine.weights in fitting)

    def recommend(*_: object, **__: object) -> Any:
        raise BadInput("nothing fits")

    monkeypatch.setattr(planning, "predict", predict)
    monkeypatch.setattr(planning, "recommend", recommend)
    monkeypatch.setattr(planning, "_print_plan", lambda *_: None)
    told = settings(weights, **changes)
    try:
        return planning.plan_run(told, CONFIG, told.context, Console(quiet=True)).machine.weights
    except BadInput:
        return None


@pytest.mark.parametrize(
    ("weights", "fitting", "expected"),
    [
        ("auto", {"replicated", "zero1", "zero2", "zero3"}, "replicated"),
        ("auto", {"zero1", "zero2", "zero3"}, "zero1"),
        ("auto", {"zero3"}, "zero3"),
        ("auto", set(), None),
        ("zero2", {"replicated", "zero1", "zero2", "zero3"}, "zero2"),
        ("zero1", {"zero3"}, None),
        ("replicated", {"zero3"}, None),
    ],
)
def test_the_first_that_fits(
    weights: str, fitting: set[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(weights, fitting, monkeypatch) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"states": "host"}},
        {"engine": {"weights": "host"}},
        {"task": "dpo"},
        {"parallel": {"weights": "auto", "cp": 1}},  # groups of one
    ],
)
def test_what_does_not_go_with_shares_is_not_shared(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"zero1", "zero2", "zero3"}
    assert chosen("auto", shared, monkeypatch, **changes) is None
    assert chosen("auto", {"replicated", *shared}, monkeypatch, **changes) == "replicated"


def test_what_was_chosen_is_what_runs() -> None:
    told = arguments.with_weights(settings("auto"), "zero2")
    assert arguments.shards_weights(told)
    assert arguments.engine_config(told).sharded_weights == "zero2"
    assert not arguments.shards_weights(arguments.with_weights(settings("auto"), "replicated"))
    named = settings("zero1")
    assert arguments.with_weights(named, "replicated") is named
