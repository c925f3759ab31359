"""Messages between GPUs of one host, whose processes write into one another's memory.

    rank 0   copies into rank 1's memory   sets a flag there, waits for its own   copies out
    rank 1   copies into rank 0's memory   sets a flag there, waits for its own   copies out

Three kernels make an exchange, with no library's host work between. The one that waits ends where a
rank fails. NCCL carries the messages where processes cannot reach each other's memory, or
``NCCL_P2P_DISABLE=1`` says that they must not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch

from oomb import _C
from oomb.errors import Error
from oomb.parallel.peers import place_of_this
from oomb.parallel.product_processors import leave_processors

_LEAST_BYTES, _MOST_BYTES = 8 * 2**20, 256 * 2**20  # of one exchange; there is room for two
_MOST_RANKS, _MOST_PIECES = 16, 32  # of which kernels are told

Tensors = tuple[torch.Tensor, ...]
Collect = Callable[[Callable[[], Any]], list[Any]]
Measured = Callable[[], AbstractContextManager[None]]
T = TypeVar("T")


class PeerCopies:
    """Of the ranks of one group; each asks for the same exchanges in the same order.

    Memory that other processes have reached is not freed while this one lives, since they may close
    it later: the next group takes it over.

    Args:
        collect: what work returns on each rank, which all do.
        timeout: of one wait.
    """

    _reached: ClassVar[list[Any]] = []
    _unused: ClassVar[list[Any]] = []
    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(
        self, device: torch.device, rank: int, size: int, collect: Collect, timeout: timedelta
    ) -> None:
        self._device = device
        self._rank = rank
        self._size = size
        self._collect = collect
        self._timeout = timeout
        self._exchange: Any = None
        self._own_stream: torch.cuda.Stream | None = None
        self._is_aside = False
        self._refused = size > _MOST_RANKS

    def all_to_all(
        self,
        send: torch.Tensor,
        send_sizes: list[int],
        received: torch.Tensor,
        received_sizes: list[int],
        largest: int,
        *,
        same_to_all: bool = False,
    ) -> bool:
        """Messages to and from each rank, in elements of flat tensors; False: nothing was done.

        Args:
            largest: at least the size of every message between two ranks; the same on all of them.
            same_to_all: all of ``send`` goes to each.
        """
        item = send.element_size()
        if not self.has_room(largest * item):
            return False
        self._exchange.all_to_all(
            send=send.data_ptr(),
            send_bytes=[size * item for size in send_sizes],
            received=received.data_ptr(),
            received_bytes=[size * item for size in received_sizes],
            rank=self._rank,
            message_bytes=largest * item,
            same_to_all=same_to_all,
            stream=self._stream,
        )
        self.expect_in_time()
        return True

    def aside(
        self, start: Callable[[], T | None], meanwhile: Callable[[], object], measured: Measured
    ) -> T | None:
        """Exchanges that ``start`` asks for, and what it returns; the stream waits for them after
        other work.

            stream    … what is sent     meanwhile …                  ▸ what has come …
            aside                        copies in   meeting   copies out

        Products meanwhile leave multiprocessors to the copies.

        What is sent and what comes has to stay alive until then. None: ``start`` has asked for
        nothing, and nothing else was done.

        Args:
            measured: around the wait.
        """
        stream, own = torch.cuda.current_stream(self._device), self._behind_current()
        self._is_aside = True
        try:
            started = start()
            self._is_aside = False
            if started is not None:
                take_back = leave_processors(self._device)
                try:
                    meanwhile()
                finally:
                    take_back()
            return started
        finally:  # whatever fails: memory that is written is not given to others before
            self._is_aside = False
            with measured():
                stream.wait_stream(own)

    def _behind_current(self) -> torch.cuda.Stream:
        """A stream of its own, behind what the current one was given so far."""
        if self._own_stream is None:
            # Blocks of its kernels go first, where those of a product leave room.
            if self._device not in self._streams:
                self._streams[self._device] = torch.cuda.Stream(self._device, priority=-1)
            self._own_stream = self._streams[self._device]
        self._own_stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._own_stream

    @staticmethod
    def adds_up(dtype: torch.dtype) -> bool:
        """Whether :meth:`add_up` takes values of a dtype."""
        return dtype in (torch.float32, torch.bfloat16)

    def add_up(self, flat: torch.Tensor, blocks: int = 0) -> bool:
        """Replace a tensor by its sum over ranks, as
        :func:`~oomb.parallel.in_order.added_in_order` has it; False: nothing was done.

        Args:
            flat: as of :func:`~oomb.parallel.buckets.add_up_in_buckets`.
            blocks: of threads, which no kernel has more of; 0: as many as help.
        """
        part = flat.nbytes // self._size
        if part == 0 or not self.adds_up(flat.dtype) or not self.has_room(part):
            return False
        self._exchange.sum(
            parts=flat.data_ptr(),
            bytes=part,
            dtype=str(flat.dtype).removeprefix("torch."),
            blocks=blocks,
            stream=self._stream,
        )
        self.expect_in_time()
        return True

    def gather(self, x: torch.Tensor, parts: torch.Tensor) -> bool:
        """A tensor of each rank, [ranks, …], of equal shapes; False: nothing was done."""
        sizes = [x.numel()] * self._size
        return self.all_to_all(x, sizes, parts, sizes, x.numel(), same_to_all=True)

    def to_heads(
        self, tensors: Tensors, tokens: list[int], message: int, received: torch.Tensor
    ) -> bool:
        """Each rank gets its share of the heads, of all tokens; False: nothing was done.

        Args:
            tensors: [B, heads, at least the own tokens, D] each, in any order of memory.
            tokens: of each rank.
            message: elements of the largest message between two ranks.
            received: [tokens of all, B, heads of a rank of all tensors, D].
        """
        if not self._takes(tensors) or not self.has_room(message * received.element_size()):
            return False
        self._exchange.to_heads(
            tensors=[_view(x) for x in tensors],
            received=received.data_ptr(),
            **self._messages(tensors[0], tokens, message),
        )
        self.expect_in_time()
        return True

    def to_tokens(
        self, tensors: Tensors, tokens: list[int], message: int, results: list[torch.Tensor]
    ) -> bool:
        """The way back: each rank gets its tokens, of all heads; False: nothing was done.

        Args:
            tensors: [B, heads of a rank, tokens of all, D] each, in any order of memory.
            results: [B, heads, at least the own tokens, D], likewise.
        """
        takes = self._takes(tensors) and self._takes(tuple(results))
        if not takes or not self.has_room(message * tensors[0].element_size()):
            return False
        self._exchange.to_tokens(
            tensors=[_view(x) for x in tensors],
            results=[_view(x) for x in results],
            **self._messages(tensors[0], tokens, message),
        )
        self.expect_in_time()
        return True

    @property
    def _stream(self) -> int:
        """Of the next exchange, which comes behind all earlier ones."""
        own, current = self._own_stream, torch.cuda.current_stream(self._device)
        if self._is_aside and own is not None:
            current = own
        handle: int = current.cuda_stream
        return handle

    def _takes(self, tensors: Tensors) -> bool:
        """Whether kernels can move their heads as they are; messages are the same if not."""
        few = self._size * len(tensors) <= _MOST_PIECES
        return few and all(x.stride(-1) == 1 and x.dtype == tensors[0].dtype for x in tensors)

    def _messages(self, x: torch.Tensor, tokens: list[int], message: int) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "rank": self._rank,
            "batch": x.shape[0],
            "row_bytes": x.shape[-1] * x.element_size(),
            "message_bytes": message * x.element_size(),
            "stream": self._stream,
        }

    def expect_in_time(self) -> None:
        """Raise where a rank has waited too long; what it has received since is undefined."""
        if self._exchange is not None and self._exchange.timed_out:
            raise TimeoutError(f"no answer within {self._timeout}")

    def abort(self) -> None:
        """From any thread: whoever waits here is freed."""
        exchange = self._exchange
        if exchange is not None:
            exchange.abort()

    def close(self) -> None:
        """No exchange will come. Waits for those under way."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        torch.cuda.synchronize(self._device)
        exchange.disconnect()
        self._unused.append(exchange)

    def has_room(self, message_bytes: int) -> bool:
        """Whether messages of so many bytes fit; all ranks together make room where they can."""
        needed = self._size * (-(-message_bytes // 16) * 16)
        if self._refused or needed > _MOST_BYTES:
            return False
        if self._exchange is None or self._exchange.side_bytes < needed:
            self._connect(max(_LEAST_BYTES, 1 << (needed - 1).bit_length()))
        return self._exchange is not None

    def _connect(self, side_bytes: int) -> None:
        self.close()

        def begin() -> tuple[tuple[str, str], bytes | None]:
            host, processes, _ = place_of_this()
            return (host, processes), self._begin(side_bytes)

        def connect() -> bool:
            hosts, handles = zip(*begun, strict=True)
            if None in handles or len(set(hosts)) > 1:
                return False
            with suppress(Error):  # no way between the GPUs, or between the processes
                self._exchange.connect(rank=self._rank, handles=list(handles))
                return True
            return False

        self._collect(lambda: torch.cuda.synchronize(self._device))  # nobody writes any more
        begun = self._collect(begin)
        self._refused = not all(self._collect(connect))
        if self._refused:
            self.close()

    def _begin(self, side_bytes: int) -> bytes | None:
        """What others reach this GPU's memory by; None: they cannot."""
        if _forbidden():
            return None
        with suppress(Error):
            try:
                self._exchange = self._room(side_bytes)
            except Error:
                torch.cuda.empty_cache()  # torch may hold what is missing
                self._exchange = self._room(side_bytes)
            seconds = self._timeout.total_seconds()
            return bytes(self._exchange.begin(timeout_seconds=seconds))
        return None

    def _room(self, side_bytes: int) -> Any:
        """Memory of that size alone: each rank writes, and asks for more, as if all had as much."""
        given = self._device.index
        index = torch.cuda.current_device() if given is None else given
        for found in self._unused:
            if (found.device, found.side_bytes) == (index, side_bytes):
                self._unused.remove(found)
                return found
        made = _C.PeerExchange(device=index, side_bytes=side_bytes)
        self._reached.append(made)
        return made


def _view(x: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Address; bytes between tokens, sequences and heads of [B, heads, tokens, D]; heads."""
    item = x.element_size()
    batch, heads, tokens, _ = (stride * item for stride in x.stride())
    return x.data_ptr(), tokens, batch, heads, x.shape[1]


def _forbidden() -> bool:
    """Whether the user says, as one does to NCCL, that GPUs must not reach each other's memory."""
    return os.environ.get("NCCL_P2P_DISABLE", "0") != "0"
