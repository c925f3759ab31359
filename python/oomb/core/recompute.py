"""How a decoder layer runs inside a chunk: seeded, and recomputed in backward where asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Attended = tuple[torch.Tensor, torch.Tensor]  # o and lse


class LayerRunner:
    """Runs layers so that fill, sweep and recompute draw the same random numbers.

    With ``recompute`` a layer keeps its input and attention's output; the rest is computed again in
    backward.

    Args:
        seed: of the call; None: layers draw nothing.
        gpus: from whose generators they may draw, beside the CPU's.
    """

    def __init__(
        self, *, recompute: bool, seed: int | None, gpus: Sequence[torch.device] = ()
    ) -> None:
        self._recompute = recompute
        self._seed = seed
        self._gpus = gpus
        self._kept: list[torch.Tensor] | None = None  # of the layer that runs; None: nothing is
        self.chunk = 0

    def __call__(
        self,
        layer: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        seed = None if self._seed is None else _layer_seed(self._seed, self.chunk, layer)

        def run(*inputs: Any) -> Any:
            if seed is not None:
                _seed_generators(seed, self._gpus)
            return forward(*inputs, **keywords)

        if not (self._recompute and torch.is_grad_enabled()):
            return run(*args)
        kept: list[torch.Tensor] = []  # filled by the first run, used by the second

        def run_keeping(*inputs: Any) -> Any:
            self._kept = kept
            try:
                return run(*inputs)
            finally:
                self._kept = None

        return checkpoint(run_keeping, *args, use_reentrant=False, preserve_rng_state=False)

    def attention(
        self, attend: Callable[[], Attended], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Attended:
        """What ``attend`` returns; where a layer is computed again, what it returned before."""
        if self._kept:
            attended: Attended = _Again.apply(q, k, v, *self._kept)  # type: ignore[no-untyped-call]
            return attended
        o, lse = attend()
        if self._kept is not None:
            self._kept += [o.detach(), lse.detach()]
        return o, lse

    def random_state(self) -> list[torch.Tensor] | None:
        """Of every generator a layer may draw from; None where nothing is drawn."""
        if self._seed is None:
            return None
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in self._gpus)]

    def restore_random_state(self, state: list[torch.Tensor] | None) -> None:
        """Go on as if nobody else had drawn since :meth:`random_state`."""
        if state is None:
            return
        torch.set_rng_state(state[0])
        for gpu, of_gpu in zip(self._gpus, state[1:], strict=True):
            torch.cuda.set_rng_state(of_gpu, gpu)


class _Again(torch.autograd.Function):
    """Attention in a layer that is computed again: saves what it saved before, computes nothing.

    Torch takes the tensors that the second run saves, in their order, for those of the first. A
    dispatch mode that leaves attention out (selective checkpointing) sees every operation of the
    layer from Python and takes longer than starting them.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> Attended:
        ctx.save_for_backward(*tensors)  # q, k, v, o, lse
        return tensors[3].view_as(tensors[3]), tensors[4].view_as(tensors[4])

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


def _layer_seed(seed: int, chunk: int, layer: int) -> int:
    key = hashlib.blake2b(f"{seed} {chunk} {layer}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") >> 1
