"""Replicas of a model, each of which trains on sequences of its own: the sum of their gradients.

          cp ──▶
dp  │   rank 0   rank 1     share sequence a
    ▼   rank 2   rank 3     share sequence b
        ╰─ add ─╯╰─ … ─╯    ranks 0 and 2 add gradients, and so do 1 and 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from oomb.parallel.group import PATIENCE, TIMEOUT, Ranks
from oomb.parallel.mesh import DIMENSION
from oomb.parallel.sums import gradient_dtype, sum_in_rank_order
from oomb.parallel.whole import own_rows

T = TypeVar("T")


class Replicas:
    """The ranks of a job as replicas (``dp``) of neighbours that share a sequence (``cp``).

    Args:
        ranks: of the job; torch.distributed runs where there are several.
        sharing: how many share a sequence.
        device: where the gradients are.
        patience: of one collective of the replicas.

    Attributes:
        number: of replicas.
        own: this rank's among them.
        place: of this rank among those that share its sequence.
        mesh: of those that share this rank's sequence, for the engine; None: it is alone.

    Raises:
        ValueError: ``sharing`` does not divide the ranks.
    """

    def __init__(
        self, ranks: int, sharing: int, device: torch.device, patience: timedelta = TIMEOUT
    ) -> None:
        if ranks % sharing:
            raise ValueError(
                f"cp: expected a divisor of the job's {ranks} processes, got {sharing}"
            )
        self.sharing = sharing
        self.number = ranks // sharing
        self.own, self.place = divmod(dist.get_rank() if ranks > 1 else 0, sharing)
        self.mesh: DeviceMesh | None = None
        self._others: Ranks | None = None
        self._sharers: Ranks | None = None  # made where they are asked
        if ranks > 1:
            both = init_device_mesh(
                device.type, (self.number, sharing), mesh_dim_names=("dp", DIMENSION)
            )
            self.mesh = both[DIMENSION] if sharing > 1 else None
        if self.number > 1:
            self._others = Ranks(list(range(self.place, ranks, sharing)), device, patience)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around what replicas do together; an error of one is raised by all, or by none."""
        if self._others is None:
            yield
            return
        with self._others.call():
            yield
            self._others.settle(lambda: None)

    def add_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replace each ``param.grad`` by its sum over replicas; the same bits on each.

        A replica without a gradient that another has adds zeros. Inside :meth:`step`; after an
        error gradients are worth nothing.
        """
        if self._others is None:
            return
        has = self._others.collect(lambda: [p.grad is not None for p in parameters])
        reached = [p for p, its in zip(parameters, zip(*has, strict=True), strict=True) if any(its)]
        for parameter in reached:
            grad = parameter.grad
            if grad is None:
                grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            parameter.grad = grad.contiguous()
        grads = [own_rows(p.grad) for p in reached if p.grad is not None]
        sum_in_rank_order(self._others, [grad for grad in grads if grad.numel() > 0])

    def collect(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returned on each replica."""
        return [work()] if self._others is None else self._others.collect(work)

    def by_first(self, work: Callable[[], T]) -> T:
        """What ``work`` returned on the first rank of this replica, which alone does it; small.

        An error is raised by all ranks of the replica, which wait long.
        """
        if self.sharing == 1:
            return work()
        is_first = self.place == 0
        found: list[T | None] = self.sharers.collect(lambda: work() if is_first else None)
        return found[0]  # type: ignore[return-value]

    @property
    def sharers(self) -> Ranks:
        """Those that share this rank's sequence, on the host, who wait long."""
        if self._sharers is None:
            first = self.own * self.sharing
            members = list(range(first, first + self.sharing))
            self._sharers = Ranks(members, torch.device("cpu"), PATIENCE)
        return self._sharers

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[replicas * n, …]: rows [n, …] of each replica in turn, where they were; a number becomes
        a row.

        As it was given where there is one replica.
        """
        if self._others is None:
            return rows
        given = rows.reshape(1) if rows.ndim == 0 else rows
        parts = self._others.all_gather(given.to(self._others.device))
        return parts.flatten(0, 1).to(given.device)

    def close(self) -> None:
        """Leave the others."""
        for ranks in (self._others, self._sharers):
            if ranks is not None:
                ranks.close()
