"""Memory that is missing on a GPU, before and within a call: what is told, and that nothing stays.

The GPU's memory is taken away by tensors of the test, all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oomb
from oomb.testing.shapes import ModelShape, random_model

pytestmark = pytest.mark.gpu

MIB = 2**20
SHAPE = ModelShape("qwen2", 2, 1024, 4096, 8, 8, 128, 32000)
CHUNK, TOKENS = 1024, 16384  # 384 MiB of pages in all
SPARSE = oomb.TopKPages(budget=8)
SETTINGS: dict[str, dict[str, Any]] = {
    "in device memory": {},
    "two tiers": {"device_memory": "64MiB", "host_memory": "1GiB"},
    "sparse, two tiers": {
        "attention": SPARSE,
        "device_memory": "64MiB",
        "host_memory": "1GiB",
        "recompute": "layer",
    },
}


class Case:
    """An engine, what an undisturbed call gives, and gradients that must not change."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model: PreTrainedModel = random_model(
            SHAPE, device="cuda", dtype=torch.bfloat16, positions=TOKENS
        )
        self.ids = torch.randint(SHAPE.vocabulary, (1, TOKENS), device="cuda")
        self.engine = oomb.Engine(self.model, oomb.Config(chunk_size=CHUNK, **settings))
        self.expected = self.run()
        self.before = {n: torch.full_like(p, 7) for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.before[name]

    def run(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.model.zero_grad(set_to_none=True)
        step = self.engine.forward_backward(self.ids, self.ids)
        return step.loss, {n: p.grad for n, p in self.model.named_parameters()}

    def fails(self, on_progress: Callable[[oomb.Progress], None] | None = None) -> tuple[str, int]:
        """Text and needed bytes of the refusal of a call."""
        with pytest.raises(oomb.OutOfMemoryError) as caught:
            self.engine.forward_backward(self.ids, self.ids, on_progress=on_progress)
        error = caught.value
        print(f"\n{error} (needed {error.needed_bytes}, available {error.available_bytes})")
        assert " out of memory." in str(error)
        assert error.needed_bytes > 0
        return str(error), error.needed_bytes

    def check(self) -> None:
        """All is as before, and the next call gives the bits of one that nothing disturbed."""
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is self.before[name]
            assert bool((parameter.grad == 7).all())
        assert self.engine._pools.manager is not None
        self.engine._pools.manager.check_integrity()
        loss, gradients = self.run()
        assert torch.equal(loss, self.expected[0])
        for name, value in self.expected[1].items():
            assert torch.equal(gradients[name], value), name
        self.engine.close()


def take_all() -> list[torch.Tensor]:
    """Every byte that the driver or torch's cache could still give, in tensors."""
    held: list[torch.Tensor] = []
    size = torch.cuda.mem_get_info()[0]
    while size >= MIB:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def take_all_but(bytes_left: int) -> torch.Tensor:
    """Of what the driver has; torch keeps nothing unused."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    return torch.empty(free - bytes_left, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("name", SETTINGS)
def test_taken_away_before_the_call_is_foreseen(name: str) -> None:
    """300 MiB are left where the sums of gradients alone need 400."""
    case, seen = Case(**SETTINGS[name]), []
    held = take_all_but(300 * MIB)
    text, needed = case.fails(seen.append)
    del held
    assert not seen
    assert needed > 300 * MIB
    assert needed > 4 * sum(p.numel() for p in case.model.parameters())
    assert "chunk_size" in text
    case.check()


@pytest.mark.parametrize(("phase", "chunk"), [("fill", 2), ("sweep", 15), ("sweep", 3)])
@pytest.mark.parametrize("name", SETTINGS)
def test_taken_away_in_a_call(name: str, phase: str, chunk: int) -> None:
    case = Case(**SETTINGS[name])
    held: list[torch.Tensor] = []

    def take(progress: oomb.Progress) -> None:
        if (progress.phase, progress.chunk) == (phase, chunk):
            held.extend(take_all())

    text, _ = case.fails(take)
    assert held
    assert "device_memory" in text
    held.clear()
    case.check()


@pytest.mark.parametrize("name", SETTINGS)
def test_taken_away_in_a_layers_backward(name: str) -> None:
    case = Case(**SETTINGS[name])
    held: list[torch.Tensor] = []

    def take(*_: object) -> None:
        if not held:
            held.extend(take_all())

    hook = case.model.get_decoder().layers[1].register_full_backward_hook(take)
    text, _ = case.fails()
    hook.remove()
    assert held
    assert "device_memory" in text
    held.clear()
    case.check()


def test_a_tier_that_cannot_grow_says_so() -> None:
    """The driver has nothing left when the pages' gradients come; torch has what it needs."""
    case = Case()
    held: list[torch.Tensor] = []
    reserve = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")

    def take(progress: oomb.Progress) -> None:
        nonlocal reserve
        if (progress.phase, progress.chunk) == ("fill", 14):
            free = torch.cuda.mem_get_info()[0]
            held.append(torch.empty(free - 32 * MIB, dtype=torch.uint8, device="cuda"))
            del reserve  # torch keeps it for the sweep

    text, _ = case.fails(take)
    held.clear()
    assert "for pages beside" in text
    assert "lower device_memory" in text
    case.check()


@pytest.mark.parametrize("attention", [oomb.Dense(), SPARSE], ids=["dense", "sparse"])
def test_a_host_tier_too_small_is_foreseen(attention: oomb.Dense | oomb.TopKPages) -> None:
    case = Case(attention=attention)
    small = oomb.Config(
        chunk_size=CHUNK, attention=attention, device_memory="64MiB", host_memory="256MiB"
    )
    case.engine.close()
    case.engine, seen = oomb.Engine(case.model, small), []
    text, needed = case.fails(seen.append)
    assert not seen
    assert "Raise host_memory" in text
    assert needed > 320 * MIB
    case.engine = oomb.Engine(
        case.model,
        oomb.Config(
            chunk_size=CHUNK, attention=attention, device_memory="64MiB", host_memory=needed
        ),
    )
    for name, parameter in case.model.named_parameters():
        assert parameter.grad is case.before[name]
    loss, gradients = case.run()
    assert torch.equal(loss, case.expected[0])
    assert all(torch.equal(gradients[n], value) for n, value in case.expected[1].items())


def test_memory_that_torch_holds_unused_is_had() -> None:
    """Counted as free, so the tier must be able to grow into it."""
    case = Case()
    held = take_all_but(128 * MIB)
    del held  # torch keeps it
    assert torch.cuda.mem_get_info()[0] < 200 * MIB
    case.check()
