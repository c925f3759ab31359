"""Bases in 4 bits under adapters: gradients, what is refused, and what a plan says of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import oomb
from oomb.model import adapters, causal
from oomb.plan import Machine, Planner
from oomb.trace.bare import bare_model
from oomb.trace.setting import Setting

pytest.importorskip("bitsandbytes")

IDS = torch.randint(1, 256, (2, 150), generator=torch.Generator().manual_seed(3))
CONFIG = oomb.Config(chunk_size=32, page_size=16)
SHAPE = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(SHAPE).save_pretrained(place)
    return place


def quantized(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    chosen = BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **settings)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=chosen, device_map="cpu", dtype=dtype
    )


def four_bits(folder: Path, kind: str = "nf4", double: bool = True, **others: Any) -> Any:
    return quantized(
        folder,
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        **others,
    )


def adapted(base: nn.Module, **settings: Any) -> Any:
    """With adapters of which no factor is zero, so that every one gets a gradient."""
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", **settings))  # type: ignore[arg-type]
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


@pytest.mark.parametrize(
    ("kind", "double", "dora"),
    [("nf4", True, False), ("nf4", False, True), ("fp4", True, True), ("fp4", False, False)],
)
def test_gradients_are_those_of_ordinary_training(
    folder: Path, kind: str, double: bool, dora: bool
) -> None:
    model = adapted(four_bits(folder, kind, double), use_dora=dora)
    with oomb.Engine(model, CONFIG) as engine:
        step = engine.forward_backward(IDS, IDS)
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert ours and all("lora_" in name for name in ours)
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    assert float(step.loss) == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.norm() > 0
            error = (ours[name] - parameter.grad).norm() / parameter.grad.norm()
            assert float(error) < 1e-5, name


@pytest.mark.parametrize("fast", [False, True])
def test_weights_on_the_host(folder: Path, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed travels, scales stay; no bit changes. Fast adapters keep codes meanwhile."""
    monkeypatch.setattr(causal, "device_multiplies_wide", lambda _: fast)
    kept = Counter[str]()
    backward = adapters._AdaptedPacked.backward
    counted = lambda *of: (kept.update(["packed"]), backward(*of))[1]  # noqa: E731
    monkeypatch.setattr(adapters._AdaptedPacked, "backward", staticmethod(counted))
    results = []
    for weights in ("device", "host"):
        torch.manual_seed(2)
        base = four_bits(folder, dtype=torch.bfloat16 if fast else torch.float32)
        model = adapted(base, use_dora=not fast)
        settings = oomb.Config(chunk_size=32, page_size=16, weights=weights)  # type: ignore[arg-type]
        with oomb.Engine(model, settings) as engine:
            step = engine.forward_backward(IDS, IDS)
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((step.loss, grads))
    assert (kept["packed"] > 0) == fast
    (loss, gradients), (ours, our_gradients) = results
    assert torch.equal(loss, ours) and gradients.keys() == our_gradients.keys()
    assert all(torch.equal(our_gradients[name], g) for name, g in gradients.items())


# Refusals -----------------------------------------------------------------------------------------


def test_outliers_chosen_per_batch_are_refused(folder: Path) -> None:
    model = adapted(quantized(folder, load_in_8bit=True))
    with pytest.raises(
        oomb.UnsupportedModelError, match=r"q_proj.*: LLM.int8 .*llm_int8_threshold=0.0.*4 bits"
    ):
        oomb.Engine(model, CONFIG)


def test_eight_bits_without_outliers_train(folder: Path) -> None:
    model = adapted(quantized(folder, load_in_8bit=True, llm_int8_threshold=0.0))
    with oomb.Engine(model, CONFIG) as engine:
        step = engine.forward_backward(IDS, IDS)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    assert float(step.loss) == pytest.approx(loss.item(), rel=1e-5)


def test_a_quantized_weight_that_requires_a_gradient_is_refused(folder: Path) -> None:
    """Packed into a dtype that could have one; bitsandbytes would leave it without."""
    model = adapted(four_bits(folder, bnb_4bit_quant_storage=torch.bfloat16))
    layer = model.base_model.model.model.layers[1].mlp.up_proj.base_layer
    layer.weight.requires_grad_(True)
    with pytest.raises(oomb.UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj.*freeze it"):
        oomb.Engine(model, CONFIG)


# Plans --------------------------------------------------------------------------------------------


def bytes_of(model: nn.Module) -> int:
    """Parameters and buffers, with what bitsandbytes keeps of each quantised weight."""
    tensors = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for level in (state, getattr(state, "state2", None)):
            if level is not None:
                tensors += [t for t in vars(level).values() if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_plan_counts_what_bitsandbytes_takes(folder: Path, kind: str) -> None:
    machine = Machine.described(gpu="h200")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    planner = Planner(SHAPE, machine, dtype=torch.bfloat16, adapter=lora, quantization=kind)
    model = get_peft_model(four_bits(folder, kind, dtype=torch.bfloat16), lora)
    assert planner.tracer.parameter_bytes == pytest.approx(bytes_of(model), rel=0.05)
    trainable = sum(p.numel() for p in planner.tracer.trainable)
    assert trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_plan_counts_the_weight_that_is_unpacked() -> None:
    """In forward and backward one matrix at a time is there in 16 bits."""
    machine = Machine.described(gpu="h200")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    peaks, sizes = [], []
    for quantization in (None, "nf4"):
        planner = Planner(
            SHAPE, machine, dtype=torch.bfloat16, adapter=lora, quantization=quantization
        )
        prediction = planner.predict(8192, oomb.Config(chunk_size=128, recompute="layer"))
        peaks.append(prediction.call_bytes - prediction.sum_bytes)
        sizes.append(prediction.parameter_bytes)
    assert sizes[1] < 0.45 * sizes[0]
    assert 0 <= peaks[1] - peaks[0] <= 2 * 2 * 320 * 128


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("layer", 2)])
def test_a_plan_counts_the_traffic_of_unpacking(
    recompute: Any, forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a byte read and two written for a weight, in each forward and in the backward.

    Adapters run as PEFT has them: beside plain weights a faster forward takes both at once.
    """
    monkeypatch.setattr("oomb.model.causal.adapter_forwards", lambda *_: {})
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    setting = Setting(128, 1, recompute, True, "float32")
    plain, packed = (
        Planner(
            SHAPE,
            Machine.described(gpu="h200"),
            dtype=torch.bfloat16,
            adapter=lora,
            quantization=quantization,
        ).tracer.trace(setting)
        for quantization in (None, "nf4")
    )
    queries, keys, mlp = 128 * 128, 128 * 64, 128 * 320
    weights = 3 * (2 * queries + 2 * keys + 3 * mlp)
    untouched = queries + 2 * keys  # nothing before the first layer wants a gradient
    swept = packed.sweep.moved_bytes - plain.sweep.moved_bytes
    expected = 2.5 * (forwards * weights + weights - untouched)
    assert swept == pytest.approx(expected, rel=1e-3)
    filled = packed.fill.moved_bytes - plain.fill.moved_bytes
    unfilled = queries + 3 * mlp  # the last layer ends where its keys and values are known
    assert filled == pytest.approx(2.5 * (weights - unfilled), rel=1e-3)


def test_an_engine_counts_a_chunk_of_a_quantized_model(folder: Path) -> None:
    """On layers without weights. The adapters of a real one copy each layer's result."""
    machine = Machine.described(gpu="h200")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    real = get_peft_model(four_bits(folder, dtype=torch.bfloat16), lora)
    described = bare_model(SHAPE, dtype=torch.bfloat16, adapter=lora, quantization="nf4")
    peaks = {
        Planner(model, machine).predict(4096, oomb.Config(recompute="layer")).call_bytes
        for model in (real, described)
    }
    assert max(peaks) < 1.05 * min(peaks)


@pytest.mark.parametrize(
    ("quantization", "adapter", "error"),
    [
        ("nf4", None, "quantization: expected adapters beside it"),
        ("int4", LoraConfig(r=4), "quantization: expected one of nf4, fp4, int8, got 'int4'"),
    ],
)
def test_plans_that_cannot_be(quantization: str, adapter: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        bare_model(SHAPE, adapter=adapter, quantization=quantization)
