"""Bad arguments are refused by name, with what was expected and what came, before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForTokenClassification

import oomb

from .models import VOCABULARY, make
from .reference import random_ids

# Settings: (arguments, the text's beginning, what came).
SETTINGS: list[tuple[Callable[[], object], str, str]] = [
    (lambda: oomb.Config(chunk_size=100, page_size=16), "chunk_size: .*multiple.* 16", "100"),
    (lambda: oomb.Config(chunk_size=0), "chunk_size: ", "0"),
    (lambda: oomb.Config(chunk_size=64.0), "chunk_size: ", "64.0"),  # type: ignore[arg-type]
    (lambda: oomb.Config(page_size=-1), "page_size: ", "-1"),
    (lambda: oomb.TopKPages(budget=0), "budget: .*>= 1", "0"),
    (lambda: oomb.TopKPages(budget=True), "budget: ", "True"),
    (lambda: oomb.TopKPages(share="head"), "share: .*'kv_head'", "'head'"),  # type: ignore[arg-type]
    (lambda: oomb.TopKPages(score="mean"), "score: .*'block_mean'", "'mean'"),  # type: ignore[arg-type]
    (lambda: oomb.TopKPages(summary="max"), "summary: .*'bounds'", "'max'"),  # type: ignore[arg-type]
    (lambda: oomb.TopKPages(sink_pages=-1), "sink_pages: ", "-1"),
    (
        lambda: oomb.TopKPages(budget=3, sink_pages=2, recent_pages=2),
        "sink_pages.*<= budget 3",
        "4",
    ),
    (lambda: oomb.TopKPages(budget=8, chunk_budget=7), "chunk_budget: .*8", "7"),
    (lambda: oomb.SampledChunks(keep=0), "keep: ", "0"),
    (lambda: oomb.SampledChunks(keep=1.01), r"keep: .*\(0, 1\]", "1.01"),
    (lambda: oomb.SampledChunks(keep=float("nan")), "keep: ", "nan"),
    (lambda: oomb.SampledChunks(keep="half"), "keep: ", "'half'"),  # type: ignore[arg-type]
    (lambda: oomb.SampledChunks(cap=0.5), "cap: .*>= 1", "0.5"),
    (lambda: oomb.SampledChunks(seed=1.5), "seed: ", "1.5"),  # type: ignore[arg-type]
    (lambda: oomb.Config(device_memory="40 gigs"), "device_memory: .*'40GiB'", "'40 gigs'"),
    (lambda: oomb.Config(host_memory="GiB"), "host_memory: ", "'GiB'"),
    (lambda: oomb.Config(host_memory="-3GiB"), "host_memory: ", "'-3GiB'"),
    (lambda: oomb.Config(device_memory=0), "device_memory: ", "0"),
    (lambda: oomb.Config(device_memory=1.5), "device_memory: ", "1.5"),  # type: ignore[arg-type]
    (lambda: oomb.Config(kv_grad_dtype="float16"), "kv_grad_dtype: .*'bfloat16'", "'float16'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(recompute="all"), "recompute: .*'pointwise' or 'layer'", "'all'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(keep_outputs=1.01), r"keep_outputs: .*\[0, 1\]", "1.01"),
    (lambda: oomb.Config(keep_outputs=-0.5), "keep_outputs: ", "-0.5"),
    (lambda: oomb.Config(keep_outputs=float("nan")), "keep_outputs: ", "nan"),
    (lambda: oomb.Config(keep_outputs=True), "keep_outputs: ", "True"),
    (lambda: oomb.Config(keep_outputs="most"), "keep_outputs: .*'auto'", "'most'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(rope_angles="fp64"), "rope_angles: .*'float64'", "'fp64'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(attention="topk"), "attention: .*TopKPages", "'topk'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(backward=None), "backward: .*SampledChunks", "None"),  # type: ignore[arg-type]
    (lambda: oomb.Config(deterministic=1), "deterministic: ", "1"),  # type: ignore[arg-type]
    (lambda: oomb.Config(chunk_size="4K"), "chunk_size: ", "'4K'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(device_memory="8G"), "device_memory: .*'40GB'", "'8G'"),
    (lambda: oomb.Config(device_memory="80%"), "device_memory: ", "'80%'"),
    (lambda: oomb.Config(device_memory=True), "device_memory: ", "True"),
    (lambda: oomb.Config(host_memory=8e9), "host_memory: ", "8000000000.0"),  # type: ignore[arg-type]
    (
        lambda: oomb.Config(kv_grad_dtype=torch.bfloat16),  # type: ignore[arg-type]
        "kv_grad_dtype: .*'bfloat16'",
        "torch.bfloat16",
    ),
    (lambda: oomb.Config(recompute=True), "recompute: ", "True"),  # type: ignore[arg-type]
    (lambda: oomb.Config(recompute=np.ones(2)), "recompute: ", "array([1., 1.])"),  # type: ignore[arg-type]
    (
        lambda: oomb.Config(attention=oomb.TopKPages),  # type: ignore[arg-type]
        r"attention: expected oomb\.Dense\(\), oomb\.TopKPages",
        "<class 'oomb.config.TopKPages'>",
    ),
    (
        lambda: oomb.Config(attention=oomb.SampledChunks()),  # type: ignore[arg-type]
        "attention: ",
        "SampledChunks(keep=0.25, seed=0, cap=None)",
    ),
    (lambda: oomb.Config(check_finite="yes"), "check_finite: expected a bool", "'yes'"),  # type: ignore[arg-type]
    (lambda: oomb.TopKPages(chunk_budget="8"), "chunk_budget: ", "'8'"),  # type: ignore[arg-type]
    (lambda: oomb.SampledChunks(keep=25), "keep: ", "25"),
    (lambda: oomb.SampledChunks(cap="2"), "cap: .*>= 1", "'2'"),  # type: ignore[arg-type]
    (lambda: oomb.SampledChunks(cap=True), "cap: .*>= 1", "True"),
    (lambda: oomb.SampledChunks(cap=float("nan")), "cap: .*>= 1", "nan"),
    (lambda: oomb.SampledChunks(seed=True), "seed: expected an int", "True"),
]


@pytest.mark.parametrize(("build", "expected", "got"), SETTINGS)
def test_settings(build: Callable[[], object], expected: str, got: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}.*, got ") as caught:
        build()
    assert str(caught.value).endswith(f"got {got}")


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GiB", 40 * 2**30), ("1.5 MB", 1_500_000), ("10", 10), ("7kib", 7168), (123, 123)],
)
def test_memory_sizes(text: str | int, size: int) -> None:
    assert oomb.Config(device_memory=text, host_memory=text).device_memory == size


NAMES: list[tuple[Callable[[], object], str]] = [
    (lambda: oomb.Config(chunksize=1), "chunksize: .*; did you mean 'chunk_size'?"),  # type: ignore[call-arg]
    (lambda: oomb.Config(device_mem=1), "device_mem: .*; did you mean 'device_memory'?"),  # type: ignore[call-arg]
    (lambda: oomb.Config(sparse=1), "sparse: .*; known are chunk_size, page_size, att"),  # type: ignore[call-arg]
    (lambda: oomb.TopKPages(sinks=1), "sinks: expected a setting of TopKPages, got an un"),  # type: ignore[call-arg]
    (lambda: oomb.SampledChunks(kep=0.5), "kep: .*; did you mean 'keep'?"),  # type: ignore[call-arg]
    (lambda: oomb.Config(4096), "Config: expected keywords such as chunk_size=…, got 4096"),  # type: ignore[misc]
    (lambda: oomb.TopKPages(64), "TopKPages: expected keywords such as budget=…, got 64"),  # type: ignore[misc]
]


@pytest.mark.parametrize(("build", "text"), NAMES)
def test_names_of_settings(build: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{text}"):
        build()


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        oomb.Config().chunk_size = 1  # type: ignore[misc]


IDS = random_ids(2, 40)
MASK = torch.ones_like(IDS)


def changed(tensor: torch.Tensor, index: Any, value: int) -> torch.Tensor:
    copy = tensor.clone()
    copy[index] = value
    return copy


ROW = torch.arange(40)[None]

# Arguments of a call: (arguments beside ids and labels of the right kind, the text).
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"labels": IDS[:, :39]}, r"labels: expected shape \(2, 40\), got \(2, 39\)"),
    ({"labels": IDS[0]}, r"labels: expected shape \[batch, tokens\], got \(40,\)"),
    ({"labels": IDS.int()}, r"labels: expected dtype torch.int64, got torch.int32"),
    ({"labels": None}, "labels: expected a tensor, got NoneType"),
    ({"labels": torch.full_like(IDS, -100)}, "labels: expected at least one token"),
    ({"labels": changed(torch.full_like(IDS, -100), (0, 0), 5)}, "labels: expected at least one"),
    (
        {"labels": changed(IDS, (1, 7), VOCABULARY)},
        r"labels: expected values in \[0, 97\)",
    ),
    ({"labels": changed(IDS, (1, 7), -1)}, "labels: expected values"),
    (
        {"input_ids": changed(IDS, (0, 3), VOCABULARY)},
        r"input_ids: .*\[0, 97\), got .* 97$",
    ),
    ({"input_ids": changed(IDS, (0, 3), -1)}, "input_ids: expected values in .*, got -1"),
    ({"input_ids": IDS.float()}, "input_ids: expected dtype torch.int64, got torch.float32"),
    ({"input_ids": IDS.tolist()}, "input_ids: expected a tensor, got list"),
    ({"input_ids": IDS[:, :0], "labels": IDS[:, :0]}, "input_ids: expected at least one token"),
    ({"input_ids": IDS.to("meta")}, "input_ids: expected the model's device cpu, got meta"),
    ({"labels": IDS.to("meta")}, "labels: expected the model's device cpu, got meta"),
    ({"attention_mask": changed(MASK, (0, slice(3)), 0)}, "attention_mask: .*right padding.*left"),
    ({"attention_mask": changed(MASK, (1, 9), 0)}, "attention_mask: .*right padding.*holes"),
    ({"attention_mask": changed(MASK, 1, 0)}, "attention_mask: .*empty sequence"),
    ({"attention_mask": MASK[:, :30]}, r"attention_mask: expected shape \(2, 40\), got \(2, 30\)"),
    ({"attention_mask": MASK[:, None, None]}, "attention_mask: expected shape"),
    ({"attention_mask": MASK * 2}, "attention_mask: expected zeros and ones"),
    ({"position_ids": ROW[:, :30]}, r"position_ids: expected shape \[2 or 1, 40\], got \(1, 30\)"),
    ({"position_ids": ROW.expand(3, -1)}, "position_ids: expected shape"),
    ({"position_ids": ROW.float()}, "position_ids: expected dtype torch.int64"),
    ({"position_ids": ROW - 1}, "position_ids: expected values in"),
    ({"document_ids": ROW[:, :30]}, "document_ids: expected shape"),
    ({"document_ids": ROW // 20 % 2, "position_ids": ROW % 10}, "document_ids: .*position_ids"),
    ({"document_ids": ROW // 10 % 2}, "document_ids: expected contiguous documents"),
    ({"loss_weights": torch.ones(2, 39)}, r"loss_weights: expected shape \(2, 40\), got \(2, 39\)"),
    (
        {"loss_weights": torch.ones(2, 40, requires_grad=True)},
        "loss_weights: expected constants; detach them, got weights that require gradients",
    ),
    ({"loss_weights": MASK}, "loss_weights: expected a floating-point dtype, got torch.int64"),
    ({"loss_weights": torch.full((2, 40), float("nan"))}, "loss_weights: expected finite values"),
    ({"num_items_in_batch": 0}, "num_items_in_batch: expected a number > 0, got 0"),
    ({"num_items_in_batch": torch.ones(2)}, "num_items_in_batch: expected one number, got .* of 2"),
    ({"num_items_in_batch": torch.ones(0)}, "num_items_in_batch: expected one number, got .* of 0"),
    ({"num_items_in_batch": "many"}, "num_items_in_batch: expected a number > 0, got 'many'"),
    ({"num_items_in_batch": float("inf")}, "num_items_in_batch: expected a number > 0, got inf"),
    ({"num_items_in_batch": torch.tensor(float("nan"))}, "num_items_in_batch: .*, got nan"),
    ({"input_ids": IDS[0]}, r"input_ids: expected shape \[batch, tokens\], got \(40,\)"),
    ({"input_ids": IDS.numpy()}, "input_ids: expected a tensor, got ndarray"),
    ({"attention_mask": "causal"}, "attention_mask: expected a tensor, got str"),
    ({"document_ids": [0] * 40}, "document_ids: expected a tensor, got list"),
    ({"loss_weights": [1.0]}, "loss_weights: expected a tensor, got list"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[oomb.Engine]:
    with oomb.Engine(make("llama"), oomb.Config(chunk_size=16, page_size=8)) as made:
        yield made


@pytest.mark.parametrize("call", ["forward_backward", "evaluate"])
@pytest.mark.parametrize(("arguments", "text"), ARGUMENTS)
def test_arguments(engine: oomb.Engine, arguments: dict[str, Any], text: str, call: str) -> None:
    started: list[oomb.Progress] = []
    given = {"input_ids": IDS, "labels": IDS, **arguments}
    manager = engine._pools.manager
    with pytest.raises(ValueError, match=f"^{text}"):
        getattr(engine, call)(**given, on_progress=started.append)
    assert not started
    assert engine._pools.manager is manager
    assert all(p.grad is None for p in engine._model.causal.parameters())
    assert engine.state_dict()["step"] == 0


@pytest.mark.parametrize("call", ["forward_backward", "evaluate"])
def test_on_progress(engine: oomb.Engine, call: str) -> None:
    with pytest.raises(ValueError, match="^on_progress: expected a function or None, got 'bar'"):
        getattr(engine, call)(IDS, IDS, on_progress="bar")


def test_on_logits(engine: oomb.Engine) -> None:
    with pytest.raises(ValueError, match="^on_logits: expected a function or None, got 3"):
        engine.evaluate(IDS, IDS, on_logits=3)  # type: ignore[arg-type]


def test_inside_inference_mode(engine: oomb.Engine) -> None:
    with torch.inference_mode():
        assert engine.evaluate(IDS, IDS).loss > 0
        with pytest.raises(oomb.Error, match=r"^forward_backward: expected no torch.inference_mo"):
            engine.forward_backward(IDS, IDS)
        made_inside = make("llama")
    with pytest.raises(ValueError, match=r"^model: expected parameters made outside torch.infer"):
        oomb.Engine(made_inside, oomb.Config(chunk_size=16, page_size=8)).forward_backward(IDS, IDS)


def test_a_call_inside_a_call(engine: oomb.Engine) -> None:
    def again(_: oomb.Progress) -> None:
        engine.evaluate(IDS, IDS)

    with pytest.raises(oomb.Error, match="^engine: expected one call at a time"):
        engine.evaluate(IDS, IDS, on_progress=again)
    assert engine.evaluate(IDS, IDS).loss > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 0}, r"num_tokens: expected an int in 1 \.\.\. 1,099,511,627,776, got 0"),
        ({"num_tokens": True}, r"num_tokens: .*, got True"),
        ({"num_tokens": 2.0}, r"num_tokens: .*, got 2\.0"),
        ({"num_tokens": 2**40 + 1}, r"num_tokens: .*, got 1099511627777"),
        ({"num_tokens": 10**5000}, r"num_tokens: .*, got more"),
        ({"num_tokens": 9, "batch_size": -1}, r"batch_size: .* in 1 \.\.\. 1,048,576, got -1"),
        ({"num_tokens": 9, "batch_size": 2**20 + 1}, r"batch_size: .*, got 1048577"),
        ({"num_tokens": 9, "image_tokens": True}, r"image_tokens: .*, got True"),
    ],
)
def test_plan(engine: oomb.Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        engine.plan(**arguments)


def test_the_largest_plan(engine: oomb.Engine) -> None:
    assert not engine.plan(2**40, 2**20).fits


def test_a_closed_engine() -> None:
    engine = oomb.Engine(make("llama"), oomb.Config(chunk_size=16, page_size=8))
    engine.close()
    engine.close()
    with pytest.raises(oomb.Error, match="closed"):
        engine.forward_backward(IDS, IDS)


MODELS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: None, ValueError, "model: expected a transformers causal .*, got NoneType; load"),
    (lambda: "Qwen/Qwen2.5-0.5B", ValueError, "model: expected .*, got str; load one with Auto"),
    (lambda: type(make("llama")), ValueError, "model: expected .*, got the class LlamaForCausalLM"),
    (lambda: oomb.Config(), ValueError, "model: expected a transformers causal .*, got Config"),
    (lambda: nn.Linear(2, 2), oomb.UnsupportedModelError, "model: expected .*, got Linear"),
    (lambda: make("llama").model, oomb.UnsupportedModelError, "LlamaModel: has no language-model"),
    (
        lambda: AutoModelForTokenClassification.from_config(make("llama").config),
        oomb.UnsupportedModelError,
        "LlamaForTokenClassification: has no language-model head",
    ),
    (
        lambda: half_a_head(make("llama")),
        oomb.UnsupportedModelError,
        "LlamaForCausalLM: its own fo",
    ),
    (lambda: with_nan(make("llama")), oomb.UnsupportedModelError, "LlamaForCausalLM: expected fin"),
]


def half_a_head(model: Any) -> Any:
    model.lm_head.half()
    return model


def with_nan(model: Any) -> Any:
    model.model.norm.weight.data[3] = float("nan")
    return model


@pytest.mark.parametrize(("model", "kind", "text"), MODELS)
def test_models(model: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{text}"):
        oomb.Engine(model())


def test_a_head_of_zeros_is_no_error() -> None:
    model = make("llama", torch.float32)
    nn.init.zeros_(model.lm_head.weight)
    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        loss = engine.forward_backward(IDS, IDS).loss
        torch.testing.assert_close(loss, model(input_ids=IDS, labels=IDS).loss)


@pytest.mark.parametrize(
    ("config", "got"),
    [(oomb.Config, "the class Config"), ({"chunk_size": 16}, "dict"), (oomb.Dense(), "Dense")],
)
def test_configs(config: Any, got: str) -> None:
    with pytest.raises(ValueError, match=rf"^config: expected an oomb.Config\(…\), got {got}$"):
        oomb.Engine(make("llama"), config)


@pytest.mark.parametrize("state", [None, {}, {"step": "x"}, {"step": -1}])
def test_what_is_no_state(engine: oomb.Engine, state: Any) -> None:
    with pytest.raises(ValueError, match=r"^state: expected one of engine.state_dict\(\), got "):
        engine.load_state_dict(state)


def test_main_grad_of_no_parameter(engine: oomb.Engine) -> None:
    with pytest.raises(ValueError, match="^parameter: expected a parameter, got str"):
        engine.main_grad("lm_head.weight")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^parameter: expected one .*keep_main_grad=True"):
        engine.main_grad(next(engine._model.causal.parameters()))


def test_a_state_of_another_seed() -> None:
    model = make("llama")
    with oomb.Engine(model, oomb.Config(backward=oomb.SampledChunks(seed=1))) as engine:
        state = engine.state_dict()
    other = oomb.Engine(model, oomb.Config(backward=oomb.SampledChunks(seed=2)))
    with pytest.raises(ValueError, match="sampling_seed"):
        other.load_state_dict(state)


def test_nothing_to_train() -> None:
    """Not a step that silently does nothing, as for adapters that were loaded frozen."""
    model = make("llama").requires_grad_(False)
    ids = random_ids(1, 40)
    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        with pytest.raises(ValueError, match="^model: expected parameters that require gradients"):
            engine.forward_backward(ids, ids)
        engine.evaluate(ids, ids)


def test_tokens_added_after_the_engine_was_made() -> None:
    model = make("llama", torch.float32)
    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        model.resize_token_embeddings(VOCABULARY + 5)
        ids = torch.full((1, 40), VOCABULARY + 4)
        loss = engine.forward_backward(ids, ids).loss
        torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss)
