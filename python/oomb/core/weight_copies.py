"""What a call has fetched of weights that the host keeps, and how long compute waited for them."""

from __future__ import annotations

from typing import Any

from oomb.core.stopwatch import Stopwatch
from oomb.model.causal import CausalModel


class WeightCopies:
    """Counts from when it is made.

    Args:
        model: whose weights may be on the host.
    """

    def __init__(self, model: CausalModel) -> None:
        self._weights = model.host_weights
        self._waits = Stopwatch()
        self._before = 0
        if self._weights is not None:
            self._before = self._weights.loaded_bytes
            self._weights.stopwatch = self._waits

    def stats(self) -> dict[str, Any]:
        """Of :class:`oomb.results.Stats`; a GPU has to be done with the call."""
        if self._weights is None:
            return {}
        return {
            "fetched_weight_bytes": self._weights.loaded_bytes - self._before,
            "exposed_weight_seconds": self._waits.total,
        }
