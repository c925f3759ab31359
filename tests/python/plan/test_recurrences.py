"""Models with recurrent layers, traced: their loops over tokens left out, their turns sampled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from oomb.trace import trace
from oomb.trace.trace import Setting, Tracer

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.recurrent_models import make_recurrent


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
    setting = Setting(64, 1, True, False)
    sampled = Tracer(model, "cpu", False).trace(setting)
    monkeypatch.setattr(trace, "sample_sizes", lambda _: None)
    whole = Tracer(model, "cpu", False).trace(setting)
    assert sampled.sweep_peak_bytes == pytest.approx(whole.sweep_peak_bytes, rel=0.02)
    assert sampled.sweep.flops == pytest.approx(whole.sweep.flops, rel=0.02)
    assert sampled.sum_bytes == whole.sum_bytes
