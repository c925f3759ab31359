"""``auto``: weights are shared, and gradient sums leave the device, as little as memory allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
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

LARGE = Qwen2Config(
    vocab_size=1024,
    hidden_size=2048,
    intermediate_size=32768,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=2,
    max_position_embeddings=8192,
    dtype="bfloat16",
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


@pytest.mark.parametrize("task", ["reward", "grpo"])
def test_other_tasks_share_too(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"rewards": ["think_format_reward"]} if task == "grpo" else {}
    assert chosen("auto", {"zero1"}, monkeypatch, task=task, **given) == "zero1"


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"states": "host"}},
        {"engine": {"weights": "host"}},
        {"optimizer": {"name": "adafactor"}},  # looks at more than a rank's rows
        {"parallel": {"weights": "auto", "cp": 1}},  # groups of one
    ],
)
def test_what_does_not_go_with_shares_is_not_shared(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"zero1", "zero2", "zero3"}
    assert chosen("auto", shared, monkeypatch, **changes) is None
    assert chosen("auto", {"replicated", *shared}, monkeypatch, **changes) == "replicated"


def test_whole_sums_of_a_call_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    told = settings("zero1", engine={"main_grad_device": "host"})
    with pytest.raises(BadInput, match=r"engine.main_grad_device: expected 'device' or 'auto' be"):
        arguments._expect_no_other_place(told)


def test_what_was_chosen_is_what_runs() -> None:
    told = arguments.decided(settings("auto"), arguments.Holding("zero2", "device"))
    assert arguments.shards_weights(told)
    assert arguments.engine_config(told).sharded_weights == "zero2"
    told = arguments.decided(settings("auto"), arguments.Holding("replicated", "host"))
    assert not arguments.shards_weights(told)
    assert arguments.engine_config(told).main_grad_device == "host"


@pytest.mark.parametrize(
    ("weights", "place", "device", "expected"),
    [
        (
            "auto",
            "auto",
            "cuda",
            [
                "replicated device",
                "zero1 device",
                "zero2 device",
                "zero3 device",
                "replicated host",
                "zero2 host",
                "zero3 host",
            ],
        ),
        ("auto", "device", "cuda", ["replicated device", *(f"zero{n} device" for n in (1, 2, 3))]),
        ("auto", "host", "cuda", ["replicated host", "zero2 host", "zero3 host"]),
        ("replicated", "auto", "cuda", ["replicated device", "replicated host"]),
        ("replicated", "auto", "cpu", ["replicated device"]),  # both are one memory there
        ("zero1", "auto", "cuda", ["zero1 device"]),
        ("zero2", "auto", "cuda", ["zero2 device", "zero2 host"]),
        ("zero3", "host", "cpu", ["zero3 host"]),
    ],
)
def test_what_auto_tries_in_turn(
    weights: str, place: str, device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "device_of", lambda _: torch.device(device))
    tried = arguments.holdings_to_try(settings(weights, engine={"main_grad_device": place}))
    assert [f"{holding.weights} {holding.sums}" for holding in tried] == expected


@pytest.mark.parametrize(("gib", "place"), [(80, "device"), (15, "host")])
def test_sums_go_to_the_host_where_only_that_fits(
    gib: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of 2.6 billion parameters are trained, on a GPU of so many GiB, by its real plan."""
    monkeypatch.setattr(arguments, "ranks_in_job", lambda: 1)
    monkeypatch.setattr(arguments, "device_of", lambda _: torch.device("cuda"))
    gpu = Machine.described(gpu="h100", device_memory=gib << 30, host_memory="120GiB")
    monkeypatch.setattr(Machine, "here", lambda _: gpu)
    told = settings("auto", context=4096, optimizer={"name": "sgd"})
    found = planning.plan_run(told, LARGE, told.context, Console(quiet=True))
    assert found.config.main_grad_device == place
