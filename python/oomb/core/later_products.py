"""Products of weight gradients that are computed while ranks exchange what comes next.

The backward of a layer whose last linear layers before attention are up_proj and o_proj:

    linear layers   up: d_x     o: d_x                     q k v: d_x and d_W
    exchanges                          [ d_o  ]              [ dq dk dv ]
    attention                                    backward
    beside them                        [ up: d_W ]           [ o: d_W   ]

So the two products of a layer that are asked for last wait, and hold their inputs until then. The
others do not: they would hold them while a layer holds most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from oomb.model.linear import WeightSums
from oomb.model.swap import Swaps
from oomb.parallel.placement import Placement

_EXCHANGES = 2  # of a layer's backward


class LaterProducts:
    """Adds products to sums of a call, each parameter's in the order in which they are asked for.

    Args:
        sums: take them, and all else.
    """

    def __init__(self, sums: WeightSums) -> None:
        self._sums = sums
        self._last: deque[nn.Parameter] = deque(maxlen=_EXCHANGES)  # since an exchange
        self._wait: set[nn.Parameter] = set()
        self._waiting: deque[Callable[[], None]] = deque()

    def takes(self, weight: torch.Tensor) -> bool:
        """As of :class:`~oomb.model.linear.WeightSums`, like what follows."""
        return self._sums.takes(weight)

    def add_product(
        self, parameter: nn.Parameter, left: torch.Tensor, right: torch.Tensor, first: int = 0
    ) -> None:
        self._last.append(parameter)
        work = partial(self._sums.add_product, parameter, left, right, first)
        if parameter not in self._wait:
            work()
            return
        self._waiting.append(work)
        if len(self._waiting) > _EXCHANGES:  # an exchange did not come
            self._waiting.popleft()()

    def add_rows(self, parameter: nn.Parameter, rows: torch.Tensor, values: torch.Tensor) -> None:
        self._sums.add_rows(parameter, rows, values)

    def beside(self, placement: Placement) -> Swaps:
        """While active, exchanges of gradients have products to do meanwhile."""

        def begin(swaps: Swaps) -> None:
            swaps.afterwards(self._waiting.clear)
            swaps.afterwards(partial(placement.meanwhile, None))
            placement.meanwhile(self._next)

        return Swaps(begin)

    @torch.no_grad()
    def finish(self) -> None:
        """Add all that waits."""
        self._last.clear()
        while self._waiting:
            self._waiting.popleft()()

    def _next(self) -> None:
        """During an exchange: add what has waited longest. Those asked for last before it wait from
        now on."""
        self._wait.update(self._last)
        self._last.clear()
        if self._waiting:
            self._waiting.popleft()()
