"""Where a call first meets a number that is not finite (``Config.check_finite``)."""

from __future__ import annotations

import torch

from oomb.errors import Error


def expect_finite(what: str, *tensors: torch.Tensor, chunk: int, layer: int | None = None) -> None:
    """Raise unless every element is finite. Synchronises with a GPU.

    Raises:
        Error: the text names ``what``, the chunk and the layer.
    """
    if all(bool(tensor.isfinite().all()) for tensor in tensors):
        return
    where = f"chunk {chunk}" if layer is None else f"chunk {chunk}, layer {layer}"
    raise Error(f"{where}: {what} is not finite")
