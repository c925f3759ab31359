"""Multiprocessors of a GPU that matrix products leave to kernels beside them.

A product holds those that it begins with to its end. So a copy that comes a moment later waits for
it, unless cuBLAS is told to take fewer.

    all are taken   [ product           ]          8 are left   [ product             ]
                    waits …             [ copy ]                [ copy ]
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# Of all: 8 of an H200's 132. Exchanges of a layer's gradients fit beside a product of its MLP then.
_SHARE = 16


def processors_left(device: torch.device) -> int:
    """Multiprocessors that products leave, where they leave some."""
    return max(1, _all_of(device) // _SHARE)


def leave_processors(device: torch.device) -> Callable[[], None]:
    """Products that this thread starts from now on leave some multiprocessors to others.

    Returns:
        What ends it, from any thread.
    """
    cublas = _cublas()
    if cublas is None:
        return lambda: None
    with torch.cuda.device(device):
        handle, before = ctypes.c_void_p(torch.cuda.current_blas_handle()), ctypes.c_int()
    cublas.cublasGetSmCountTarget(handle, ctypes.byref(before))
    taken = _all_of(device) - processors_left(device)
    if before.value:  # 0: all
        taken = min(taken, before.value)
    cublas.cublasSetSmCountTarget(handle, ctypes.c_int(taken))
    return lambda: cublas.cublasSetSmCountTarget(handle, before)


def _all_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _cublas() -> Any:
    """The library that torch has loaded; None: it has none that can be told."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    return library if hasattr(library, "cublasSetSmCountTarget") else None
