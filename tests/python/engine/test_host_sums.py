"""Gradient sums on the host: the same bits as on the device, whenever their copies are made."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import oomb
from oomb.core import host_sums, rounded_sums
from oomb.core.host_sums import HostSums, SumCopies
from oomb.core.main_grad import MainGrads
from oomb.model.host_memory import host_block
from oomb.parallel.weights import Weights
from oomb.plan import Machine, Planner

from .models import make
from .reference import random_ids, take_gradients

IDS = random_ids(2, 75)
Copy = Callable[[], None]


class CopiesWithNonsense(SumCopies):
    """Done at once; what else the place had is nonsense."""

    def load(self, place: int, layer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        target.fill_(0xFF)  # NaN, read as any float
        target.copy_(source)


class CopiesInTheEnd(SumCopies):
    """Done when they must be; until then a place has nonsense."""

    def __init__(self) -> None:
        self._of_place: dict[int, Copy] = {}
        self._of_layer: dict[int, int] = {}  # the place that is stored

    def load(self, place: int, layer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self.wait(place)
        if layer in self._of_layer:
            self.wait(self._of_layer.pop(layer))
        target.fill_(0xFF)
        self._of_place[place] = lambda: (target.copy_(source), None)[1]

    def store(self, place: int, layer: int, target: torch.Tensor, source: torch.Tensor) -> None:
        self.wait(place)
        self._of_place[place] = lambda: (target.copy_(source), None)[1]
        self._of_layer[layer] = place

    def wait(self, place: int) -> None:
        copy = self._of_place.pop(place, None)
        if copy is not None:
            copy()

    def finish(self) -> None:
        for place in list(self._of_place):
            self.wait(place)
        self._of_layer.clear()


COPIES: dict[str, Callable[[], SumCopies]] = {"early": CopiesWithNonsense, "late": CopiesInTheEnd}


def run(
    make_model: Callable[[], Any], copies: str | None = None, calls: int = 2, **settings: Any
) -> dict[str, torch.Tensor]:
    """Gradients of ``calls`` calls, accumulated; with sums on the host where copies are given."""
    model = make_model()
    place = "device" if copies is None else "host"
    config = oomb.Config(chunk_size=16, page_size=8, main_grad_device=place, **settings)  # type: ignore[arg-type]
    with oomb.Engine(model, config) as engine:
        if copies is not None:
            assert engine._grads._host is not None
            engine._grads._host.copies = COPIES[copies]()
        losses = [engine.forward_backward(IDS, IDS).loss for _ in range(calls)]
        found = {"loss": torch.stack(losses)}
        if config.keep_main_grad:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    found[f"sum of {name}"] = engine.main_grad(parameter).clone()
    return found | take_gradients(model)


def assert_same_bits(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys() and len(ours) > 1
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def adapted() -> Any:
    torch.manual_seed(3)
    model = get_peft_model(make("llama"), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.train()


def some_frozen() -> Any:
    """A layer that does not train, and biases and norms that do not."""
    model = make("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." not in name and parameter.ndim > 1)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make("llama"),
    "tied": lambda: make("llama-tied"),
    "experts": lambda: make("gpt-oss"),
    "one layer": lambda: make("llama", num_hidden_layers=1),
    "two layers": lambda: make("llama", num_hidden_layers=2),
    "five layers": lambda: make("llama", num_hidden_layers=5),
    "bf16": lambda: make("llama", torch.bfloat16),
    "adapters": adapted,
    "some frozen": some_frozen,
}


@pytest.mark.parametrize(
    ("name", "copies"), [*((name, "late") for name in MODELS), ("five layers", "early")]
)
def test_models(name: str, copies: str) -> None:
    expected = run(MODELS[name], recompute="none")
    assert_same_bits(run(MODELS[name], copies, recompute="none"), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "layer"},
        {"keep_main_grad": True},
        {"backward": oomb.SampledChunks(keep=0.4, seed=2)},
        {"backward": oomb.TruncatedChunks(window=1)},
        {"attention": oomb.TopKPages(budget=2)},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.sampled(3)
def test_settings(settings: dict[str, Any]) -> None:
    expected = run(MODELS["five layers"], **settings)
    assert_same_bits(run(MODELS["five layers"], "late", **settings), expected)


@pytest.mark.parametrize("keep", [False, True])
def test_rounded_sums(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken inside products, in pieces, as on a GPU."""
    monkeypatch.setattr(rounded_sums, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(rounded_sums, "_PIECE_ROWS", 8)
    monkeypatch.setattr(MainGrads, "takes", lambda *_: True)
    settings: dict[str, Any] = {"main_grad_dtype": "bfloat16", "keep_main_grad": keep}
    expected = run(MODELS["bf16"], **settings)
    assert_same_bits(run(MODELS["bf16"], "late", **settings), expected)


@pytest.mark.parametrize("copies", COPIES)
def test_any_order_of_layers(copies: str) -> None:
    order = random.Random(4)
    layers = [[nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(7))] for _ in range(6)]
    sums = HostSums(layers, "float32", torch.device("cpu"), Weights())
    sums.copies = COPIES[copies]()
    sums.begin()
    expected: dict[nn.Parameter, torch.Tensor] = {}
    for number in range(400):
        parameter = order.choice(layers[order.randrange(6)])
        addend = torch.full(parameter.shape, float(number))
        total = sums.of(parameter)
        assert (total is None) == (parameter not in expected)
        if total is None:
            sums.new(parameter).copy_(addend)
        else:
            total.add_(addend)
        expected[parameter] = expected.get(parameter, 0) + addend
    sums.end()
    for parameter, value in expected.items():
        found = sums.of(parameter)
        assert found is not None and torch.equal(found, value)
    sums.drop()
    assert all(sums.of(parameter) is None for own in layers for parameter in own)


def test_layers_come_and_go_once_a_chunk() -> None:
    """Five chunks: none is loaded for the first; all are stored for each."""
    model = make("llama", num_hidden_layers=5)
    config = oomb.Config(chunk_size=16, page_size=8, main_grad_device="host")
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(IDS, IDS)
        sums = engine._grads._host
        assert sums is not None
        assert sums.host_bytes > 0 and sums.moved_bytes <= (5 + 5) * sums.host_bytes
        assert sums.moved_bytes >= (5 + 4) * sums.host_bytes


def test_a_call_that_fails_leaves_all_as_it_was() -> None:
    def fail(progress: oomb.Progress) -> None:
        if progress.phase == "sweep" and progress.chunk == 2:
            raise RuntimeError("stopped")

    expected = run(MODELS["five layers"])
    model = MODELS["five layers"]()
    config = oomb.Config(chunk_size=16, page_size=8, main_grad_device="host")
    with oomb.Engine(model, config) as engine:
        assert engine._grads._host is not None
        engine._grads._host.copies = CopiesInTheEnd()
        engine.forward_backward(IDS, IDS)
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="stopped"):
            engine.forward_backward(IDS, IDS, on_progress=fail)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
        assert engine._grads._host._on_device == []
        engine.forward_backward(IDS, IDS)
    gradients = take_gradients(model)
    assert all(torch.equal(gradients[name], expected[name]) for name in gradients)


def test_a_host_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sums, "free_memory", lambda device: 1000)
    with pytest.raises(oomb.OutOfMemoryError, match="main_grad_device='host': .* 1000 B are free"):
        oomb.Engine(make("llama"), oomb.Config(main_grad_device="host"))


def test_a_plan_counts_them() -> None:
    machine = Machine.described(gpu="h200", host_memory=256 * 2**30)
    planner = Planner("qwen2.5-7b", machine)
    long = dict(optimizer=None, dry_run=False)
    on_device = planner.predict(2**15, oomb.Config(), **long)  # type: ignore[arg-type]
    on_host = planner.predict(2**15, oomb.Config(main_grad_device="host"), **long)  # type: ignore[arg-type]
    layer = (3584 * (3584 * 2 + 2 * 512 + 3 * 18944) + 3584 + 2 * 512 + 2 * 3584) * 4
    assert on_host.sum_host_bytes == pytest.approx(28 * layer, rel=1e-4)
    assert on_device.sum_bytes - on_host.sum_bytes == pytest.approx(25 * layer, rel=1e-4)
    assert on_device.call_bytes - on_host.call_bytes == pytest.approx(25 * layer, rel=1e-4)
    assert on_host.host_bytes == on_device.host_bytes + on_host.sum_host_bytes
    waits = {}
    for chunk in (2048, 16384):
        config = oomb.Config(main_grad_device="host", chunk_size=chunk)
        duration = planner.predict(2**15, config, **long).duration  # type: ignore[arg-type]
        assert duration is not None
        waits[chunk] = duration.sums
        # 4 FLOP a value and token beside 4 bytes each way, at 989 TFLOP/s and 64 GB/s at most.
        assert 4000 < duration.sums_hidden_from < 16384
    # Beside what the last gradients take, which nothing hides.
    assert waits[16384] < 1.5 * on_host.sum_host_bytes / 4e10 < waits[2048]


def test_a_plan_of_ranks() -> None:
    """Each keeps all sums, and fetches them once more to exchange them."""
    one = Machine.described(gpu="h200", host_memory=256 * 2**30)
    config = oomb.Config(main_grad_device="host", chunk_size=16384)
    alone, shared = (
        Planner("qwen2.5-0.5b", machine).predict(2**15, config, optimizer=None, dry_run=False)
        for machine in (one, one.of_rank(2))
    )
    assert alone.sum_host_bytes == shared.sum_host_bytes > 0
    assert alone.duration is not None and shared.duration is not None
    assert shared.duration.sums > alone.duration.sums + 0.9 * shared.sum_host_bytes / 64e9
    with pytest.raises(ValueError, match="main_grad_device: expected 'device' beside sharded"):
        Planner("qwen2.5-0.5b", one.of_rank(2, weights="zero1")).predict(2**14, config)


def test_a_block_of_no_bytes_is_not_registered() -> None:
    """Layers that are frozen, and parameters with small states alone, have none."""
    block = host_block(0, torch.device("cuda"))
    assert block.shape == (0,) and block.dtype == torch.uint8
