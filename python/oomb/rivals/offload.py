"""Layer inputs in pinned host memory, copied there and back beside compute."""

from __future__ import annotations

from types import TracebackType

import torch


class OffloadedInputs:
    """One tensor per layer; stored in forward order, fetched in reverse. Copies have own streams.

    While a layer is propagated back, the input of the one before is on its way.

    Args:
        shape: of one layer's input.
    """

    def __init__(
        self, num_layers: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros((num_layers, *shape), dtype=dtype)  # touched by many threads
        self._coming: dict[int, torch.Tensor] = {}
        if self._on_gpu:
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
            _check(torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), self.nbytes, 0))

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return self._host.nbytes

    def put(self, layer: int, x: torch.Tensor) -> None:
        """Start storing a layer's input; ``x`` may be freed right away."""
        if not self._on_gpu:
            self._host[layer].copy_(x)
            return
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            self._host[layer].copy_(x, non_blocking=True)
        x.record_stream(self._out)

    def get(self, layer: int) -> torch.Tensor:
        """A layer's input, on the device; starts fetching the one before."""
        if not self._on_gpu:
            return self._host[layer].clone()
        self._fetch(layer)
        x = self._coming.pop(layer)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._in)
        x.record_stream(compute)
        if layer > 0:
            self._fetch(layer - 1)
        return x

    def _fetch(self, layer: int) -> None:
        if layer in self._coming:
            return
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            self._coming[layer] = self._host[layer].to(self._device, non_blocking=True)

    def __enter__(self) -> OffloadedInputs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._coming.clear()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            _check(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))


def _check(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise MemoryError(f"pinned host memory: the driver refused it (error {code})")
