"""What is counted without running is what a run allocates and computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import oomb
from engine.models import make
from oomb.errors import UnsupportedModelError
from oomb.plan import Machine, Planner
from oomb.plan.bare import bare_model
from oomb.plan.trace import Setting, Tracer
from oomb.testing.shapes import SHAPES

from .allocations import peak_allocated

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "full": ("llama", torch.float32, {}),
    "recompute": ("qwen3-tied", torch.float32, {"recompute": "layer"}),
    "windows": ("mistral", torch.float32, {}),
    "bf16": ("qwen2", torch.bfloat16, {}),
    "fp64": ("granite", torch.float64, {"recompute": "layer"}),
    "lora": ("llama", torch.float32, {"lora": True}),
    "batch": ("llama", torch.float32, {"batch": 2}),
    "sparse": ("llama", torch.float32, {"attention": oomb.TopKPages(budget=8)}),
    "mean keys": (  # of the fill outweigh what the sweep has
        "llama",
        torch.float32,
        {
            "attention": oomb.TopKPages(budget=2),
            "chunk_size": 16,
            "page_size": 2,
            "tokens": 6001,
        },
    ),
    "waves": ("llama", torch.float32, {"device_memory": "300KiB", "host_memory": "1GiB"}),
}


@pytest.mark.parametrize("name", CASES)
def test_memory_of_a_call(name: str) -> None:
    """Torch's own allocations of one call, counted block by block."""
    architecture, dtype, settings = CASES[name]
    settings = dict(settings)
    lora, batch = settings.pop("lora", False), settings.pop("batch", 1)
    tokens = settings.pop("tokens", 1025)
    config = oomb.Config(**{"chunk_size": 256, "page_size": 32, "recompute": "none"} | settings)
    model: Any = make(architecture, dtype, max_position_embeddings=8192)
    if lora:
        model = get_peft_model(model, LORA)
    ids = torch.randint(97, (batch, tokens))
    predicted = Planner(model, Machine.here("cpu")).predict(
        tokens, config, batch_size=batch, optimizer=None, timed=False
    )
    with oomb.Engine(model, config) as engine:
        measured = peak_allocated(lambda: engine.forward_backward(ids, ids))
    made = predicted.call_bytes - batch * (tokens - 1) * 3 * 8  # ids, labels, mask are there
    made += predicted.list_bytes  # on a CPU in the same memory
    assert made == pytest.approx(measured, rel=0.05)


def test_the_model_is_left_alone() -> None:
    model = make("llama", torch.float32)
    seen: list[object] = []
    model.model.layers[0].register_forward_hook(lambda *given: seen.append(given))
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    Planner(model, Machine.here("cpu")).predict(300, oomb.Config(chunk_size=64, page_size=16))
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


@pytest.mark.parametrize("fused", [False, True])
def test_work_of_a_large_model(fused: bool) -> None:
    """No memory is touched; the products are those of the weights, and layers are extrapolated."""
    shape, tokens = SHAPES["qwen2.5-7b"], 2048
    tracer = Tracer(bare_model("qwen2.5-7b"), "cuda", fused)
    assert tracer.parameter_bytes == pytest.approx(2 * 7.616e9, rel=0.001)
    trace = tracer.trace(Setting(tokens, 1, False, False))
    assert trace.sweep.flops == pytest.approx(6 * tokens * shape.linear_weights, rel=0.001)
    assert trace.sum_bytes == 4 * sum(p.numel() for p in tracer.trainable)
    assert [s.window for s in tracer.shapes] == [0] * shape.layers
    recomputed = tracer.trace(Setting(tokens, 1, True, False))
    kept = recomputed.sweep_peak_bytes - trace.sum_bytes
    assert kept < 0.6 * (trace.sweep_peak_bytes - trace.sum_bytes)
    assert recomputed.sweep.flops > 1.2 * trace.sweep.flops


def test_extrapolation_over_layers() -> None:
    model = make("qwen2", torch.float32, num_hidden_layers=9)
    whole, some = Tracer(model, "cpu", False), Tracer(model, "cpu", False)
    whole._samples = None
    for setting in (Setting(512, 1, False, False), Setting(256, 2, True, True)):
        assert vars(some.trace(setting)) == vars(whole.trace(setting))


def test_fused_kernels_keep_less() -> None:
    setting = Setting(1024, 1, False, False)
    plain, fused = (Tracer(bare_model("qwen2.5-1.5b"), "cuda", f).trace(setting) for f in (0, 1))
    assert fused.sweep_peak_bytes < plain.sweep_peak_bytes


def test_refuses_what_looks_at_values() -> None:
    model = make("gpt-oss", torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"GptOss.*cannot be planned"):
        Planner(model, Machine.here("cpu"))
