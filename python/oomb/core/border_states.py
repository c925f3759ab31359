"""States of recurrences and convolutions at the borders between chunks.

Chunk i is (y, s_i) = F(x, s_{i-1}). The fill keeps s_i of every border in the host's memory, as it
is (recurrences have theirs in fp32 at least). In the sweep s_{i-1} is a leaf; what chunk i leaves
on it is the gradient that chunk i-1 propagates back from its own s_{i-1}:

    fill   chunk 0 ──s_0──▶ chunk 1 ──s_1──▶ chunk 2
    sweep  chunk 2 ──d_1──▶ chunk 1 ──d_0──▶ chunk 0

A document that starts inside a chunk starts without states: a mixer then runs each document's
stretch by itself. Nothing of a state but its size depends on the chunks, so there is one gradient
alive at a time, and in the device's memory the states of one border.

A layer hands on these, keys and values in pages (:class:`oomb.core.attention.ChunkAttention`), both
or neither; `Carry` is what they have in common. Every later chunk reads a page, so its gradient is
summed over all of these; a state is read by the next chunk alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, Protocol

import torch

from oomb.config import AllChunks, Config
from oomb.core.chunk_run import ChunkRun, current_run
from oomb.core.inputs import CallInputs
from oomb.core.layout import Chunks
from oomb.errors import UnsupportedModelError
from oomb.model.mixers import Mixer, States, joined, joined_states, of_rows


class Carry(Protocol):
    """What one kind of layer hands on."""

    def on(self, run: ChunkRun) -> AbstractContextManager[None]:
        """Around a chunk's run, and in the sweep around its backward."""

    def roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the sweep propagates back beside the chunk's loss, and the gradients of these."""
        return [], []


class FillComplete(Exception):  # no error: the fill has all it needs
    """What later chunks need of this one is handed on."""


_Piece = tuple[int, int, bool]  # first token and last + 1 in the chunk; are there tokens before
_ALIGNMENT = 256  # bytes


class BorderStates(Carry):
    """The states of one call.

    Args:
        mixers: none: the model hands on keys and values alone.
        keeps: the fill keeps them for a sweep.

    Attributes:
        kept_bytes: of the host's memory that borders took at most.
    """

    def __init__(
        self,
        mixers: Sequence[Mixer] = (),
        inputs: CallInputs | None = None,
        chunks: Chunks | None = None,
        keeps: bool = False,
    ) -> None:
        self.kept_bytes = 0
        self._mixers = mixers
        self._keeps = keeps
        self._chunks = chunks
        self._rows: list[list[tuple[slice, list[_Piece]]]] = []
        if mixers:
            assert inputs is not None and chunks is not None
            self._rows = _rows_of_chunks(inputs, chunks)
            self._device = inputs.input_ids.device
        self._entering: dict[int, States] = {}  # by mixer
        self._left: dict[int, States] = {}
        self._kept: dict[int, dict[int, States]] = {}  # by border: the chunk before it
        self._gradients: dict[int, States] = {}

    @contextmanager
    def on(self, run: ChunkRun) -> Iterator[None]:
        """Around a chunk's run, and in the sweep around its backward."""
        if not self._mixers:
            yield
            return
        if run.phase == "fill":
            self._entering, self._left = self._left, {}
        else:
            self._entering, self._left = self._load(run.chunk - 1), {}
        yield
        if run.phase == "sweep":
            self._gradients = {
                mixer: {name: leaf.grad for name, leaf in states.items() if leaf.grad is not None}
                for mixer, states in self._entering.items()
            }
        elif self._keeps and run.chunk + 1 < len(self._rows):
            self._store(run.chunk)

    def roots(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """States that this chunk leaves, and their gradients."""
        roots, gradients = [], []
        for mixer, states in self._gradients.items():
            for name, gradient in states.items():
                roots.append(self._left[mixer][name])
                gradients.append(gradient)
        return roots, gradients

    def run(
        self,
        index: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """A mixer's output for its chunk.

        Raises:
            FillComplete: in a fill that ends here.
        """
        mixer = self._mixers[index]
        hidden = mixer.given(args, keywords)
        entering = self._entering.get(index)
        if entering is not None and mixer.trains(hidden):
            for state in entering.values():
                state.requires_grad_()
        outputs, left = [], []
        current = current_run()
        for rows, pieces in self._rows[current.chunk]:
            parts = []
            for begin, end, continues in pieces:
                before = None
                if continues:
                    assert entering is not None  # the chunk before has left them
                    before = of_rows(entering, rows)
                part = hidden[rows, begin:end]
                output, behind = mixer.stretch(forward, args, keywords, part, before)
                parts.append(output)
            outputs.append(joined(parts, dim=1))
            left.append(behind)
        # A layer that is computed again must not replace what the graph hangs on.
        self._left.setdefault(index, joined_states(left))
        if current.ends_with == "states" and index == len(self._mixers) - 1:
            raise FillComplete
        return joined(outputs, dim=0)

    def _store(self, border: int) -> None:
        states = [state for of in self._left.values() for state in of.values()]
        sizes = [-(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT for x in states]
        block = torch.empty(
            sum(sizes), dtype=torch.uint8, pin_memory=self._device.type == "cuda", device="cpu"
        )
        parts = iter(block.split(sizes))
        self._kept[border] = {
            mixer: {name: _copied(state, next(parts)) for name, state in of.items()}
            for mixer, of in self._left.items()
        }
        self.kept_bytes += block.numel()

    def _load(self, border: int) -> dict[int, States]:
        """States of a border as leaves; nobody needs them again."""
        return {
            mixer: {name: x.to(self._device, non_blocking=True) for name, x in states.items()}
            for mixer, states in self._kept.pop(border, {}).items()
        }


def expect_every_chunk(mixers: Sequence[Mixer], config: Config) -> None:
    """Refuse settings that leave a model with states no exact gradient.

    Raises:
        UnsupportedModelError: gradient leaves out borders, or chunks have one token, whose state is
            of no use.
    """
    if not mixers:
        return
    where = f"{mixers[0].name}: hands a state from token to token"
    if not isinstance(config.backward, AllChunks):
        raise UnsupportedModelError(
            f"{where}, so every path of the gradient crosses every border between chunks; "
            f"{type(config.backward).__name__} cannot leave out any of them: set "
            "backward=oomb.AllChunks()"
        )
    if config.chunk_size < 2:
        raise UnsupportedModelError(f"{where}. chunk_size: expected at least 2 tokens, got 1")


def border_bytes(per_sequence: int, batch: int, num_chunks: int) -> int:
    """Memory of the host that a call's states take; alignment left out.

    Args:
        per_sequence: bytes that one sequence hands over a border.
    """
    return per_sequence * batch * max(0, num_chunks - 1)


def _copied(state: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    size = state.numel() * state.element_size()
    kept = room[:size].view(state.dtype).view(state.shape)
    return kept.copy_(state.detach(), non_blocking=True)


def _rows_of_chunks(inputs: CallInputs, chunks: Chunks) -> list[list[tuple[slice, list[_Piece]]]]:
    """Of each chunk: groups of sequences, and the stretches that their documents make of it."""
    starts: list[set[int]] = [set() for _ in range(inputs.batch)]
    if inputs.first_key is not None:
        index = torch.arange(inputs.tokens, device=inputs.first_key.device)
        for row, token in (inputs.first_key == index).nonzero().tolist():
            starts[row].add(token)
    found = []
    for chunk in range(chunks.number):
        begin, end = chunks.span(chunk)
        pieces = [_pieces(begin, end, of_row) for of_row in starts]
        alike = all(of_row == pieces[0] for of_row in pieces)
        rows = [(slice(None), pieces[0])] if alike else list(_single_rows(pieces))
        found.append(rows)
    return found


def _single_rows(pieces: list[list[_Piece]]) -> Iterator[tuple[slice, list[_Piece]]]:
    for row, of_row in enumerate(pieces):
        yield slice(row, row + 1), of_row


def _pieces(begin: int, end: int, starts: set[int]) -> list[_Piece]:
    inside = sorted(start for start in starts if begin < start < end)
    borders = [begin, *inside, end]
    return [
        (first - begin, last - begin, first > 0 and first not in starts)
        for first, last in pairwise(borders)
    ]
