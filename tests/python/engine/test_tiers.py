"""Moving pages changes nothing, and the smallest legal tiers work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import oomb
from oomb.core import pools
from oomb.core.page_protocol import PageProtocol
from oomb.core.tiers import page_manager
from oomb.units import bytes_text, parse_size

from .models import make
from .reference import (
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    take_gradients,
)
from .tiers import HOST, MAPPED_AT_ONCE, slot_bytes, smallest_slots, wanted_slots, with_slots

CHUNK, PAGE = 16, 8

# Inputs of a call: ids, labels, other arguments.
Inputs = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def plain(tokens: int = 120) -> Inputs:
    ids = random_ids(1, tokens)
    return ids, ids, {}


def padded() -> Inputs:
    ids = random_ids(3, 90)
    mask = torch.arange(90)[None] < torch.tensor([90, 49, 9])[:, None]
    return ids, ids.masked_fill(~mask, -100), {"attention_mask": mask.long()}


def documents() -> Inputs:
    ids = random_ids(2, 90)
    return ids, ids, {"document_ids": torch.tensor([0] * 21 + [1] * 40 + [2] * 29)[None]}


# name: (architecture, dtype, settings, inputs)
CONFIGURATIONS: dict[str, tuple[str, torch.dtype, dict[str, Any], Inputs]] = {
    "dense": ("llama", torch.float32, {}, plain()),
    "padded": ("qwen2", torch.float32, {}, padded()),
    "documents": ("llama", torch.float32, {}, documents()),
    "windows": ("mistral", torch.float32, {"recompute": "layer"}, plain()),
    "sparse": ("llama", torch.float32, {"attention": oomb.TopKPages(budget=3)}, plain()),
    # Two chunks that take turns have no layer in front of the last one to pass on in.
    "sparse, one layer": (
        "llama",
        torch.float32,
        {"attention": oomb.TopKPages(budget=3)},
        plain(300),
    ),
    "sparse, padded": (
        "llama",
        torch.float32,
        {"attention": oomb.TopKPages(budget=3, share="kv_head")},
        padded(),
    ),
    "sparse by bounds": (
        "llama",
        torch.float32,
        {"attention": oomb.TopKPages(budget=3, summary="bounds", score="token_softmax")},
        padded(),
    ),
    "sampled": ("llama", torch.float32, {"backward": oomb.SampledChunks(keep=0.6)}, plain()),
    "truncated": ("llama", torch.float32, {"backward": oomb.TruncatedChunks(window=1)}, padded()),
    "kept outputs": ("llama", torch.float32, {"keep_outputs": "all"}, padded()),
    "kept outputs, sparse": (
        "mistral",
        torch.float32,
        {
            "attention": oomb.TopKPages(budget=3),
            "backward": oomb.SampledChunks(keep=0.6),
            "keep_outputs": 0.7,
            "recompute": "layer",
        },
        plain(),
    ),
    "kept outputs, fp64": ("gpt-oss", torch.float64, {"keep_outputs": "all"}, documents()),
    "kept outputs, bf16": ("qwen2", torch.bfloat16, {"keep_outputs": "auto"}, plain(75)),
    "bf16": ("llama", torch.bfloat16, {}, plain(75)),
    "bf16, rounded": ("llama", torch.bfloat16, {"kv_grad_dtype": "bfloat16"}, plain(75)),
    "fp64": ("gpt-oss", torch.float64, {}, plain(75)),
}


class Case:
    """A configuration, its result with all the memory it wants, and calls with less."""

    def __init__(self, name: str) -> None:
        architecture, dtype, settings, (ids, labels, arguments) = CONFIGURATIONS[name]
        layers = 1 if "one layer" in name else 3 if dtype == torch.float64 else 2
        self.model = make(architecture, dtype, num_hidden_layers=layers)
        self.settings = {"chunk_size": CHUNK, "page_size": PAGE, **settings}
        self.inputs = ids, labels
        self.arguments = arguments
        in_one_tier = self.settings | {"keep_outputs": "none"}
        self.expected = with_slots(self.model, in_one_tier, None, ids, labels, **arguments)
        pure_bf16 = settings.get("kv_grad_dtype") == "bfloat16"
        grad_slots = 2 if dtype == torch.bfloat16 and not pure_bf16 else 1
        self.smallest = smallest_slots(ids.shape[0], grad_slots)
        self.wanted = wanted_slots(
            self.model, self.settings, ids, labels, self.smallest, **arguments
        )

    def run(self, slots: int | None, **switches: object) -> Result:
        return with_slots(
            self.model, self.settings, slots, *self.inputs, switches, **self.arguments
        )


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.mark.sampled(12)
def test_every_tier_size_has_the_same_bits(case: Case) -> None:
    moved = 0
    step = max(1, (case.wanted - case.smallest) // 12)
    sizes = {*range(case.smallest, case.smallest + 4), *range(case.smallest, case.wanted + 1, step)}
    for slots in sorted(sizes):
        result = case.run(slots)
        assert_identical(result, case.expected)
        assert result.step is not None
        stats = result.step.stats
        cap = slots * slot_bytes(case.model, oomb.Config(**case.settings))
        assert stats.device_peak_bytes <= -(-cap // MAPPED_AT_ONCE) * MAPPED_AT_ONCE
        moved += stats.h2d_bytes > 0
    assert moved > len(sizes) // 2


def test_shuffled_slots_have_the_same_bits(case: Case) -> None:
    for seed, slots in enumerate((None, case.smallest, case.wanted // 4, case.wanted // 2) * 2):
        slots = None if slots is None else max(slots, case.smallest)
        assert_identical(case.run(slots, shuffle_seed=seed, poison=True), case.expected)


@pytest.mark.parametrize("alone", [True, False])
def test_own_chunk_alone_or_not_has_the_same_bits(
    case: Case, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a chunk's own keys get a launch of their own is a matter of timing."""
    asked = []
    monkeypatch.setattr(PageProtocol, "own_alone", lambda *_: asked.append(alone) or alone)
    for slots in (None, max(case.smallest, case.wanted // 2)):
        assert_identical(case.run(slots), case.expected)
    assert asked


def delayed(case: Case, seeds: range) -> None:
    sizes = [case.smallest, case.smallest + 3, max(case.smallest, case.wanted // 4)]
    for seed in seeds:
        result = case.run(sizes[seed % 3], copy_delay_seed=seed, shuffle_seed=seed)
        assert_identical(result, case.expected)


def test_delayed_copies_have_the_same_bits(case: Case) -> None:
    delayed(case, range(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 200), marks=pytest.mark.release)], ids=len
)
@pytest.mark.parametrize("name", ["dense", "sparse"])
@pytest.mark.sampled(1)
def test_200_delays_of_copies_have_the_same_bits(name: str, seeds: range) -> None:
    delayed(Case(name), seeds)


# The waits that a call on the CPU needs, and where leaving each out shows. Kernels run on the
# calling thread, so no copy ever waits for them; and a host slot is never handed on while a load
# reads it, nor read without the wait for the device slot's own store. Tests in C++ cover those.
WAITS = {
    "compute_after_load": ("dense", 5, {}),
    "write_after_store": ("dense", 5, {}),
    "load_after_store": ("dense", 5, {}),
    "write_after_load": ("dense", 12, {"poison": True}),
}


@pytest.mark.parametrize("wait", WAITS)
def test_leaving_out_a_wait_is_noticed(wait: str) -> None:
    """Stale or poisoned pages show in the bits, for one of a few delays at least."""
    name, slots, switches = WAITS[wait]
    case = Case(name)
    for seed in range(20):
        try:
            assert_identical(
                case.run(slots, disabled_wait=wait, copy_delay_seed=seed, **switches), case.expected
            )
        except AssertionError:
            return
    pytest.fail("20 delays without the wait changed nothing")


# Exactness in fp64 under pressure -----------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.25, 0.0], ids=["100 %", "25 %", "smallest"])
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2-tied", "qwen3", "mistral", "phi3", "gpt-oss", "granite", "cohere", "gemma2"],
)
@pytest.mark.sampled(14)
def test_is_exact_with_any_tier(name: str, share: float) -> None:
    model = make(name)
    ids = random_ids(2, 75)
    settings = {"chunk_size": CHUNK, "page_size": PAGE}
    smallest = smallest_slots(2, 1)
    wanted = wanted_slots(model, settings, ids, ids, smallest)
    slots = max(int(share * wanted), smallest)
    assert_equal(with_slots(model, settings, slots, ids, ids), ordinary(model, ids, ids))


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("trained", ["layers.2.", "layers.1.", "layers.0.self_attn.v_proj", "norm"])
def test_layers_that_backward_never_reaches(trained: str, recompute: str) -> None:
    """The access order names reads of them that do not come."""
    model = make("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    ids = random_ids(2, 75)
    expected = ordinary(model, ids, ids)
    settings = {"chunk_size": CHUNK, "page_size": PAGE, "recompute": recompute}
    for slots in (smallest_slots(2, 1), 9, 20):
        assert_equal(with_slots(model, settings, slots, ids, ids, {"poison": True}), expected)


# Limits -------------------------------------------------------------------------------------------


def test_one_slot_below_the_smallest_is_refused_with_the_bytes() -> None:
    model = make("llama")
    settings = {"chunk_size": CHUNK, "page_size": PAGE}
    ids = random_ids(2, 75)
    page = slot_bytes(model, oomb.Config(**settings))  # type: ignore[arg-type]
    smallest = smallest_slots(2, 1)
    with pytest.raises(oomb.OutOfMemoryError, match=r"device_memory.* out of memory") as caught:
        with_slots(model, settings, smallest - 1, ids, ids)
    assert bytes_text(smallest * page) in str(caught.value)
    assert bytes_text((smallest - 1) * page) in str(caught.value)
    assert caught.value.needed_bytes == smallest * page
    with_slots(model, settings, smallest, ids, ids)


def test_a_host_tier_too_small_is_refused_before_the_first_chunk() -> None:
    """The text has bytes needed, both limits, and the setting to change."""
    model = make("llama")
    ids = random_ids(1, 120)
    page = slot_bytes(model, oomb.Config(chunk_size=CHUNK, page_size=PAGE))
    config = oomb.Config(
        chunk_size=CHUNK, page_size=PAGE, device_memory=4 * page, host_memory=5 * page
    )
    started: list[oomb.Progress] = []
    with pytest.raises(oomb.OutOfMemoryError, match=r" out of memory\.") as caught:
        chunked(model, config, ids, ids, on_progress=started.append)
    text = str(caught.value)
    for number in (caught.value.needed_bytes, 4 * page, 5 * page):
        assert bytes_text(number) in text
    assert "host_memory" in text
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert not started


def test_enough_host_memory_is_enough() -> None:
    """What the refusal says is needed, is."""
    model = make("llama")
    ids = random_ids(1, 120)
    settings: dict[str, Any] = {"chunk_size": CHUNK, "page_size": PAGE}
    page = slot_bytes(model, oomb.Config(**settings))
    small = oomb.Config(**settings, device_memory=4 * page, host_memory=page)
    with pytest.raises(oomb.OutOfMemoryError) as caught:
        chunked(model, small, ids, ids)
    host = caught.value.needed_bytes - 4 * page
    enough = oomb.Config(**settings, device_memory=4 * page, host_memory=host)
    assert_equal(chunked(model, enough, ids, ids), ordinary(model, ids, ids))


def test_pools_are_given_back_after_a_call() -> None:
    model = make("llama")
    ids = random_ids(1, 120)
    page = slot_bytes(model, oomb.Config(chunk_size=CHUNK, page_size=PAGE))
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, device_memory=8 * page, host_memory=HOST)
    with oomb.Engine(model, config) as engine:
        results = []
        for tokens in (120, 40, 120):  # tables change their size in between
            part = ids[:, :tokens]
            step = engine.forward_backward(part, part)
            results.append(Result(step.loss, take_gradients(model)))
            assert engine._pools.manager is not None
            engine._pools.manager.check_integrity()
    assert_identical(results[2], results[0])


@pytest.mark.parametrize("lengths", [(120, 72), (72, 120), (120, 20)])
def test_calls_of_other_lengths_find_the_pools_again(lengths: tuple[int, int]) -> None:
    model = make("llama", torch.float32)
    settings: dict[str, Any] = {"chunk_size": CHUNK, "page_size": PAGE}
    settings |= {"attention": oomb.TopKPages(budget=3)}
    memory = 12 * slot_bytes(model, oomb.Config(**settings))
    config = oomb.Config(**settings, device_memory=memory, host_memory=HOST)
    with oomb.Engine(model, config) as engine:
        managers, host_bytes = [], []
        for tokens in lengths:
            ids = random_ids(1, tokens)
            step = engine.forward_backward(ids, ids)
            managers.append(engine._pools.manager)
            host_bytes.append(step.stats.host_peak_bytes)
            grads = take_gradients(model)
            model.zero_grad()
            alone = with_slots(model, settings, 12, ids, ids)
            for name, value in alone.gradients.items():
                assert torch.equal(grads[name], value), name
    assert managers[0] is managers[1]
    assert (host_bytes[1] == 0) == (lengths[1] == 20)  # the short one does not spill


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [(12, 11, True), (12, 6, True), (12, 15, True), (12, 16, False), (6, 12, False)],
)
def test_calls_with_more_or_less_of_the_device_find_the_pools_again(
    first: int, second: int, found: bool
) -> None:
    """What is free differs a little from call to call; the host's pages are slow to get back."""
    model = make("llama", torch.float32)
    settings: dict[str, Any] = {"chunk_size": CHUNK, "page_size": PAGE}
    page = slot_bytes(model, oomb.Config(**settings))
    ids = random_ids(1, 120)
    config = oomb.Config(**settings, host_memory=HOST)
    with oomb.Engine(model, config) as engine:
        managers = []
        for slots in (first, second, first):
            engine.config = replace(config, device_memory=slots * page)
            step = engine.forward_backward(ids, ids)
            manager = engine._pools.manager
            assert manager is not None
            assert manager.device_slots == min(slots, manager.device_capacity)
            managers.append(manager)
            assert step.stats.host_peak_bytes > 0
            grads = take_gradients(model)
            model.zero_grad()
            alone = with_slots(model, settings, slots, ids, ids)
            for name, value in alone.gradients.items():
                assert torch.equal(grads[name], value), name
    assert (managers[0] is managers[1]) == found


@pytest.mark.parametrize("host_memory", ["1GiB", "256KiB"])
def test_a_smaller_host_tier_is_a_new_one(host_memory: str) -> None:
    model = make("llama", torch.float32)
    settings: dict[str, Any] = {"chunk_size": CHUNK, "page_size": PAGE}
    memory = 12 * slot_bytes(model, oomb.Config(**settings))
    config = oomb.Config(**settings, device_memory=memory, host_memory=HOST)
    ids = random_ids(1, 120)
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(ids, ids)
        first = engine._pools.manager
        engine.config = replace(config, host_memory=host_memory)
        engine.forward_backward(ids, ids)
        assert (engine._pools.manager is first) == (host_memory == HOST)
        host = engine._pools.snapshot()["host"]
        assert host["max_slots"] * host["slot_bytes"] <= parse_size("", host_memory)


class KeepsItsMemory:
    """A page manager of a device that cannot map memory."""

    keeps_device_memory = True

    def __init__(self, *arguments: Any, **switches: Any) -> None:
        self._manager = page_manager(*arguments, **switches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def test_pools_that_keep_their_memory_are_closed_after_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("llama")
    ids = random_ids(1, 120)
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE)
    expected = chunked(model, config, ids, ids)
    monkeypatch.setattr(pools, "page_manager", KeepsItsMemory)
    with oomb.Engine(model, config) as engine:
        for _ in range(2):
            model.zero_grad()
            step = engine.forward_backward(ids, ids)
            assert_identical(Result(step.loss, take_gradients(model)), expected)
            assert engine._pools.manager is None
