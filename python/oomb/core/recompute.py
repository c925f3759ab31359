"""How a decoder layer runs inside a chunk: seeded, and recomputed in backward where asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch.utils.checkpoint import checkpoint

from oomb.core.chunk_run import current_run
from oomb.model.generators import draw_from, generator_states
from oomb.model.remade import remaking

Recompute = Literal["none", "pointwise", "layer"]  # as of Config, from the least
Attended = tuple[torch.Tensor, torch.Tensor]  # o and lse
_OF_RANK, _BEFORE = -1, -2  # in place of a layer, where seeds are derived


class LayerRunner:
    """Runs layers so that fill, sweep and recompute draw the same random numbers.

    Args:
        recompute: in backward, in all chunks or in each; of ``"layer"`` a layer keeps its input and
            attention's output.
        seed: of the call; None: layers draw nothing.
        gpus: from whose generators they may draw, beside the CPU's.
        watch: told the number of each layer and what it is given, before it runs.
    """

    def __init__(
        self,
        *,
        recompute: Recompute | tuple[Recompute, ...],
        seed: int | None,
        gpus: Sequence[torch.device] = (),
        watch: Callable[[int, Any], object] | None = None,
    ) -> None:
        self._watch = watch
        self._recompute = recompute
        self._seed = seed
        self._gpus = gpus
        self._kept: _Kept | None = None  # of the layer that runs; None: nothing is

    def __call__(
        self,
        layer: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        current = current_run()
        if self._watch is not None:
            self._watch(layer, args[0] if args else None)
        seed = None if self._seed is None else _layer_seed(self._seed, current.chunk, layer)

        def run(*inputs: Any) -> Any:
            if seed is not None:
                _seed_generators(seed, self._gpus)
            return forward(*inputs, **keywords)

        again = self._recompute
        if isinstance(again, tuple):
            again = again[current.chunk]
        if again == "none" or not torch.is_grad_enabled():
            return run(*args)
        if again == "pointwise":
            with remaking():
                return run(*args)
        kept = _Kept()

        def run_keeping(*inputs: Any) -> Any:
            self._kept = kept
            kept.start()
            try:
                with current.under_way():  # the second run is in a thread of autograd's
                    return run(*inputs)
            finally:
                self._kept = None

        return checkpoint(run_keeping, *args, use_reentrant=False, preserve_rng_state=False)

    def begin_chunk(self) -> None:
        """What is drawn before the first layer, of embeddings, is the same in fill and sweep."""
        if self._seed is not None:
            _seed_generators(_layer_seed(self._seed, current_run().chunk, _BEFORE), self._gpus)

    def attention(
        self, attend: Callable[[], Attended], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Attended:
        """What ``attend`` returns; where a layer is computed again, what it returned before."""
        known = None if self._kept is None else self._kept.next()
        if known is not None:
            attended: Attended = _Again.apply(q, k, v, *known)  # type: ignore[no-untyped-call]
            return attended
        o, lse = attend()
        if self._kept is not None:
            self._kept.add(o, lse)
        return o, lse

    def once(
        self, send: Callable[[], tuple[torch.Tensor, ...]], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What ``send`` makes of inputs, saving nothing for backward; nothing is sent again where a
        layer is computed again."""
        known = None if self._kept is None else self._kept.next()
        if known is not None:
            received: tuple[torch.Tensor, ...] = _Known.apply(len(inputs), *inputs, *known)  # type: ignore[no-untyped-call]
            return received
        received = send()
        if self._kept is not None:
            self._kept.add(*received)
        return received

    def random_state(self) -> list[torch.Tensor] | None:
        """Of every generator a layer may draw from; None where nothing is drawn."""
        if self._seed is None:
            return None
        return generator_states(self._gpus)

    def restore_random_state(self, state: list[torch.Tensor] | None) -> None:
        """Go on as if nobody else had drawn since :meth:`random_state`."""
        if state is not None:
            draw_from(state, self._gpus)


class _Kept:
    """What a layer's first run hands to its second, in the order in which it was made."""

    def __init__(self) -> None:
        self._made: list[list[torch.Tensor]] = []
        self._runs = self._taken = 0

    def start(self) -> None:
        """A run of the layer begins: the first one adds, others take."""
        self._runs += 1
        self._taken = 0

    def add(self, *tensors: torch.Tensor) -> None:
        self._made.append([x.detach() for x in tensors])

    def next(self) -> list[torch.Tensor] | None:
        """What stood at this place of the first run; None: this is the first run."""
        if self._runs == 1:
            return None
        self._taken += 1
        return self._made[self._taken - 1]


class _Known(torch.autograd.Function):
    """What was received before, in place of another exchange; its inputs say what has gradients."""

    @staticmethod
    def forward(ctx: Any, num_inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not views: those of one sequence get other strides, and products save what strides need.
        return tuple(x.detach() for x in tensors[num_inputs:])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("the graph of the second run is not used")


class _Again(torch.autograd.Function):
    """Attention in a layer that is computed again: saves what it saved before, computes nothing.

    Torch takes the tensors that the second run saves, in their order, for those of the first. A
    dispatch mode that leaves attention out (selective checkpointing) sees every operation of the
    layer from Python and takes longer than starting them.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Attended:
        ctx.save_for_backward(*tensors)  # q, k, v, o, lse
        return tensors[3].detach(), tensors[4].detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("the graph of the second run is not used")


def _seed_generators(seed: int, gpus: Sequence[torch.device]) -> None:
    """Seed what a layer may draw from.

    Not torch.manual_seed, which notes the seed, with a stack trace, for every backend that has not
    been started, and keeps it: for each layer of each chunk.
    """
    torch.default_generator.manual_seed(seed)
    for gpu in gpus:
        torch.cuda.default_generators[gpu.index].manual_seed(seed)


def levels_up_to(number: int) -> tuple[Recompute, ...]:
    """The first ``number`` of them, from the least."""
    known: tuple[Recompute, ...] = get_args(Recompute)
    return known[:number]


def levels_above(recompute: Any) -> tuple[Recompute, ...]:
    """Those that compute more again."""
    known: tuple[Recompute, ...] = get_args(Recompute)
    return known[known.index(recompute) + 1 :]


def levels_below(recompute: Recompute) -> tuple[Recompute, ...]:
    """Those that compute less again."""
    return levels_up_to(get_args(Recompute).index(recompute))


def most_of(wanted: Sequence[Recompute]) -> Recompute:
    """What ranks do that want this much: all the same, so that the bits of their sums are."""
    return max(wanted, key=get_args(Recompute).index)


def seed_of_rank(seed: int, rank: int) -> int:
    """Ranks of a sequence run other tokens and draw other numbers, whatever they were seeded with;
    the first draws what a process alone would."""
    return seed if rank == 0 else _layer_seed(seed, -rank, _OF_RANK)


def _layer_seed(seed: int, chunk: int, layer: int) -> int:
    key = hashlib.blake2b(f"{seed} {chunk} {layer}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") >> 1
