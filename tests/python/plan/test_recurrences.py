"""Models with recurrent layers, traced: their loops over tokens left out, their turns sampled."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oomb.model.causal import CausalModel
from oomb.model.mixers import state_bytes
from oomb.model.probe import found_mixers
from oomb.trace import trace
from oomb.trace.setting import Setting
from oomb.trace.trace import Tracer

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.models import make
from engine.recurrent_models import RECURRENT, make_recurrent


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "nemotron-h"])
def test_a_few_turns_stand_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "qwen3.5": {"layer_types": ["linear_attention", "full_attention"] * 4},
        "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 3},
        "nemotron-h": {"layers_block_type": ["mamba", "mlp", "attention"] * 3},
    }[name]
    model = make_recurrent(
        name, torch.float32, num_hidden_layers=len(next(iter(kinds.values()))), **kinds
    )
    setting = Setting(64, 1, "layer", False)
    sampled = Tracer(model, "cpu", False).trace(setting)
    monkeypatch.setattr(trace, "sample_sizes", lambda _: None)
    whole = Tracer(model, "cpu", False).trace(setting)
    assert sampled.sweep_peak_bytes == pytest.approx(whole.sweep_peak_bytes, rel=0.02)
    assert sampled.sweep.flops == pytest.approx(whole.sweep.flops, rel=0.02)
    assert sampled.sum_bytes == whole.sum_bytes


@pytest.mark.parametrize("name", ["qwen3.5-moe", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_beside_experts_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    """Torch knows shapes of grouped products in bf16 alone, and writes an error for others."""
    model = (make_recurrent if name in RECURRENT else make)(name, dtype)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        counted = Tracer(model, "cpu", False).state_bytes
    finally:
        logger.removeHandler(handler)
    assert records == []
    assert counted == state_bytes(found_mixers(CausalModel(model)))
    assert (counted > 0) == (name in RECURRENT)


# All but ZAYA, whose convolutions are torch's own.
@pytest.mark.parametrize("name", sorted(RECURRENT.keys() - {"zaya"}))
@pytest.mark.sampled(6)
def test_kernels_of_other_packages_get_no_tensor_without_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's kernel would read at the address that such a tensor has not; here one is stood in
    for, in every function that transformers lets a package replace."""
    model = make_recurrent(name, torch.bfloat16)
    setting = Setting(64, 1, "layer", False)
    plain = Tracer(model, "cpu", False)
    expected = plain.trace(setting)
    file = sys.modules[type(model).__module__]
    replaced = 0
    for function, wrapped in list(vars(file).items()):
        own = getattr(wrapped, "__wrapped__", None)
        if callable(own) and own.__module__ == file.__name__ and _is_of_package(wrapped):
            monkeypatch.setattr(file, function, _kernel(own))
            replaced += 1
    assert replaced > 0
    tracer = Tracer(model, "cpu", False)
    assert tracer.state_bytes == plain.state_bytes > 0
    assert tracer.trace(setting) == expected


def _is_of_package(function: Any) -> bool:
    """Whether transformers takes it from a package where that is installed."""
    return "implementation" in function.__code__.co_freevars


def _kernel(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def kernel(*args: Any, **keywords: Any) -> Any:
        raise AssertionError(f"{own.__name__} was given tensors without memory")

    return kernel
