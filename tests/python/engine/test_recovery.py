"""After an error or Ctrl-C in the middle all is as before, and the next call has the usual bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import oomb
from oomb.engine import attention, call_pages, pools, shortage
from oomb.engine import loss as loss_module
from oomb.engine.attention import ChunkAttention

from .models import make
from .reference import Result, assert_identical, random_ids, take_gradients
from .tiers import HOST, slot_bytes

IDS = random_ids(1, 120)  # 8 chunks
SPARSE = oomb.TopKPages(budget=3)


def config(model: PreTrainedModel, **settings: Any) -> oomb.Config:
    """A tier of 12 pages, so that copies are under way when something fails."""
    page = slot_bytes(model, oomb.Config(chunk_size=16, page_size=8))
    return oomb.Config(
        chunk_size=16, page_size=8, device_memory=12 * page, host_memory=HOST, **settings
    )


def stop_at(phase: str, chunk: int, error: BaseException) -> Callable[[oomb.Progress], None]:
    def report(progress: oomb.Progress) -> None:
        if (progress.phase, progress.chunk) == (phase, chunk):
            raise error

    return report


def usual(engine: oomb.Engine, model: PreTrainedModel) -> Result:
    step = engine.forward_backward(IDS, IDS)
    return Result(step.loss, take_gradients(model))


def assert_untouched(
    engine: oomb.Engine, model: PreTrainedModel, before: dict[str, torch.Tensor], expected: Result
) -> None:
    """Gradients are the same objects with the same bits, pools are empty, the model is in order."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        assert bool((before[name] == 7).all())
        assert not parameter._post_accumulate_grad_hooks
    assert engine._pools.manager is not None
    engine._pools.manager.check_integrity()
    assert not ChunkAttention.active
    assert model.config._attn_implementation == "sdpa"
    take_gradients(model)
    assert_identical(usual(engine, model), expected)


def with_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


MOMENTS = [("fill", 0), ("fill", 6), ("sweep", 7), ("sweep", 4), ("sweep", 0)]


@pytest.mark.parametrize("settings", [{}, {"attention": SPARSE, "recompute": "layer"}], ids=str)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("no"), MemoryError()], ids=repr
)
@pytest.mark.parametrize(("phase", "chunk"), MOMENTS)
def test_stopped_at_a_chunk_border(
    phase: str, chunk: int, error: BaseException, settings: dict[str, Any]
) -> None:
    model = make("llama")
    with oomb.Engine(model, config(model, **settings)) as engine:
        expected = usual(engine, model)
        state = engine.state_dict()
        before = with_gradients(model)
        with pytest.raises(type(error)):
            engine.forward_backward(IDS, IDS, on_progress=stop_at(phase, chunk, error))
        assert engine.state_dict() == state
        assert_untouched(engine, model, before, expected)


PARTS = [
    (attention, "write_own"),
    (attention, "launches"),
    (attention, "end_own"),
    (ChunkAttention, "backward"),
]


@pytest.mark.parametrize(("owner", "part"), PARTS, ids=[part for _, part in PARTS])
@pytest.mark.parametrize("count", [1, 9, 20])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_stopped_inside_a_layer(
    owner: object, part: str, count: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also inside autograd's backward, with pages of the layer held."""
    model = make("llama")
    with oomb.Engine(model, config(model, recompute=recompute)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        own = getattr(owner, part)
        calls = 0

        def failing(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                raise KeyboardInterrupt
            return own(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(owner, part, failing)
            with pytest.raises(KeyboardInterrupt):
                engine.forward_backward(IDS, IDS)
        assert calls == count
        assert_untouched(engine, model, before, expected)


def test_stopped_by_a_signal() -> None:
    """A real SIGINT, from the process to itself."""
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)

        def report(progress: oomb.Progress) -> None:
            if (progress.phase, progress.chunk) == ("sweep", 5):
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(IDS, IDS, on_progress=report)
        assert_untouched(engine, model, before, expected)


class Interrupting(dict[Any, Any]):
    """Sends SIGINT when its third entry is taken."""

    taken = 0

    def pop(self, *arguments: Any) -> Any:
        self.taken += 1
        if self.taken == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().pop(*arguments)


def test_an_interrupt_while_gradients_are_written_comes_after_all_of_them() -> None:
    """All or none, in the few milliseconds in which param.grad changes."""
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)

        def report(progress: oomb.Progress) -> None:
            if (progress.phase, progress.chunk) == ("sweep", 0):
                engine._grads._sums = Interrupting(engine._grads._sums)

        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(IDS, IDS, on_progress=report)
        assert_identical(Result(expected.loss, take_gradients(model)), expected)
        assert_identical(usual(engine, model), expected)


def test_stopped_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        with monkeypatch.context() as patch:
            patch.setattr(loss_module.F, "cross_entropy", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.forward_backward(IDS, IDS)
        assert_untouched(engine, model, before, expected)


def test_stopped_in_evaluate() -> None:
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        loss = engine.evaluate(IDS, IDS).loss
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate(IDS, IDS, on_progress=stop_at("fill", 3, KeyboardInterrupt()))
        assert torch.equal(engine.evaluate(IDS, IDS).loss, loss)
        assert_untouched(engine, model, before, expected)


def test_after_bad_input() -> None:
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        with pytest.raises(ValueError, match="input_ids"):
            engine.forward_backward(IDS + 1000, IDS)
        assert_untouched(engine, model, before, expected)


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
        free, needed = 50_000, 0
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(shortage, "free_memory", lambda _, free=free: free)
                with pytest.raises(oomb.OutOfMemoryError, match="Lower device_memory") as caught:
                    engine.forward_backward(IDS, IDS, on_progress=seen.append)
            assert caught.value.available_bytes == free
            free, needed = caught.value.needed_bytes, caught.value.needed_bytes - needed
        assert free - needed > sum(p.numel() * 8 for p in before.values())
        assert needed == 12 * slot_bytes(model, engine.config)
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


def test_a_call_inside_a_call_is_refused() -> None:
    model = make("llama")
    with oomb.Engine(model, config(model)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        with pytest.raises(RuntimeError, match="one call at a time"):
            engine.forward_backward(
                IDS, IDS, on_progress=lambda _: engine.evaluate(IDS, IDS) and None
            )
        assert_untouched(engine, model, before, expected)


def test_what_is_not_finite_is_named_on_request() -> None:
    """The loss is infinite in one chunk; a gradient in one layer."""
    model = make("llama")
    ids = IDS.clone()
    ids[0, 70] = 0  # in chunk 4 alone
    labels = ids.clone()
    with oomb.Engine(model, config(model, check_finite=True)) as engine:
        expected = usual(engine, model)
        before = with_gradients(model)
        embedding = model.model.embed_tokens.weight
        kept = embedding[0].clone()
        with torch.no_grad():
            embedding[0] = torch.nan
        # Chunks 5 to 7 see its keys.
        with pytest.raises(oomb.Error, match=r"^chunk 7: the loss is not finite"):
            engine.forward_backward(ids, labels)
        with pytest.raises(oomb.Error, match=r"^chunk 4: the loss is not finite"):
            engine.forward_backward(ids[:, :75], labels[:, :75])
        with torch.no_grad():
            embedding[0] = kept
        hook = model.model.layers[1].register_full_backward_hook(
            lambda _, inputs, __: tuple(g * torch.nan for g in inputs)
        )
        with pytest.raises(oomb.Error, match=r"^chunk 7, layer 0: the gradient of attention"):
            engine.forward_backward(IDS, IDS)
        hook.remove()
        assert_untouched(engine, model, before, expected)


def test_an_error_inside_a_call_carries_a_snapshot() -> None:
    model = make("llama")

    def stop(progress: oomb.Progress) -> None:
        if progress.phase == "sweep":
            raise oomb.Error("stopped by the test")

    ids = random_ids(1, 100)
    with oomb.Engine(model, config(model)) as engine:
        with pytest.raises(oomb.Error, match="stopped") as caught:
            engine.forward_backward(ids, ids, on_progress=stop)
        assert caught.value.snapshot, "where the pages were"
        assert caught.value.snapshot != engine.snapshot(), "of the call, not of what is left now"
