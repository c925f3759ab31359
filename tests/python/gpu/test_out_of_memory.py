"""Memory that is missing on a GPU, before and within a call: what is told, and that nothing stays.

The test takes the GPU's memory away, all of it, from the driver and from torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from driver_memory import MIB, Taken, torchs_own
from transformers import PreTrainedModel

import oomb
from oomb.trace.shapes import ModelShape, random_model

pytestmark = pytest.mark.gpu

GIB = 2**30
SHAPE = ModelShape("qwen2", 2, 1024, 4096, 8, 8, 128, 32000)
CHUNK, TOKENS = 1024, 16384  # 360 MiB of pages in all, of them 120 MiB of keys and values
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


@pytest.fixture(autouse=True)
def _nothing_left_over() -> None:
    """The models of tests before are gone, and torch's memory with them."""
    gc.collect()
    torch.cuda.empty_cache()


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
        self.before = {n: torch.empty_like(p) for n, p in self.model.named_parameters()}
        self.set_gradients()

    def set_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.before[name].fill_(7)

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


@pytest.mark.parametrize("name", SETTINGS)
def test_taken_away_before_the_call_is_foreseen(name: str) -> None:
    """300 MiB are left where the sums of gradients alone need 400."""
    case, seen, held = Case(**SETTINGS[name]), [], Taken()
    held.take(leave=300 * MIB)
    text, needed = case.fails(seen.append)
    held.free()
    assert not seen
    assert needed > 300 * MIB
    assert needed > 4 * sum(p.numel() for p in case.model.parameters())
    assert "chunk_size" in text
    case.check()


@pytest.mark.parametrize(("phase", "chunk"), [("fill", 2), ("sweep", 15), ("sweep", 3)])
@pytest.mark.parametrize("name", SETTINGS)
def test_taken_away_in_a_call(name: str, phase: str, chunk: int) -> None:
    case, held = Case(**SETTINGS[name]), Taken()

    def take(progress: oomb.Progress) -> None:
        if (progress.phase, progress.chunk) == (phase, chunk):
            held.take_all()

    text, _ = case.fails(take)
    assert held
    assert "device_memory" in text
    held.free()
    case.check()


@pytest.mark.parametrize("name", SETTINGS)
def test_taken_away_in_a_layers_backward(name: str) -> None:
    case, held = Case(**SETTINGS[name]), Taken()

    def take(*_: object) -> None:
        if not held:
            held.take_all()

    hook = case.model.get_decoder().layers[1].register_full_backward_hook(take)
    text, _ = case.fails()
    hook.remove()
    assert held
    assert "device_memory" in text
    held.free()
    case.check()


def test_a_tier_that_cannot_grow_says_so() -> None:
    """The driver has nothing left when the pages' gradients come; torch has what it needs."""
    case, held = Case(), Taken()
    own = torchs_own(4 * GIB)

    def take(progress: oomb.Progress) -> None:
        if (progress.phase, progress.chunk) == ("fill", 14):
            held.take()

    text, needed = case.fails(take)
    held.free()
    del own
    assert "for pages beside" in text
    assert "lower device_memory" in text
    assert needed < 256 * MIB  # what is missing, not the step by which pools grow
    case.check()


def test_a_tier_that_cannot_grow_goes_on_with_the_host() -> None:
    """Of 320 MiB the device gives 256; the host has room for all that goes there."""
    case, held = Case(device_memory="320MiB", host_memory="1GiB"), Taken()
    own = torchs_own(4 * GIB)

    def take(progress: oomb.Progress) -> None:
        if (progress.phase, progress.chunk) == ("fill", 2):
            held.take()

    step = case.engine.forward_backward(case.ids, case.ids)
    assert step.stats.device_peak_bytes == 320 * MIB
    step = case.engine.forward_backward(case.ids, case.ids, on_progress=take)
    held.free()
    del own
    assert step.stats.device_peak_bytes == 256 * MIB
    assert torch.equal(step.loss, case.expected[0])
    case.set_gradients()
    case.check()


def test_memory_in_torchs_segments_is_not_counted_on() -> None:
    """Torch holds 4 GiB unused and cannot give them up: pages go to the host."""
    case, held = Case(), Taken()
    own = torchs_own(4 * GIB)
    held.take(leave=128 * MIB)
    loss, gradients = case.run()
    assert case.engine._pools.manager is not None
    manager = case.engine._pools.manager
    assert manager.device_slots * manager.slot_bytes <= 136 * MIB
    case.engine._pools.close()  # a host pool that is there would be used
    case.engine.config, seen = replace(case.engine.config, host_memory=64 * MIB), []
    case.fails(seen.append)
    assert not seen
    held.free()
    del own
    assert torch.equal(loss, case.expected[0])
    assert all(torch.equal(gradients[n], value) for n, value in case.expected[1].items())
    case.engine.close()


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
    """Counted as free, so the tier must be able to grow into it before a call."""
    case, held = Case(), Taken()
    unused = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    held.take()
    del unused
    assert torch.cuda.mem_get_info()[0] < 64 * MIB
    case.check()
    held.free()


def test_memory_that_torch_holds_unused_is_had_in_a_call() -> None:
    """The tier has to grow in the sweep; torch has 4 GiB for itself and as many to give up."""
    case, held = Case(), Taken()
    own = torchs_own(4 * GIB)
    holds = []

    def take(progress: oomb.Progress) -> None:
        if (progress.phase, progress.chunk) == ("fill", 14):
            unused = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
            held.take()
            del unused
            holds.append(torch.cuda.memory_reserved())

    case.engine.forward_backward(case.ids, case.ids, on_progress=take)
    assert torch.cuda.memory_reserved() < holds[0] - 3 * GIB
    held.free()
    del own
    case.set_gradients()
    case.check()
