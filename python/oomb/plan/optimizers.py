"""Memory of the optimizers that the stock trainer offers by name (``optim=``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerUse:
    """Bytes of an optimizer.

    Attributes:
        device_bytes: state on the device, for as long as the run.
        host_bytes: state that lives in host memory or may be paged to it.
        step_bytes: further memory while it steps.
    """

    device_bytes: int
    host_bytes: int
    step_bytes: int


# name: (states per value, bytes of a value of state; None: as the parameter's)
_STATES: dict[str, tuple[int, float | None]] = {
    "adamw_torch": (2, None),
    "adamw_torch_fused": (2, None),
    "sgd": (0, None),
    "adagrad": (1, None),
    "rmsprop": (1, None),
    "adamw_bnb_8bit": (2, 1.02),
    "adamw_8bit": (2, 1.02),
    "lion_8bit": (1, 1.02),
    "lion_32bit": (1, 4.0),
    "paged_adamw_32bit": (2, 4.0),
    "paged_adamw_8bit": (2, 1.02),
    "paged_lion_32bit": (1, 4.0),
    "paged_lion_8bit": (1, 1.02),
    "adafactor": (0, None),  # a row and a column per matrix
}
OPTIMIZERS = tuple(_STATES)


def optimizer_use(name: str, parameters: Sequence[torch.nn.Parameter]) -> OptimizerUse:
    """Memory of an optimizer over ``parameters`` (which may be without values).

    Raises:
        ValueError: an optimizer that is not known here.
    """
    if name not in _STATES:
        raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {name!r}")
    states, size = _STATES[name]
    state = sum(int(states * p.numel() * (size or p.element_size())) for p in parameters)
    if name == "adafactor":
        state = sum(4 * (p.numel() if p.ndim < 2 else sum(p.shape)) for p in parameters)
    largest = max((p.numel() * max(4, p.element_size()) for p in parameters), default=0)
    all_values = sum(p.numel() * p.element_size() for p in parameters)
    step = {"adamw_torch_fused": 0, "adamw_torch": all_values, "sgd": 0, "adafactor": 3 * largest}
    paged = name.startswith("paged_")
    return OptimizerUse(
        device_bytes=0 if paged else state,
        host_bytes=state if paged else 0,
        step_bytes=step.get(name, 0),
    )
