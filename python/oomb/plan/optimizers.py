"""Memory and seconds of the optimizers that the stock trainer offers by name (``optim=``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from oomb.plan.rates import Rates


@dataclass(frozen=True)
class OptimizerUse:
    """What an optimizer takes.

    Attributes:
        device_bytes: state on the device, for as long as the run.
        host_bytes: state that lives in host memory or may be paged to it.
        step_bytes: further memory of the device while it steps.
        moved_bytes: of the device's memory that a step reads and writes.
        link_bytes: of states that a step copies to the device, and as many back.
        faults: they come page by page, when they are missed, instead of ahead of their use.
    """

    device_bytes: int = 0
    host_bytes: int = 0
    step_bytes: int = 0
    moved_bytes: int = 0
    link_bytes: int = 0
    faults: bool = False

    def seconds(self, rates: Rates, *, on_cpu: bool) -> float:
        """Of one step."""
        computing = self.moved_bytes / rates.traffic
        copying = 0.0 if on_cpu else self.link_bytes / rates.link
        return computing + 2 * copying if self.faults else max(computing, copying)


# name: (states per value, bytes of a value of state; None: as the parameter's)
_STATES: dict[str, tuple[int, float | None]] = {
    "adamw_torch": (2, None),
    "adamw_torch_fused": (2, None),
    "sgd": (0, None),
    "adagrad": (1, None),
    "rmsprop": (1, None),
    "adamw_bnb_8bit": (2, 1.02),
    "adamw_8bit": (2, 1.02),
    "adamw_torch_8bit": (2, 1 + 4 / 256),  # torchao's: a scale in fp32 per block
    "adamw_torch_4bit": (2, 0.5 + 4 / 128),
    "lion_8bit": (1, 1.02),
    "lion_32bit": (1, 4.0),
    "paged_adamw_32bit": (2, 4.0),
    "paged_adamw_8bit": (2, 1.02),
    "paged_lion_32bit": (1, 4.0),
    "paged_lion_8bit": (1, 1.02),
    "adafactor": (0, None),  # a row and a column per matrix
}
OPTIMIZERS = tuple(_STATES)

_IN_32_BITS_TOO = {  # of bitsandbytes, 8 bits but for embeddings
    *("adamw_bnb_8bit", "adamw_8bit", "lion_8bit", "paged_adamw_8bit", "paged_lion_8bit"),
}

# How often a step goes through its tensors; those of one kernel do so once.
_PASSES = {"adamw_torch": 5, "adagrad": 4, "rmsprop": 4, "adafactor": 6}


def optimizer_use(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    states: str = "device",
    *,
    embeddings: Collection[torch.nn.Parameter] = frozenset(),
) -> OptimizerUse:
    """What an optimizer over ``parameters`` (which may be without values) takes.

    Args:
        states: ``"device"``, or ``"host"`` as :class:`oomb.optim.HostStates` keeps them.
        embeddings: parameters whose states bitsandbytes keeps in 32 bits where the stock trainer
            makes the optimizer.

    Raises:
        ValueError: an optimizer that is not known here, or whose states cannot be kept so.
    """
    if name not in _STATES:
        raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {name!r}")
    if states not in ("device", "host"):
        raise ValueError(f"optimizer_states: expected 'device' or 'host', got {states!r}")
    paged = name.startswith("paged_")
    if paged and states == "host":
        raise ValueError(
            f"optimizer_states: expected 'device' for {name!r}, which pages its states to the host "
            f"by itself, got 'host'; take {name.removeprefix('paged_')!r} or leave it out"
        )
    in_full = embeddings if name in _IN_32_BITS_TOO else ()
    of_each = [_state_bytes(name, parameter, parameter in in_full) for parameter in parameters]
    state = sum(of_each)
    largest = max((p.numel() * max(4, p.element_size()) for p in parameters), default=0)
    all_values = sum(p.numel() * p.element_size() for p in parameters)
    temporary = {"adamw_torch": all_values, "adafactor": 3 * largest}.get(name, 0)
    moved = _PASSES.get(name, 1) * (3 * all_values + 2 * state)
    if states == "host":
        temporary = _step_bytes_from_host(name, parameters, of_each)
    on_host = paged or states == "host"
    return OptimizerUse(
        device_bytes=0 if on_host else state,
        host_bytes=state if on_host else 0,
        step_bytes=temporary,
        moved_bytes=moved,
        link_bytes=state if on_host else 0,
        faults=paged,
    )


def _state_bytes(name: str, parameter: torch.nn.Parameter, in_32_bits: bool) -> int:
    states, size = _STATES[name]
    if in_32_bits:
        size = 4.0
    if name == "adafactor":
        return 4 * (parameter.numel() if parameter.ndim < 2 else sum(parameter.shape))
    return int(states * parameter.numel() * (size or parameter.element_size()))


def _step_bytes_from_host(
    name: str, parameters: Sequence[torch.nn.Parameter], state_bytes: Sequence[int]
) -> int:
    """States of three parts of the parameters, and what the one in the middle takes."""
    from oomb.optim.host_states import parts_of  # imports torch, which names alone do not need

    of = {id(p): size for p, size in zip(parameters, state_bytes, strict=True)}
    parts = list(parts_of(parameters))
    states = [0, *(sum(of[id(p)] for p in part) for part in parts), 0]
    own = [sum(p.nbytes for p in part) if name == "adamw_torch" else 0 for part in parts]
    return max(
        (sum(states[at : at + 3]) + working for at, working in enumerate(own)),
        default=0,
    )
