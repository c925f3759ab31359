"""What a call asks of a model's weights; here each rank has all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

OnDone = Callable[[list[nn.Parameter]], object]
OnUse = Callable[[int], object]


class Weights:
    """Weights that are whole on every rank.

    Attributes:
        ranks: that share a parameter.
        gathered_bytes: of weights that the call under way, or the last, received from other ranks.
        scattered_bytes: of sums of gradients, likewise.
        num_bytes: of all that is shards, when it is whole.
    """

    is_sharded = False
    num_bytes = 0
    ranks = 1
    gathered_bytes = 0
    scattered_bytes = 0

    def begin(self, afterwards: Callable[[Callable[[], object]], None]) -> None:
        """Until what is handed to ``afterwards`` is called the model looks whole; nothing is sent.

        Its classes, hooks and parameters are those of an ordinary model.
        """

    def gather(
        self,
        afterwards: Callable[[Callable[[], object]], None],
        on_done: OnDone | None = None,
        on_use: OnUse | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        """As :meth:`begin`, and weights are there when a module runs.

        Args:
            on_done: told the parameters of a layer when a backward is done with it, where their
                sums shall not wait for the call's end.
            on_use: told which layer is gathered, before it is; the others then :meth:`pass_by`.
            at_once: layers too are whole from here on, under any policy.
        """

    def pass_by(self, layer: int) -> None:
        """Gather and release a layer that another rank runs, inside :meth:`gather`."""

    def know_layers(self, layers: Sequence[nn.Module]) -> None:
        """Which modules run one after the other; before any :meth:`gather`."""

    def is_shard(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter as of :meth:`plain` stands for one of which a rank has a shard."""
        return False

    def sum_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Of the part of a parameter's sum that this rank keeps; as of :meth:`plain` or not."""
        return parameter.shape

    def plain(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """What runs in place of the user's parameters."""
        return list(parameters)

    def scatter(
        self, parameters: Sequence[nn.Parameter], sums: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """This rank's shards of sums over all ranks.

        Args:
            parameters: as of :meth:`plain`.
            sums: whole, of this rank alone.
        """
        raise AssertionError("whole weights have no shards")

    def shard_like(self, parameter: nn.Parameter, shard: torch.Tensor) -> torch.Tensor:
        """A shard as the user's parameter is one."""
        return shard

    def held(self, parameters: Sequence[nn.Parameter], sizes: Sequence[int]) -> int:
        """Bytes of sums that this rank holds at most at a time.

        Args:
            sizes: bytes of each parameter's whole sum.
        """
        return sum(sizes)

    def to_come(self, *, begun: bool) -> int:
        """Bytes of gathered weights for which a call has yet to find room.

        Args:
            begun: inside :meth:`gather`.
        """
        return 0
