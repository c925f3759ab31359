"""Matrix products of fp32 on a CPU, through the faster of the two libraries that torch brings.

torch gives fp32 products to MKL. On AMD's processors MKL leaves AVX-512 alone, and oneDNN, which
torch brings too, is about twice as fast. The choice depends on the processor and the sizes, never
on a measurement, so equal calls have equal bits. Autograd does not see these products.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_LEAST_FLOPS = 2**24  # below, what starting oneDNN takes weighs more than what it gains
_MOST_WEIGHTS = 2**25  # oneDNN packs a copy of them, which no plan knows


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear``: [..., out] of x [..., in] and weight [out, in]."""
    if not _faster(x, weight, math.prod(x.shape[:-1])):
        return F.linear(x, weight, bias)
    y = _one_dnn(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def input_gradient(d_y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``d_y @ weight``: [..., in] of d_y [..., out] and weight [out, in]."""
    if not _faster(d_y, weight, math.prod(d_y.shape[:-1])):
        return d_y @ weight
    d_x = _one_dnn(d_y.reshape(-1, d_y.shape[-1]), weight.t(), None)
    return d_x.view(*d_y.shape[:-1], weight.shape[1])


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left.T @ right``; left [rows, out], right [rows, in], total [out, in]."""
    if left.dtype == right.dtype and _faster(left, total, left.shape[0]):
        total.add_(_one_dnn(left.t(), right.t(), None))
    else:
        total.addmm_(left.t(), right)


def _faster(x: torch.Tensor, weight: torch.Tensor, rows: int) -> bool:
    """Whether oneDNN takes a product of ``rows`` rows with a matrix like ``weight``."""
    plain = all(type(t) in (torch.Tensor, nn.Parameter) for t in (x, weight))
    if not plain or not x.dtype == weight.dtype == torch.float32:
        return False
    if x.device.type != "cpu" or weight.device.type != "cpu" or weight.numel() > _MOST_WEIGHTS:
        return False
    return 2 * rows * weight.numel() >= _LEAST_FLOPS and _mkl_is_slow() and _one_dnn_is_on()


def _one_dnn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, out] of x [rows, in] and weight [out, in], of any strides."""
    product: Any = torch.ops.mkldnn._linear_pointwise
    bias = None if bias is None else bias.contiguous()  # oneDNN reads it as if it were
    y: torch.Tensor = product(x, weight, bias, "none", [], "")
    return y


def _one_dnn_is_on() -> bool:
    """Users may switch it off (``torch.backends.mkldnn.flags``)."""
    return torch.backends.mkldnn.is_available() and bool(torch._C._get_mkldnn_enabled())


@cache
def _mkl_is_slow() -> bool:
    if not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return any("AuthenticAMD" in line for line in file)
    except OSError:
        return False
