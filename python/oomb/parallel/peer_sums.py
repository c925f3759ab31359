"""Sums over GPUs of one host that go on beside other work.

    stream   products, which leave some multiprocessors …      ▸ join
    sums     [ tensors of layer 5 ][ of layer 4 ] …

They have memory of their own to meet in, so that exchanges of the stream need not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from oomb.parallel.buckets import add_up_in_buckets, bucket_bytes
from oomb.parallel.peer_copies import PeerCopies
from oomb.parallel.product_processors import leave_processors, processors_left

_BLOCKS = 2  # of threads, on a multiprocessor


class PeerSums:
    """Of the ranks of one group; each begins the same ones in the same order.

    Args:
        copies: nobody else's.
    """

    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self, device: torch.device, size: int, copies: PeerCopies) -> None:
        self._device = device
        self._size = size
        self._copies = copies
        self._take_back: Callable[[], None] | None = None

    def begin(self, tensors: list[torch.Tensor]) -> bool:
        """Replace tensors by their sums over ranks, until :meth:`join`; False: nothing was done.

        Nobody touches them before, and memory that they need is the sums' own until then.
        """
        taken = all(self._copies.adds_up(x.dtype) for x in tensors)
        if not taken or not self._copies.has_room(bucket_bytes(self._size) // self._size):
            return False
        if self._take_back is None:
            self._take_back = leave_processors(self._device)
        if self._device not in self._streams:
            self._streams[self._device] = torch.cuda.Stream(self._device)
        own = self._streams[self._device]
        own.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(own):
            add_up_in_buckets(tensors, self._size, self._add_up)
        return True

    def join(self) -> None:
        """The stream waits for all sums that have begun. Nothing is raised."""
        if self._take_back is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[self._device])
        self._end()

    def expect_in_time(self) -> None:
        """As of :class:`~oomb.parallel.peer_copies.PeerCopies`, like what follows."""
        self._copies.expect_in_time()

    def abort(self) -> None:
        self._copies.abort()

    def close(self) -> None:
        self._end()
        self._copies.close()

    def _add_up(self, flat: torch.Tensor) -> None:
        blocks = _BLOCKS * processors_left(self._device)
        done = self._copies.add_up(flat, blocks) or flat.numel() == 0
        assert done, "of tensors that have begun to be added up the others are added up too"

    def _end(self) -> None:
        take_back, self._take_back = self._take_back, None
        if take_back is not None:
            take_back()
