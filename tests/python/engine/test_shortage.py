"""Memory that is not to be had, before a call and within: all is as before, or less does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import oomb
from oomb.core import call_pages, pools, shortage
from oomb.engine import calls, needs
from oomb.units import bytes_text

from .models import make
from .recovery import IDS, SPARSE, assert_untouched, config, usual, with_gradients
from .reference import assert_identical, random_ids, take_gradients
from .tiers import slot_bytes


def test_after_out_of_memory() -> None:
    """A sequence that the tiers cannot hold; then one that they can."""
    model = make("llama")
    page = slot_bytes(model, oomb.Config(chunk_size=16, page_size=8))
    tight = oomb.Config(chunk_size=16, page_size=8, device_memory=12 * page, host_memory=100 * page)
    long = random_ids(1, 400)
    with oomb.Engine(model, tight) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        with pytest.raises(oomb.OutOfMemoryError):
            engine.forward_backward(long, long)
        assert_untouched(engine, model, before, expected)


@pytest.mark.parametrize(("phase", "chunk"), [("fill", 3), ("sweep", 7), ("sweep", 2)])
@pytest.mark.parametrize("settings", [{}, {"attention": SPARSE, "recompute": "layer"}], ids=str)
def test_torch_finds_no_memory(phase: str, chunk: int, settings: dict[str, Any]) -> None:
    """In a layer of the fill, of the sweep's forward, and of its backward."""
    model = make("llama")

    def too_much(*_: Any) -> None:
        torch.empty(1 << 50, dtype=torch.uint8)

    with oomb.Engine(model, config(model, **settings)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        hooks: list[Any] = []

        def arm(progress: oomb.Progress) -> None:
            if (progress.phase, progress.chunk) == (phase, chunk):
                layer = model.model.layers[1]
                hooks.append(
                    layer.register_full_backward_hook(too_much)
                    if phase == "sweep"
                    else layer.register_forward_hook(too_much)
                )

        with pytest.raises(oomb.OutOfMemoryError, match="recompute='layer'") as caught:
            engine.forward_backward(IDS, IDS, on_progress=arm)
        for hook in hooks:
            hook.remove()
        assert caught.value.needed_bytes == 1 << 50
        assert 0 < caught.value.available_bytes < 1 << 50
        assert re.search(
            r"^torch needed 1024\.00 TiB more beside [\d.]+ KiB of pages, [\d.]+ GiB are free",
            str(caught.value),
        )
        assert "device_memory" in str(caught.value)
        assert caught.value.snapshot
        assert_untouched(engine, model, before, expected)


def test_no_host_memory_for_page_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the first chunk."""
    model, seen = make("llama"), []
    with oomb.Engine(model, config(model, attention=SPARSE)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        own = torch.empty

        def refuse(*shape: Any, **settings: Any) -> torch.Tensor:
            if "pin_memory" in settings:
                raise RuntimeError("CUDA error: out of memory")
            return own(*shape, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", refuse)
            with pytest.raises(oomb.OutOfMemoryError, match="page lists of the call") as caught:
                engine.forward_backward(IDS, IDS, on_progress=seen.append)
        chunks = sum(1 for chunk in range(8) if 2 * chunk > SPARSE.budget)
        assert caught.value.needed_bytes == 3 * chunks * 2 * SPARSE.budget * 4
        assert not seen
        assert_untouched(engine, model, before, expected)


def test_memory_taken_away_before_a_call_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not enough for a chunk and the sums of gradients; then for these, but not for a capped tier
    beside them.
    """
    model, seen = make("llama"), []
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        free, texts = 50_000, ("Lower chunk_size", "lower chunk_size")
        for text in texts:
            with monkeypatch.context() as patch:
                for module in (pools, calls, needs):
                    patch.setattr(module, "free_memory", lambda _, free=free: free)
                with pytest.raises(oomb.OutOfMemoryError, match=text) as caught:
                    engine.forward_backward(IDS, IDS, on_progress=seen.append)
            if text == texts[0]:
                assert caught.value.available_bytes == free
                assert f"{bytes_text(free)} are free" in str(caught.value)
                free = caught.value.needed_bytes
        assert free > sum(p.numel() * 8 for p in before.values())
        assert caught.value.available_bytes < caught.value.needed_bytes
        assert caught.value.needed_bytes <= 12 * slot_bytes(model, engine.config)
        assert not seen
        assert_untouched(engine, model, before, expected)


@pytest.mark.parametrize("settings", [{}, {"attention": SPARSE, "recompute": "layer"}], ids=str)
@pytest.mark.parametrize("capped", [False, True])
def test_a_device_that_gives_less_than_is_free(
    monkeypatch: pytest.MonkeyPatch, capped: bool, settings: dict[str, Any]
) -> None:
    """The tier is as large as it can be, the rest goes to the host; too much is foreseen."""
    model, seen = make("llama"), []
    asked = config(model, **settings)
    if not capped:
        asked = replace(asked, device_memory=None)
    page = slot_bytes(model, asked)
    with oomb.Engine(model, asked) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        with monkeypatch.context() as patch:
            patch.setattr(pools, "leave_to_driver", lambda *_: 8 * page)
            engine.config = replace(asked, host_memory=2 * page)
            with pytest.raises(oomb.OutOfMemoryError, match="Raise host_memory") as caught:
                engine.forward_backward(IDS, IDS, on_progress=seen.append)
            assert not seen
            engine.config = replace(asked, host_memory=caught.value.needed_bytes)
            found = engine.forward_backward(IDS, IDS)
            assert engine._pools.manager is not None
            assert engine._pools.manager.device_slots == 8
            assert found.loss == expected.loss
        assert found.stats.host_peak_bytes > 0
        take_gradients(model)
        for name, gradient in before.items():
            model.get_parameter(name).grad = gradient.fill_(7)
        engine.config = asked
        assert_untouched(engine, model, before, expected)


@pytest.mark.parametrize("given", [False, True])
def test_a_refused_step_is_taken_again_where_torch_gives_up_memory(
    monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """The first growth in a call is refused."""
    model = make("llama")
    refusals, real = [], shortage.with_torchs_unused
    monkeypatch.setattr(shortage, "_give_up_unused", lambda _: given)

    def refused_once(device: torch.device, step: Callable[[], None]) -> None:
        def first() -> None:
            if not refusals:
                refusals.append(step)
                raise oomb.OutOfMemoryError("no", needed_bytes=1, available_bytes=0)
            step()

        real(device, first)

    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        monkeypatch.setattr(call_pages, "with_torchs_unused", refused_once)
        if given:
            take_gradients(model)
            assert_identical(usual(engine, model), expected)
        else:
            with pytest.raises(oomb.OutOfMemoryError, match="no"):
                engine.forward_backward(IDS, IDS)
            assert_untouched(engine, model, before, expected)
        assert len(refusals) == 1
