"""The chunk loop: fill forwards, sweep backwards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from oomb.core.alternation import Alternation
from oomb.core.attention import ChunkAttention, expect_finite
from oomb.core.border_states import BorderStates, Carry, FillComplete
from oomb.core.chunk_run import ChunkRun, EndsWith, current_run, outer_run_afterwards
from oomb.core.images import ImageRows
from oomb.core.inputs import CallInputs, document_places
from oomb.core.later_products import LaterProducts
from oomb.core.layer_attention import LayerAttention
from oomb.core.layout import Chunks
from oomb.core.loss import ChunkLoss, OnLogits
from oomb.core.recompute import LayerRunner
from oomb.core.router_loss import RouterLoss
from oomb.model.causal import CausalModel
from oomb.model.mixers import of_tokens
from oomb.model.swap import Swaps
from oomb.parallel.placement import Placement
from oomb.parallel.slices import TokenSlices
from oomb.results import Progress

OnProgress = Callable[[Progress], None]


class ChunkLoop:
    """Runs the chunks of one call through a model. Use inside :meth:`running`.

    Fill (no autograd): chunks in order, keeping only keys and values. Sweep (autograd): chunks in
    reverse; each is rebuilt, its loss and the gradient that later chunks left on its keys and
    values are propagated back, and its graph is gone before the next one is built.
    """

    _attends_by: ClassVar = LayerAttention

    def __init__(
        self,
        model: CausalModel,
        inputs: CallInputs,
        chunks: Chunks,
        attention: ChunkAttention,
        runner: LayerRunner,
        loss: ChunkLoss,
        rope_angles: str,
        on_progress: OnProgress | None,
        sums: LaterProducts | None,
        borders: BorderStates | None = None,
        placement: Placement = Placement(),  # noqa: B008  # a constant
        router_loss: RouterLoss | None = None,
        kept_products: Swaps | None = None,
    ) -> None:
        self._placement = placement
        self._model = model
        self._inputs = inputs
        self._chunks = chunks
        self._attention = attention
        self._runner = runner
        self._loss = loss
        self._rope_angles = rope_angles
        self._on_progress = on_progress
        self._sums = sums
        self._borders = borders or BorderStates()
        self.images = ImageRows(inputs.images, chunks, placement, model.device)
        self._layer_attention = self._attends_by(
            model, chunks, attention, runner, self.images, placement
        )
        self._carries: tuple[Carry, ...] = (attention, self._borders, self.images)
        self._router_loss, self._kept_products = router_loss, kept_products
        if router_loss is not None:
            self._carries += (router_loss,)
        self._began = time.perf_counter()

    def running(self) -> Swaps:
        """While active, the model's attention, layers, angles and head belong to this loop."""
        return Swaps(self._take_model)

    def _take_model(self, swaps: Swaps) -> None:
        # Whatever happens: sums that have begun write memory that is free soon after.
        swaps.afterwards(self._placement.finish_sums)
        swaps.also(outer_run_afterwards())
        swaps.also(self._attention.activated())
        session = self._model.session(
            self._layer_attention.attend,
            self._runner,
            self._mix,
            largest_position=self._inputs.largest_position,
            rope_angles=self._rope_angles,
            sums=self._sums,
            places=self._places,
        )
        swaps.also(session)
        if self._kept_products is not None:
            swaps.also(self._kept_products)
        swaps.also(self.images.embedding(self._model.causal.get_input_embeddings()))

    def fill(self, num_chunks: int) -> float:
        """Keys and values of chunks [0, num_chunks). Returns seconds.

        A loss of routers needs all chunks to their end.
        """
        if self._router_loss is not None:
            return self._forward_only(self._chunks.number, lambda _, __: None)
        return self._forward_only(num_chunks, None)

    def evaluate(self, on_logits: OnLogits | None = None) -> float:
        """Loss of every chunk, without gradient. Returns seconds."""

        def consume(begin: int, hidden: torch.Tensor) -> None:
            if on_logits is None:
                self._loss.of_chunk(hidden, begin, 1.0)
            else:
                self._loss.of_chunk_with_logits(hidden, begin, on_logits)

        return self._forward_only(self._chunks.number, consume)

    def _forward_only(
        self, num_chunks: int, consume: Callable[[int, torch.Tensor], object] | None
    ) -> float:
        """Forward of chunks [0, num_chunks); ``consume`` takes each one's hidden states."""
        began = time.perf_counter()
        last: EndsWith = "states" if self._model.ends_in_mixer else "pages"
        ends_with = last if consume is None else None
        done: deque[int] = deque()

        def run(first: int, step: int) -> None:
            for chunk in range(first, num_chunks, step):
                with self._on(ChunkRun(chunk, "fill", ends_with)):
                    hidden = self._run(chunk)
                begin, end = self._slices(chunk).own
                if consume is not None and begin < end:
                    assert hidden is not None
                    consume(begin, hidden)
                done.append(chunk)
                if first == 0:  # in the caller's context
                    report()

        def report() -> None:
            while done:
                chunk = done.popleft()
                self._report("fill", chunk, num_chunks, self._chunks.span(chunk)[1])

        with torch.no_grad():
            if self._attention.pages.paired:
                turns = self._layer_attention.turns = Alternation()
                try:
                    turns.run(lambda: run(0, 2), lambda: run(1, 2))
                finally:
                    self._layer_attention.turns = None
            else:
                run(0, 1)
        if self._router_loss is not None:
            self._loss.total += self._router_loss.total()
        report()
        return time.perf_counter() - began

    def sweep(self, swept: list[int], loss_factor: float) -> float:
        """Gradients of chunks ``swept`` (ascending), last first. Returns seconds."""
        began = time.perf_counter()
        done = 0
        with torch.enable_grad():
            for chunk in reversed(swept):
                begin, end = self._slices(chunk).own
                with self._on(ChunkRun(chunk, "sweep")):
                    hidden = self._run(chunk)
                    assert hidden is not None
                    grad = None
                    if begin < end:
                        grad = self._loss.of_chunk(hidden, begin, loss_factor)
                    if self._attention.pages.check_finite:
                        expect_finite("the loss", self._loss.total, chunk=chunk)
                    if hidden.requires_grad:
                        grad = torch.zeros_like(hidden) if grad is None else grad
                        self._propagate(hidden, grad)
                    del hidden, grad
                begin, end = self._chunks.span(chunk)
                done += end - begin
                self._report("sweep", chunk, self._chunks.number, done)
            self.images.propagate()
        return time.perf_counter() - began

    @contextmanager
    def _on(self, run: ChunkRun) -> Iterator[None]:
        """Inside, it is this chunk that is run, and in the sweep propagated back."""
        with ExitStack() as stack:
            stack.enter_context(run.under_way())
            for carry in self._carries:
                stack.enter_context(carry.on(run))
            yield

    def _propagate(self, hidden: torch.Tensor, grad: torch.Tensor) -> None:
        """Backward from a chunk's hidden states, and from what it hands on."""
        roots, gradients = [hidden], [grad]
        for carry in self._carries:
            handed, theirs = carry.roots()
            roots += handed
            gradients += theirs
        torch.autograd.backward(roots, gradients)
        if self._sums is not None:
            self._sums.finish()

    def _run(self, chunk: int) -> torch.Tensor | None:
        """Hidden states of a chunk; None where the fill ended at the last layer."""
        torch.clear_autocast_cache()  # a weight cast without autograd must not serve the sweep
        self._runner.begin_chunk()
        begin, end = self._slices(chunk).run
        positions = self.images.positions(begin, end)
        if positions is None:
            positions = self._inputs.position_ids[:, begin:end].long()
        ids = self._inputs.input_ids[:, begin:end]
        of_images = self.images.arguments(chunk, ids)
        take = None if self._router_loss is None else self._router_loss.take
        try:
            return self._model.hidden(ids, positions, take, **of_images)
        except FillComplete:
            return None

    def _places(self) -> torch.Tensor:
        """[B or 1, C]: of the tokens that are run now, each in its document."""
        chunk = current_run().chunk
        begin, (first, last) = self._chunks.span(chunk)[0], self._slices(chunk).run
        first_key, device = self._inputs.first_key, self._model.device
        places = document_places(first_key, self._chunks, chunk, device)
        return places[:, first - begin : last - begin]

    def _slices(self, chunk: int) -> TokenSlices:
        return self._placement.slices(*self._chunks.span(chunk))

    def _mix(
        self,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """A mixer's output. Each rank runs it on all tokens of the chunk, and keeps its own.

        So states are everywhere, and never travel. What a rank propagates back is the gradient of
        its own tokens' outputs; the sums over ranks are the whole one's.
        """
        placement = self._placement
        if placement.ranks == 1:
            return self._borders.run(index, forward, args, keywords)
        slices, mixer = self._slices(current_run().chunk), self._model.mixers[index]
        own = mixer.given(args, keywords)
        (whole,) = self._runner.once(lambda: (placement.to_whole(own, slices),), own)
        args, keywords = mixer.giving(whole, args, keywords)
        first, last = slices.run
        output = self._borders.run(index, forward, args, keywords)
        return of_tokens(output, first - slices.begin, last - slices.begin)

    def _report(self, phase: str, chunk: int, num_chunks: int, tokens_done: int) -> None:
        self._placement.border()
        if self._on_progress is not None:
            seconds = time.perf_counter() - self._began
            assert phase in ("fill", "sweep")
            manager = self._attention.pages.manager
            counters = manager.stats()
            self._on_progress(
                Progress(
                    phase=phase,  # type: ignore[arg-type]
                    chunk=chunk,
                    num_chunks=num_chunks,
                    tokens_done=tokens_done * self._inputs.batch,
                    seconds=seconds,
                    device_bytes=counters.device.taken_bytes,
                    host_bytes=counters.host.taken_bytes,
                    h2d_bytes=counters.h2d_bytes,
                    d2h_bytes=counters.d2h_bytes,
                    exposed_copy_seconds=counters.exposed_copy_seconds,
                )
            )
