"""Memory of the device tier as a torch tensor, for what no kernel of ours does with pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class _Bytes:
    """Bytes at an address, in the words of NumPy's and CUDA's array interfaces."""

    def __init__(self, address: int, number: int, device: torch.device) -> None:
        described: dict[str, Any] = {
            "data": (address, False),
            "shape": (number,),
            "typestr": "|u1",
            "version": 3,
        }
        if device.type == "cuda":
            self.__cuda_array_interface__ = described
        else:
            self.__array_interface__ = described


def rows_at(
    address: int, rows: int, row_bytes: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[rows, elements of a row]: a view of memory that somebody else owns, valid as long as that.

    On a GPU memory need not be mapped where nobody reads or writes.
    """
    memory: Any = _Bytes(address, rows * row_bytes, device)
    if device.type == "cuda":
        flat = torch.as_tensor(memory, device=device)
    else:
        flat = torch.from_numpy(np.asarray(memory))
    return flat.view(dtype).view(rows, -1)
