"""What the fill keeps of MLPs the sweep does not compute again; nothing else changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import oomb
from oomb.core.keeping import Keeping, MlpOutput
from oomb.core.kept_outputs import KeptOutputs
from oomb.core.layout import READ_OUTPUT, Chunks, PagedLayers, call_order
from oomb.core.tiers import PageLayout
from oomb.engine.mlp_outputs import mlp_outputs
from oomb.model import causal, products
from oomb.model.adapters import Products
from oomb.model.last_product import last_products
from oomb.model.layer_shape import LayerShape
from oomb.plan import Machine, Planner

from .models import make
from .reference import Result, assert_identical, chunked, random_ids
from .tiers import HOST, slot_bytes

LAYERS, CHUNKS, INNER = 3, 8, 512
SETTINGS: dict[str, Any] = {"chunk_size": 16, "page_size": 8}
FILLED = (CHUNKS - 1) * (LAYERS - 1)
SHAPE = LayerShape(query_heads=6, kv_heads=2, head_dim=8, window=0)


def wide(architecture: str = "llama", **settings: Any) -> Any:
    """A model whose MLPs are wide enough that their outputs are worth a copy."""
    return make(architecture, torch.float32, intermediate_size=INNER, **settings)


def kept_or_not(
    model: nn.Module,
    settings: dict[str, Any],
    ids: torch.Tensor,
    slots: int | None = None,
    **arguments: Any,
) -> tuple[Result, Result]:
    """The same call with what is worth keeping, and with nothing kept."""
    memory = {}
    if slots is not None:
        page = slot_bytes(model, oomb.Config(**SETTINGS))
        memory = {"device_memory": slots * page, "host_memory": HOST}
    results = []
    for keep in ("auto", "none"):
        config = oomb.Config(**{**SETTINGS, **settings}, **memory, keep_outputs=keep)
        torch.manual_seed(7)
        results.append(chunked(model, config, ids, ids, **arguments))
    return results[0], results[1]


def bytes_of(result: Result) -> int:
    assert result.step is not None
    return result.step.stats.kept_mlp_output_bytes


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_the_sweep_computes_no_kept_product_again(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each filled chunk and layer but the last layer is computed once less."""
    calls = Counter[tuple[int, ...]]()
    linear = products.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        calls[tuple(weight.shape)] += type(x) is torch.Tensor  # none that a plan traces
        return linear(x, weight, bias)

    model, ids = wide(), random_ids(1, 16 * CHUNKS)
    number = {}
    for keep in ("none", "auto"):
        config = oomb.Config(**SETTINGS, keep_outputs=keep, recompute=recompute)
        with oomb.Engine(model, config) as engine:
            monkeypatch.setattr(products, "linear", counted)
            step = engine.forward_backward(ids, ids)
            monkeypatch.setattr(products, "linear", linear)
        number[keep] = calls.pop((48, INNER))
    assert number["none"] - number["auto"] == FILLED
    of_chunk = -(-16 * 48 * 4 // 1024) * 1024  # a page holds 2 x 2 x 8 x 8 values
    assert step.stats.kept_mlp_output_bytes == FILLED * of_chunk


CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "llama": ("llama", {}, None),
    "llama, spilled": ("llama", {}, 20),
    "layers again": ("llama", {"recompute": "layer"}, None),
    "layers again, spilled": ("llama", {"recompute": "layer"}, 20),
    "sparse": ("llama", {"attention": oomb.TopKPages(budget=3)}, None),
    "sparse, spilled, in turns": ("llama", {"attention": oomb.TopKPages(budget=3)}, 20),
    "sampled, spilled": ("llama", {"backward": oomb.SampledChunks(keep=0.5, seed=3)}, 20),
    "truncated": ("llama", {"backward": oomb.TruncatedChunks(window=2)}, None),
    "biases": ("qwen2", {}, 20),
    "windows": ("mistral", {}, 20),
    "a norm behind the product": ("gemma2", {}, 20),
    "gate and up in one, layers again": ("phi3", {"recompute": "layer"}, 20),
    "a factor behind the product": ("granite", {}, None),
    "norms alone in front": ("cohere", {}, None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_else_changes(case: tuple[str, dict[str, Any], int | None]) -> None:
    architecture, settings, slots = case
    auto, none = kept_or_not(wide(architecture), settings, random_ids(1, 16 * CHUNKS - 5), slots)
    assert_identical(auto, none)
    assert bytes_of(auto) > 0 == bytes_of(none)


def test_a_batch_of_documents_with_padding_has_the_same_bits() -> None:
    ids = random_ids(2, 16 * CHUNKS - 5)
    mask = torch.ones_like(ids)
    mask[1, 90:] = 0
    auto, none = kept_or_not(wide(), {}, ids, 40, attention_mask=mask)
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


def test_a_bias_of_the_product_trains_as_before() -> None:
    auto, none = kept_or_not(wide(mlp_bias=True), {}, random_ids(1, 16 * CHUNKS))
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_products_that_do_not_train_are_kept_too(recompute: str) -> None:
    model = wide(mlp_bias=True)
    for layer in model.model.layers[:2]:
        layer.mlp.requires_grad_(False)
    auto, none = kept_or_not(model, {"recompute": recompute}, random_ids(1, 16 * CHUNKS))
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


def test_large_products_that_do_not_train_have_the_bits_of_torchs_own() -> None:
    """From a certain size on oneDNN is faster on some processors, and rounds otherwise."""
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "head_dim": 64}
    model = make("llama", torch.float32, **sizes)
    for layer in model.model.layers[:2]:
        layer.mlp.requires_grad_(False)
    settings = {"chunk_size": 128, "page_size": 32}
    auto, none = kept_or_not(model, settings, random_ids(1, 512))
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


def test_adapters_elsewhere_leave_the_product_as_it_is() -> None:
    from peft import LoraConfig, get_peft_model

    of_attention = get_peft_model(wide(), LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    auto, none = kept_or_not(of_attention, {}, random_ids(1, 16 * CHUNKS), 20)
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


def of_all_linear(model: Any, **settings: Any) -> Any:
    """With adapters beside all linear layers, whose weights are not zero."""
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4, **settings))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made


ADAPTED: dict[str, tuple[torch.dtype, bool, dict[str, Any]]] = {
    "by PEFT": (torch.float32, False, {}),
    "by PEFT, in bf16": (torch.bfloat16, False, {}),
    "beside": (torch.bfloat16, True, {}),
    "beside, in fp32": (torch.float32, True, {}),
    "DoRA": (torch.bfloat16, True, {"use_dora": True}),
    "dropout": (torch.bfloat16, True, {"lora_dropout": 0.3}),
}


@pytest.mark.parametrize("slots", [None, 30])
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("adapted", ADAPTED.values(), ids=ADAPTED)
@pytest.mark.sampled(8)
def test_products_with_an_adapter_are_kept(
    adapted: tuple[torch.dtype, bool, dict[str, Any]],
    recompute: str,
    slots: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The base's alone, or with the adapter's where both are one function."""
    dtype, beside, settings = adapted
    monkeypatch.setattr(causal, "device_multiplies_wide", lambda device: beside)
    model = of_all_linear(make("llama", dtype, intermediate_size=INNER), **settings).train()
    auto, none = kept_or_not(model, {"recompute": recompute}, random_ids(1, 16 * CHUNKS), slots)
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


def test_products_in_4_bits_are_kept_with_their_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(causal, "device_multiplies_wide", lambda device: True)
    model = make("llama", torch.bfloat16, intermediate_size=INNER)
    for layer in model.model.layers:
        linear = layer.mlp.down_proj
        packed = bnb.nn.Linear4bit(INNER, 48, bias=False, compute_dtype=torch.bfloat16)
        packed.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=packed)
        layer.mlp.down_proj = packed.to("cpu")
    adapted = of_all_linear(model)
    auto, none = kept_or_not(adapted, {}, random_ids(1, 16 * CHUNKS), 30)
    assert_identical(auto, none)
    assert bytes_of(auto) > 0
    found = last_products(
        adapted.base_model.model.model.layers, torch.is_floating_point, Products()
    )
    bases = [product.module.base_layer for product in found if product]
    assert [type(base).__name__ for base in bases] == ["Linear4bit"] * LAYERS


def test_weights_from_the_host_are_there_for_backward() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(wide(), LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    auto, none = kept_or_not(model, {"weights": "host"}, random_ids(1, 16 * CHUNKS), 20)
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


def test_sums_on_the_host_get_the_same_products() -> None:
    settings = {"main_grad_device": "host"}
    auto, none = kept_or_not(wide(), settings, random_ids(1, 16 * CHUNKS), 40)
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


def watched(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, _, y: y * 1.5)
    return model


def half_frozen(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.requires_grad_(False)
    return model


def shared(model: Any) -> Any:
    for layer in model.model.layers:
        layer.mlp.down_proj = model.model.layers[0].mlp.down_proj
    return model


@pytest.mark.parametrize("changed", [watched, half_frozen, shared])
def test_of_products_that_are_more_than_a_product_nothing_is_kept(changed: Any) -> None:
    model = changed(wide(mlp_bias=True))
    auto, none = kept_or_not(model, {}, random_ids(1, 16 * CHUNKS))
    assert_identical(auto, none)
    assert bytes_of(auto) == 0


def test_under_autocast_nothing_is_kept() -> None:
    model, ids = wide(), random_ids(1, 16 * CHUNKS)
    with torch.autocast("cpu", torch.bfloat16):
        auto, none = kept_or_not(model, {}, ids)
    assert_identical(auto, none)
    assert bytes_of(auto) == 0


def changed_in_place(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = type(mlp).forward(mlp, x)
    return y.mul_(0.7)


def run_twice(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return type(mlp).forward(mlp, type(mlp).forward(mlp, x))  # type: ignore[no-any-return]


def run_on_half_and_on_all(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """The first run has fewer rows than pieces were counted for, the second one all."""
    half = x.shape[1] // 2
    first = type(mlp).forward(mlp, x[:, half:])
    whole = type(mlp).forward(mlp, x)
    return torch.cat([whole[:, :half], (whole[:, half:] + first) / 2], dim=1)


def run_under_its_own_autocast(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return type(mlp).forward(mlp, x).to(x.dtype)  # type: ignore[no-any-return]


def run_in_parts(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Fewer rows than pieces were counted for, which are never written: the sweep computes."""
    return torch.cat([type(mlp).forward(mlp, part) for part in x.split(5, dim=1)], dim=1)


FORWARDS = (
    changed_in_place,
    run_twice,
    run_in_parts,
    run_on_half_and_on_all,
    run_under_its_own_autocast,
)


@pytest.mark.parametrize("slots", [None, 20])
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.sampled(10)
def test_models_may_do_with_the_output_what_they_like(
    forward: Any, recompute: str, slots: int | None
) -> None:
    model = wide()
    for layer in model.model.layers:
        layer.mlp.forward = forward.__get__(layer.mlp)
    auto, none = kept_or_not(model, {"recompute": recompute}, random_ids(1, 16 * CHUNKS), slots)
    assert_identical(auto, none)


def test_dropout_in_front_of_the_product_is_drawn_as_before() -> None:
    model = wide("granite").train()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))
    auto, none = kept_or_not(model.train(), {}, random_ids(1, 16 * CHUNKS), 24)
    assert_identical(auto, none)
    assert bytes_of(auto) > 0


def test_a_plan_without_the_engine_finds_the_same() -> None:
    """Also where nothing can be kept: by bf16 on a CPU, or by a hook."""
    ids = random_ids(1, 16 * CHUNKS)
    for model in (wide(), make("llama", torch.bfloat16, intermediate_size=INNER), watched(wide())):
        config = oomb.Config(**SETTINGS)
        with oomb.Engine(model, config) as engine:
            stats = engine.forward_backward(ids, ids).stats
        planned = Planner(model, Machine.here()).predict(16 * CHUNKS, config, timed=False)
        assert planned.kept_mlp_output_bytes == stats.kept_mlp_output_bytes


@pytest.mark.parametrize(
    ("tokens", "chunk_size", "less_again"),
    [(3 * 2**15, 4096, True), (2**15, 2048, False)],
    ids=["less is computed again", "outputs of MLPs are kept"],
)
def test_what_spares_more_gets_the_room(tokens: int, chunk_size: int, less_again: bool) -> None:
    """Where layers are computed again, room may serve either."""
    planner = Planner("qwen2.5-7b", Machine.described(gpu="h200", host_memory="125GiB"))
    config = oomb.Config(recompute="layer", chunk_size=chunk_size, kv_grad_dtype="bfloat16")
    chosen = planner.predict(tokens, config, timed=False)
    assert (len(chosen.recomputed) > 1) == less_again
    assert (chosen.kept_mlp_output_bytes > 0) != less_again


def test_an_error_in_the_sweep_leaves_nothing_kept() -> None:
    model, ids = wide(), random_ids(1, 16 * CHUNKS)
    page = slot_bytes(model, oomb.Config(**SETTINGS))
    config = oomb.Config(**SETTINGS, device_memory=20 * page, host_memory="16MiB")
    expected = chunked(model, replace(config, keep_outputs="none"), ids, ids)

    def stop(progress: oomb.Progress) -> None:
        if progress.phase == "sweep" and progress.chunk == 5:
            raise KeyboardInterrupt

    with oomb.Engine(model, config) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(ids, ids, on_progress=stop)
        assert engine.snapshot()["host"]["taken_slots"] == 0
        assert engine.forward_backward(ids, ids).stats.kept_mlp_output_bytes > 0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name])


def test_a_plan_counts_them() -> None:
    model, ids = wide(), random_ids(2, 16 * CHUNKS)
    total = {}
    for keep in ("none", "auto"):
        with oomb.Engine(model, oomb.Config(**SETTINGS, keep_outputs=keep)) as engine:
            plan = engine.plan(16 * CHUNKS, 2)
            total[keep] = plan.device_bytes + plan.host_bytes
            stats = engine.forward_backward(ids, ids).stats
            assert plan.kept_output_bytes == stats.kept_output_bytes
            assert plan.kept_mlp_output_bytes == stats.kept_mlp_output_bytes
    assert stats.kept_mlp_output_bytes > 0
    assert total["auto"] - total["none"] == stats.kept_mlp_output_bytes + stats.kept_output_bytes


def keeping(mlps: list[MlpOutput | None], chunks: int = CHUNKS) -> Keeping:
    cut = Chunks(tokens=16 * chunks - 5, chunk_size=16, page_size=8)
    layout = PageLayout.of(2, 8, 8, torch.float32, "float32")
    shapes = [SHAPE] * len(mlps)
    sizes = tuple(0 if mlp is None else mlp.chunk_bytes for mlp in mlps)
    none = KeptOutputs.none(cut, layout, shapes, 1, sizes)
    return Keeping.of(none, cut, shapes, range(chunks), 1, None, mlps=mlps)


class Free:
    """A link that hides every copy of attention's outputs; those of MLPs cost ``least``."""

    def __init__(self, least: float) -> None:
        self._least = least

    def least_worth(self, chunk: int, layer: int, flops: float, num_bytes: int) -> float:
        return 0.0

    def least_worth_of_mlp(
        self, chunk: int, layer: int, flops: float, num_bytes: int, beside: int
    ) -> float:
        return self._least


MLP = MlpOutput(inputs=1024, element_bytes=4, chunk_bytes=3072)


def test_the_last_layer_and_the_last_chunk_are_not_kept() -> None:
    every = keeping([MLP] * LAYERS)
    assert set(every.mlp_order) == {(c, x) for c in range(CHUNKS - 1) for x in range(LAYERS - 1)}


def test_a_layer_without_such_a_product_keeps_none() -> None:
    assert {layer for _, layer in keeping([None, MLP, MLP]).mlp_order} == {1}


def test_what_saves_more_for_a_byte_comes_first() -> None:
    """Attention of late chunks, then products, then attention of the first chunks."""
    every = keeping([MLP] * LAYERS, chunks=60)
    ahead = sum(worth > MLP.worth for worth in every.worth)
    assert 0 < ahead < len(every.order)
    room = ahead * every.none.slots_of(0)
    kept = every.worthwhile(10**6, room, "cpu", Free(0.0))
    assert (int(kept.kept.sum()), kept.mlp_slots) == (ahead, 0)
    room += len(every.mlp_order) * every.none.mlp_slots_of(0)
    kept = every.worthwhile(10**6, room, "cpu", Free(0.0))
    assert (int(kept.kept.sum()), kept.mlp_slots * 1024) == (ahead, 3072 * len(every.mlp_order))
    assert kept.slots == room


def test_attention_is_kept_where_a_trip_of_products_does_not_pay() -> None:
    every = keeping([MLP] * LAYERS, chunks=60)
    kept = every.worthwhile(-1, 10**6, "cpu", Free(1e9))
    assert kept.mlp_slots == 0
    assert kept.kept.sum() == sum(worth >= 40 for worth in every.worth) > 0


def test_pieces_of_a_layer_lie_side_by_side_and_are_read_once() -> None:
    outputs = keeping([None, MLP, MLP]).worthwhile(10**6, 10**6, "cpu", Free(0.0))
    chunks = Chunks(tokens=16 * CHUNKS - 5, chunk_size=16, page_size=8)
    order = call_order(
        PagedLayers.alike(chunks, [0] * LAYERS),
        CHUNKS - 1,
        range(CHUNKS),
        whole_fill=False,
        output_span=outputs.span,
        mlp_span=outputs.mlp_span,
    )
    pieces = 0
    for layer in range(LAYERS):
        rows = order.visits[(order.visits[:, 0] == layer) & (order.visits[:, 1] == READ_OUTPUT)]
        read = sorted(piece for row in rows for piece in range(row[2], row[3]))
        assert read == list(range(len(read)))
        assert len(read) <= outputs.pieces_of_layer
        pieces += len(read)
    assert pieces == outputs.slots
    for chunk in range(CHUNKS - 1):  # between the layer's attention and the next layer's
        assert order.read[chunk, 1] < order.mlp[chunk, 1] < order.read[chunk, 2]


def test_slices_of_two_sizes_keep_nothing() -> None:
    given: dict[str, Any] = {"batch": 2, "chunk_size": 16, "recurrent": False}
    paged, shapes = {0: 0, 1: 1, 2: 2}, [SHAPE] * LAYERS
    found = [
        None if product is None else product.shape
        for product in last_products(wide().model.layers, torch.is_floating_point, None)
    ]
    assert mlp_outputs(found, paged, shapes, **given, ranks=3) == (None,) * LAYERS
    of_two = mlp_outputs(found, paged, shapes, **given, ranks=2)
    assert of_two == (MlpOutput(INNER, 4, 2 * 8 * 48 * 4),) * LAYERS
    given["recurrent"] = True
    assert mlp_outputs(found, paged, shapes, **given, ranks=2) == (None,) * LAYERS
