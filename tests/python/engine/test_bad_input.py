"""Bad arguments are refused by name, with what was expected and what came, before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

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
    (lambda: oomb.Config(recompute="all"), "recompute: .*'layer'", "'all'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(rope_angles="fp64"), "rope_angles: .*'float64'", "'fp64'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(attention="topk"), "attention: .*TopKPages", "'topk'"),  # type: ignore[arg-type]
    (lambda: oomb.Config(backward=None), "backward: .*SampledChunks", "None"),  # type: ignore[arg-type]
    (lambda: oomb.Config(deterministic=1), "deterministic: ", "1"),  # type: ignore[arg-type]
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
    ({"loss_weights": MASK}, "loss_weights: expected a floating-point dtype, got torch.int64"),
    ({"loss_weights": torch.full((2, 40), float("nan"))}, "loss_weights: expected finite values"),
    ({"num_items_in_batch": 0}, "num_items_in_batch: expected a number > 0, got 0"),
    ({"num_items_in_batch": torch.ones(2)}, "num_items_in_batch: expected one number"),
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


@pytest.mark.parametrize("arguments", [{"num_tokens": 0}, {"num_tokens": 9, "batch_size": -1}])
def test_plan(engine: oomb.Engine, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected an int >= 1"):
        engine.plan(**arguments)


def test_a_closed_engine() -> None:
    engine = oomb.Engine(make("llama"), oomb.Config(chunk_size=16, page_size=8))
    engine.close()
    engine.close()
    with pytest.raises(oomb.Error, match="closed"):
        engine.forward_backward(IDS, IDS)


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
