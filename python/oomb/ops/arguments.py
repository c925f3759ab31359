"""Checks of what an operation is given; each raises ``ValueError`` before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import NoReturn

import torch

MOST = 2**30  # tokens, pages: kernels count in 32 bits
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def refuse(argument: str, expected: str, got: object) -> NoReturn:
    """Raise ValueError about an argument."""
    raise ValueError(f"{argument}: expected {expected}, got {got}")


def check_tensor(
    argument: str,
    value: object,
    shape: Sequence[int | str],
    *,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """A tensor of a shape, one of some dtypes, on a device.

    Args:
        shape: sizes; a name stands for any size.
        device: None: any.
    """
    if not isinstance(value, torch.Tensor):
        refuse(argument, f"a tensor {_text(shape)}", type(value).__name__)
    fits = value.ndim == len(shape) and all(
        isinstance(size, str) or size == there
        for size, there in zip(shape, value.shape, strict=True)
    )
    if not fits:
        refuse(argument, _text(shape), list(value.shape))
    if value.dtype not in dtypes:
        refuse(argument, " or ".join(map(str, dtypes)), value.dtype)
    if device is not None and value.device != device:
        refuse(argument, f"device {device}", value.device)


def expect_no_gradient(argument: str, written: torch.Tensor) -> None:
    """A tensor that is written in place, behind autograd's back."""
    if written.requires_grad:
        refuse(argument, "no requires_grad, as no gradient reaches it", "a tensor with it")


def _text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def check_indices(
    argument: str, value: object, shape: Sequence[int | str], device: torch.device
) -> None:
    """An int32 tensor of a shape on a device."""
    check_tensor(argument, value, shape, dtypes=(torch.int32,), device=device)


def check_int(argument: str, value: object, least: int, most: int = MOST) -> int:
    """A whole number in [least, most], as Python's own."""
    if isinstance(value, torch.SymInt):  # while a program is traced
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        refuse(argument, f"an int >= {least}", repr(value))
    number = int(value)
    if number > most:
        refuse(argument, f"an int <= {most}", number)
    return number


def is_finite(value: object) -> bool:
    """A real number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def check_slots(argument: str, slots: torch.Tensor, num_slots: int, least: int) -> None:
    """Slots that all lie in [least, num_slots). Synchronises with a GPU."""
    check_range(argument, slots, least, num_slots, "slots")


def check_range(
    argument: str, values: torch.Tensor, low: int, high: int, what: str = "values"
) -> None:
    """Values that all lie in [low, high). Synchronises with a GPU."""
    if values.numel():
        least, most = (int(x) for x in torch.aminmax(values))
        if least < low or most >= high:
            refuse(argument, f"{what} in [{low}, {high})", f"{least} … {most}")


def check_once(argument: str, slots: torch.Tensor, remedy: str = "") -> None:
    """Slots to be written, -1 for none, each given once. Synchronises with a GPU.

    Args:
        remedy: ends the text.
    """
    written = slots[slots >= 0].sort().values
    twice = written[1:][written[1:] == written[:-1]]
    if twice.numel():
        refuse(argument, "each slot once, as it is written", f"slot {int(twice[0])} twice{remedy}")
