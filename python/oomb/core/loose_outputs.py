"""Kept outputs in torch's memory, a block per chunk, which goes back when its chunk is swept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from oomb.core.kept_outputs import KeptOutputs

_Output = tuple[torch.Tensor, torch.Tensor]  # o and lse


@dataclass
class _Block:
    """Memory of a chunk's outputs, which its layers fill one after the other."""

    memory: _Output
    used: list[int] = field(default_factory=lambda: [0, 0])


class LooseOutputs:
    """Takes outputs from the fill, and gives each to the sweep once.

    The outputs of a chunk lie side by side in one block, so that torch gets its room back whole
    and can give it to whatever an earlier chunk keeps:

        block  [ o of layer 0 | o of layer 1 | … ]   and one of the log-sum-exps
    """

    def __init__(self, outputs: KeptOutputs) -> None:
        self._outputs = outputs
        self._filling: dict[int, _Block] = {}
        self._held: dict[tuple[int, int], _Output] = {}

    def keep(self, chunk: int, layer: int, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Copy an output, o [B, H, C, D] and lse [B, H, C]."""
        if chunk not in self._filling:
            self._filling[chunk] = _Block(self._memory(chunk, o, lse))
        block = self._filling[chunk]
        held = []
        for part, source in enumerate((o.transpose(1, 2), lse)):  # o with its tokens first
            begin = block.used[part]
            block.used[part] += source.numel()
            place = block.memory[part][begin : block.used[part]].view(source.shape)
            held.append(place.copy_(source))
        self._held[chunk, layer] = held[0].transpose(1, 2), held[1]
        if block.used[0] == block.memory[0].numel():  # the outputs alone hold it from here on
            del self._filling[chunk]

    def take(self, chunk: int, layer: int) -> _Output:
        """What was kept; the caller has it alone."""
        o, lse = self._held.pop((chunk, layer))
        return o.detach(), lse.detach()  # autograd knows of no block that they are views of

    def clear(self) -> None:
        """Nothing is held any more."""
        self._filling.clear()
        self._held.clear()

    def _memory(self, chunk: int, o: torch.Tensor, lse: torch.Tensor) -> _Output:
        kept, outputs = self._outputs.kept[chunk], self._outputs
        o_bytes, lse_bytes = (
            sum(size for size, is_kept in zip(sizes, kept, strict=True) if is_kept)
            for sizes in (outputs.o_bytes, outputs.lse_bytes)
        )
        return o.new_empty(o_bytes // o.itemsize), lse.new_empty(lse_bytes // lse.itemsize)
