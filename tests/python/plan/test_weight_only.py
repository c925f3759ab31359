"""Bases in 4 and 8 bits of torchao under adapters: gradients, memory, refusals, and plans."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

import oomb
from oomb.model.weight_only import parts_of, unpacked, with_parts
from oomb.plan import Machine, Planner
from oomb.trace.bare import bare_model
from oomb.trace.meter import Meter
from oomb.trace.quantized import PackedLinear

from .allocations import peak_allocated

logging.getLogger("torchao").setLevel(logging.ERROR)
ao = pytest.importorskip("torchao.quantization")
nf4_api = pytest.importorskip("torchao.prototype._nf4tensor_api")
mx_formats = pytest.importorskip("torchao.prototype.mx_formats.inference_workflow")

IDS = torch.randint(1, 256, (2, 150), generator=torch.Generator().manual_seed(3))
SHAPE = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LORA = {"r": 4, "target_modules": "all-linear"}


def _nf4() -> Any:
    config = nf4_api.NF4WeightOnlyConfig()
    config.scaler_block_size = 32  # of 64 values each: the key's weight has 8192
    return config


FORMATS: dict[str, Callable[[], Any]] = {
    "int8": lambda: ao.Int8WeightOnlyConfig(),
    "int8, groups": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32)),
    "float8": lambda: ao.Float8WeightOnlyConfig(),
    "4 bits in a byte": lambda: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=ao.PerGroup(32)
    ),
    "nf4": _nf4,
    "nvfp4": lambda: mx_formats.NVFP4WeightOnlyConfig(),
}


def adapted(
    kind: str,
    dtype: torch.dtype = torch.float32,
    shape: Any = SHAPE,
    head: bool = False,
    **lora: Any,
) -> Any:
    """With adapters of which no factor is zero, so that every one gets a gradient."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(shape).to(dtype)
    ao.quantize_(base if head else base.model, FORMATS[kind]())
    model: Any = get_peft_model(base, LoraConfig(**LORA | lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("kind", "settings", "others"),
    [
        ("int8", {"recompute": "none"}, {}),
        ("int8", {"recompute": "layer"}, {"use_dora": True, "head": True}),
        ("int8, groups", {}, {}),
        ("float8", {}, {"shape": LlamaConfig(**SHAPE.to_dict() | {"attention_bias": True})}),
        ("4 bits in a byte", {}, {}),
        ("nf4", {"recompute": "layer"}, {}),
        ("nvfp4", {"recompute": "none"}, {"use_dora": True, "head": True}),
    ],
)
def test_gradients_are_those_of_ordinary_training(
    kind: str, settings: Any, others: dict[str, Any]
) -> None:
    """Also of adapters below layers that are quantised: torchao's own backward is the reference."""
    model = adapted(kind, **others)
    with oomb.Engine(model, oomb.Config(chunk_size=32, page_size=16, **settings)) as engine:
        step = engine.forward_backward(IDS, IDS)
    ours = gradients(model)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    theirs = gradients(model)
    assert float(step.loss) == pytest.approx(loss.item(), rel=1e-5)
    assert ours.keys() == theirs.keys()
    assert all(n in ours for n, p in model.named_parameters() if p.requires_grad)
    for name, gradient in theirs.items():
        assert gradient.norm() > 0
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 1e-5, name


# Values of NF4 and of NVFP4's e2m1, by code.
NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
NF4 += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-value for value in E2M1]


def decoded_nf4(weight: Any) -> torch.Tensor:
    """In fp64: 64 values have a scale in a byte, 32 scales a factor; the first value is high."""
    scales = weight.quantized_scalers.double().view(-1, 32)
    scales = scales / weight.quantization_factor.double()[:, None] + weight.scaler_mean.double()
    codes = torch.stack([weight.quantized_data >> 4, weight.quantized_data & 15], -1).long()
    values = torch.tensor(NF4, dtype=torch.float64)[codes]
    return (values.view(-1, 64) * scales.view(-1, 1)).view(weight.shape)


def decoded_nvfp4(weight: Any) -> torch.Tensor:
    """In fp64: 16 values have a scale in e4m3; the first value is low.

    Of 128 rows and 4 columns of scales one of row r and column c has place 16 (r % 32) +
    4 (r // 32) + c.
    """
    rows, columns = weight.shape
    row, column = torch.arange(rows)[:, None], torch.arange(columns // 16)[None]
    tile = (row // 128) * -(-columns // 64) + column // 4
    place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
    scales = weight.scale.double().flatten()[place] * weight.per_tensor_scale.double()
    codes = torch.stack([weight.qdata & 15, weight.qdata >> 4], -1).view(rows, columns).long()
    return torch.tensor(E2M1, dtype=torch.float64)[codes] * scales.repeat_interleave(16, 1)


@pytest.mark.parametrize(("kind", "decoded"), [("nf4", decoded_nf4), ("nvfp4", decoded_nvfp4)])
def test_four_bits_train_what_their_codes_say(
    kind: str, decoded: Callable[[Any], torch.Tensor]
) -> None:
    """A model in fp64 with weights that are decoded here."""
    model = adapted(kind)
    with oomb.Engine(model, oomb.Config(chunk_size=32, page_size=16)) as engine:
        loss = engine.forward_backward(IDS, IDS).loss
    base = LlamaForCausalLM(SHAPE).double()
    plain: Any = get_peft_model(base, LoraConfig(**LORA))
    known = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        codes = type(known[name]).__name__ in ("NF4Tensor", "NVFP4Tensor")
        parameter.data = decoded(known[name]) if codes else known[name].data.double()
    expected = plain.train()(input_ids=IDS, labels=IDS, use_cache=False).loss
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = gradients(model), gradients(plain)
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 3 * 7
    for name, gradient in theirs.items():
        assert gradient.norm() > 0
        assert float((ours[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_nothing_is_left_on_the_model() -> None:
    model = adapted("int8")
    with oomb.Engine(model, oomb.Config(chunk_size=32, page_size=16)) as engine:
        engine.forward_backward(IDS, IDS)
    assert not any("forward" in vars(m) for m in model.modules() if type(m) is nn.Linear)


@pytest.mark.parametrize(
    ("kind", "of_byte"), [("int8", 1), ("4 bits in a byte", 1), ("nf4", 2), ("nvfp4", 2)]
)
def test_weights_on_the_host(kind: str, of_byte: int) -> None:
    """Codes travel, scales stay; no bit changes."""
    results = []
    for weights in ("device", "host"):
        model = adapted(kind, use_dora=kind != "nf4")  # which peft cannot unpack
        settings = oomb.Config(chunk_size=32, page_size=16, weights=weights)  # type: ignore[arg-type]
        with oomb.Engine(model, settings) as engine:
            step = engine.forward_backward(IDS, IDS)
            moved = engine._model.host_weights
            if moved is not None:
                codes = 3 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 320) / of_byte
                assert codes <= moved.host_bytes < 1.05 * codes
        results.append((step.loss, gradients(model)))
    (loss, expected), (ours, found) = results
    assert torch.equal(loss, ours) and expected.keys() == found.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Int8DynamicActivationInt8", "Int8DynamicActivationIntx"])
def test_products_that_pass_no_gradient_are_refused(kind: str) -> None:
    base = LlamaForCausalLM(SHAPE)
    ao.quantize_(base.model, getattr(ao, f"{kind}WeightConfig")())
    with pytest.raises(
        oomb.UnsupportedModelError,
        match=r"q_proj.*passes no gradient.*Int8WeightOnlyConfig\(\).*4 bits of bitsandbytes",
    ):
        oomb.Engine(get_peft_model(base, LoraConfig(**LORA)))


def int4_of(name: str) -> Any:
    """Such a weight without a kernel of its own: it takes a GPU to quantise by it."""
    parts = {
        "Int4Tensor": ("scale", "zero_point"),
        "Int4PlainInt32Tensor": ("scale", "zero_point"),
        "Int4TilePackedTo4dTensor": ("scale_and_zero",),
        "Int4PreshuffledTensor": ("group_scale",),
    }[name]
    scales = {part: torch.ones(4, 128) for part in parts}
    codes = torch.zeros(128, 64, dtype=torch.uint8)
    return getattr(ao, name)(qdata=codes, block_size=[1, 32], shape=(128, 128), **scales)


@pytest.mark.parametrize(
    "name",
    ["Int4Tensor", "Int4PlainInt32Tensor", "Int4TilePackedTo4dTensor", "Int4PreshuffledTensor"],
)
def test_int4_of_kernels_is_refused(name: str) -> None:
    base = LlamaForCausalLM(SHAPE)
    projection = base.model.layers[1].self_attn.q_proj
    projection.weight = nn.Parameter(int4_of(name), requires_grad=False)
    with pytest.raises(
        oomb.UnsupportedModelError,
        match=rf"layers\.1\.self_attn\.q_proj\.weight: torchao's {name} .*4 bits of bitsandbytes",
    ):
        oomb.Engine(base)


def test_a_quantized_embedding_is_refused() -> None:
    base = LlamaForCausalLM(SHAPE)
    ao.quantize_(
        base.model, FORMATS["4 bits in a byte"](), lambda m, _: isinstance(m, nn.Embedding)
    )
    with pytest.raises(oomb.UnsupportedModelError, match=r"embed_tokens.weight: .*got a Embedding"):
        oomb.Engine(base)


def test_a_quantized_weight_that_requires_a_gradient_is_refused() -> None:
    model = adapted("int8")
    model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight.requires_grad_(True)
    with pytest.raises(oomb.UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj.*freeze it"):
        oomb.Engine(model)


# Plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "recompute"),
    [
        ("int8", torch.float32, "none"),
        pytest.param("int8", torch.float32, "layer", marks=pytest.mark.slow),
        ("float8", torch.bfloat16, "layer"),
        ("nf4", torch.float32, "none"),
        ("nvfp4", torch.bfloat16, "layer"),
    ],
)
@pytest.mark.sampled(2)
def test_a_plan_counts_what_a_call_allocates(kind: str, dtype: torch.dtype, recompute: Any) -> None:
    """Unpacked weights of several layers would be more than all the rest.

    One weight takes up to 30 bytes a value while it is unpacked.
    """
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": 2048}
    model = adapted(kind, dtype, LlamaConfig(**SHAPE.to_dict() | sizes | {"head_dim": 128}))
    config = oomb.Config(chunk_size=32, page_size=32, recompute=recompute)
    predicted = Planner(model, Machine.here("cpu")).predict(
        129, config, optimizer=None, timed=False
    )
    ids = IDS[:1, :129]
    with oomb.Engine(model, config) as engine:
        measured = peak_allocated(lambda: engine.forward_backward(ids, ids))
    assert predicted.call_bytes + predicted.list_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_in_int8_are_unpacked_as_weights(dtype: torch.dtype) -> None:
    """On shapes: a CPU takes temporaries of its own for a product of two dtypes."""
    weight: Any = adapted("int8", dtype).base_model.model.model.layers[0].mlp.up_proj
    weight = weight.base_layer.weight
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = with_parts(weight, [torch.empty_like(part) for part in parts_of(weight)])
        layer = nn.Linear(128, 320, bias=False, dtype=dtype)
        packed = PackedLinear(layer, 320 * 128, 0, True, "cpu")
        x = torch.empty(1, 128, dtype=dtype, requires_grad=True)
        out, grad = packed(x), torch.empty(1, 320, dtype=dtype)
        with Meter() as backward:
            out.backward(grad)
        with Meter() as unpacking:
            product = grad @ unpacked(fake, dtype)
    assert product.shape == x.shape
    assert backward.peak_bytes == pytest.approx(unpacking.peak_bytes, rel=0.02)
    assert backward.work.moved_bytes == pytest.approx(unpacking.work.moved_bytes, rel=0.02)


def test_a_plan_without_weights_counts_what_torchao_takes() -> None:
    lora = LoraConfig(**LORA, task_type="CAUSAL_LM")
    bare = bare_model(SHAPE, dtype=torch.bfloat16, adapter=lora, quantization="int8")
    predictions = [
        Planner(model, Machine.described(gpu="h200")).predict(
            4096, oomb.Config(recompute="layer"), timed=False, dry_run=False
        )
        for model in (bare, adapted("int8", torch.bfloat16))
    ]
    described, real = predictions
    assert described.parameter_bytes == pytest.approx(real.parameter_bytes, rel=1e-3)
    assert described.movable_bytes == real.movable_bytes
    # Adapters of a model with weights are in fp32 here, and peft's copy what a layer gives.
    assert described.call_bytes == pytest.approx(real.call_bytes, rel=0.05)
