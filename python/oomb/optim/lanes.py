"""Copies between a device and the host's memory beside what is computed: a lane each way."""

from __future__ import annotations

from typing import Any

import torch


class Lanes:
    """Copies between the tiers beside what is computed; on a CPU, where one is done when it has
    begun."""

    def load(self, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Begin to copy to the device; what :meth:`wait` takes comes back with the copies."""
        return [source.clone() for source in sources], None

    def store(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Begin to copy to the host, behind all that compute has been given so far."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def wait(self, batch: Any) -> None:
        """Let compute go on when a batch is done."""

    def finish(self) -> None:
        """Return when all is copied."""


class LanesBeside(Lanes):
    """On a GPU: a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loads, self._stores = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def load(self, sources: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        # Made for compute's stream: whoever drops them has let that one wait for their copies.
        there = [torch.empty_like(source, device=self._device) for source in sources]
        return there, self._copied(self._loads, there, sources)

    def store(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        return self._copied(self._stores, targets, sources)

    def wait(self, batch: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(batch)

    def finish(self) -> None:
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._loads)
        compute.wait_stream(self._stores)
        self._stores.synchronize()  # the host may read them now

    def _copied(
        self, stream: torch.cuda.Stream, to: list[torch.Tensor], of: list[torch.Tensor]
    ) -> Any:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, source in zip(to, of, strict=True):
                target.copy_(source, non_blocking=True)
            return stream.record_event()
