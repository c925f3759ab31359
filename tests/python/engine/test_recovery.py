"""After an error or Ctrl-C in the middle all is as before, and the next call has the usual bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oomb
from oomb.core import loss as loss_module
from oomb.core.attention import ChunkAttention
from oomb.core.page_protocol import PageProtocol

from .models import make
from .recovery import IDS, SPARSE, assert_untouched, config, stop_at, usual, with_gradients
from .reference import Result, assert_identical, random_ids, take_gradients

MOMENTS = [("fill", 0), ("fill", 6), ("sweep", 7), ("sweep", 4), ("sweep", 0)]


@pytest.mark.parametrize("settings", [{}, {"attention": SPARSE, "recompute": "layer"}], ids=str)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("no"), MemoryError()], ids=repr
)
@pytest.mark.parametrize(("phase", "chunk"), MOMENTS)
@pytest.mark.sampled(8)
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
    (PageProtocol, "write"),
    (PageProtocol, "_visit"),
    (PageProtocol, "_end"),
    (ChunkAttention, "backward"),
]


@pytest.mark.parametrize(("owner", "part"), PARTS, ids=[part for _, part in PARTS])
@pytest.mark.parametrize("count", [1, 2, 9, 20])
@pytest.mark.parametrize(
    "settings", [{"recompute": "none"}, {"recompute": "layer"}, {"attention": SPARSE}], ids=str
)
@pytest.mark.sampled(12)
def test_stopped_inside_a_layer(
    owner: object,
    part: str,
    count: int,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also inside autograd's backward, with pages of the layer held, and in either of two chunks
    that take turns."""
    model = make("llama")
    with oomb.Engine(model, config(model, **settings)) as engine:
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


def with_gradient(grad: Callable[[nn.Parameter], torch.Tensor]) -> Any:
    """A model, one of whose parameters has a gradient already."""
    model = make("llama")
    model.model.norm.weight.grad = grad(model.model.norm.weight)
    return model


def inferred(parameter: nn.Parameter) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros_like(parameter)


@pytest.mark.parametrize(
    ("grad", "got"),
    [
        (lambda p: torch.zeros_like(p).to_sparse(), "a tensor of layout torch.sparse_coo"),
        (lambda p: torch.zeros(1, dtype=p.dtype).expand_as(p), r"an expanded view, strides \[0\]"),
        (inferred, "a tensor made in inference mode"),
        (lambda p: torch.zeros_like(p, requires_grad=True), "a tensor that requires gradients"),
    ],
)
def test_gradients_that_nothing_can_be_added_to(
    grad: Callable[[nn.Parameter], torch.Tensor], got: str
) -> None:
    """Found while sums were added, such a gradient left the others half written."""
    model = with_gradient(grad)
    with oomb.Engine(model, config(model)) as engine:
        with pytest.raises(ValueError, match=rf"param\.grad of .*\[48\]: expected .*, got {got}"):
            engine.forward_backward(IDS, IDS)
        assert engine.state_dict()["step"] == 0
    assert sum(p.grad is not None for p in model.parameters()) == 1


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_gradients_of_the_dtype_that_torch_was_told() -> None:
    model = make("llama", torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    with oomb.Engine(model, config(model)) as engine:
        for _ in range(2):
            engine.forward_backward(IDS, IDS)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    expected = make("llama", torch.float32)
    expected.load_state_dict(model.state_dict())
    for _ in range(2):
        expected(input_ids=IDS, labels=IDS).loss.backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    worst = max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs)
    assert worst < 0.05


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
