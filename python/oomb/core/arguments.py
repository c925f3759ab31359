"""Checks of a call's tensors; each raises ``ValueError`` with what was expected and what came."""

from __future__ import annotations

import torch


def expect(ok: bool, argument: str, expected: str, got: object) -> None:
    """Refuse an argument unless ``ok``."""
    if not ok:
        raise ValueError(f"{argument}: expected {expected}, got {got}")


def kind_of(value: object) -> str:
    """``"str"``, or ``"the class Config"`` where an instance was meant."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_callable(argument: str, value: object) -> None:
    """A function, or None."""
    expect(value is None or callable(value), argument, "a function or None", repr(value))


def check_tokens(
    argument: str, value: object, device: torch.device, shape: tuple[int, int] | None = None
) -> None:
    """[batch, tokens] int64 on ``device``."""
    check_tensor(argument, value, device)
    assert isinstance(value, torch.Tensor)
    expect(value.dtype == torch.int64, argument, "dtype torch.int64", value.dtype)
    expect(value.ndim == 2, argument, "shape [batch, tokens]", tuple(value.shape))
    if shape is not None:
        expect(tuple(value.shape) == shape, argument, f"shape {shape}", tuple(value.shape))


def check_tensor(argument: str, value: object, device: torch.device) -> None:
    """A tensor on the model's device."""
    expect(isinstance(value, torch.Tensor), argument, "a tensor", type(value).__name__)
    assert isinstance(value, torch.Tensor)
    fits = value.device == device
    expect(fits, argument, f"the model's device {device}", value.device)


def check_range(argument: str, values: torch.Tensor, low: int, high: int) -> None:
    """All in [low, high)."""
    if values.numel():
        least, most = (int(x) for x in torch.aminmax(values))
        expect(
            low <= least and most < high,
            argument,
            f"values in [{low}, {high})",
            f"{least} … {most}",
        )
