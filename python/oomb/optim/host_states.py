"""An optimizer whose states stay in host memory and come to the device some parameters at a time.

    load     [states 1][states 2][states 3] …
    compute            [ step 1 ][ step 2 ][ step 3 ] …
    store                        [states 1][states 2] …

The optimizer is any that steps each parameter by itself; it runs where the parameters are, so its
results keep their bits. A part is some 256 MiB of parameters, or one that is larger, and at most
three parts have states on the device at once.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from oomb.core.tiers import free_memory
from oomb.errors import OutOfMemoryError
from oomb.model.host_memory import host_block
from oomb.neighbours import neighbours_within
from oomb.optim.lanes import Lanes, LanesBeside
from oomb.units import bytes_text

_SMALL = 4096  # values; smaller tensors (a step's number, a table) stay where they are
_PART_BYTES = 2**28  # of parameters that step together
_ALIGNMENT = 256  # bytes, of a tensor in its block

# Optimizers that step each parameter by itself, by the package that they come from.
_KNOWN = {
    "torch": {
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    },
    "transformers": {"Adafactor"},
    "bitsandbytes": {
        *("AdEMAMix", "AdEMAMix32bit", "AdEMAMix8bit", "Adagrad", "Adagrad32bit", "Adagrad8bit"),
        *("Adam", "Adam32bit", "Adam8bit", "AdamW", "AdamW32bit", "AdamW8bit"),
        *("Lion", "Lion32bit", "Lion8bit", "RMSprop", "RMSprop32bit", "RMSprop8bit"),
        *("SGD", "SGD32bit", "SGD8bit"),
    },
    "torchao": {"Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8"},
}

State = dict[str, Any]
T = TypeVar("T", bound=torch.Tensor)


class HostStates(torch.optim.Optimizer):
    """Steps ``optimizer`` with its states in host memory, page-locked where parameters are on a
    GPU.

    The learning rate, schedulers, clipping and ``state_dict`` are as without it; a state may be
    loaded by either. Bits are those of the same optimizer with its states on the device.

    Args:
        optimizer: made of the parameters, one that steps each of them by itself: torch's (not
            LBFGS), bitsandbytes' that are not paged, torchao's 8-bit and 4-bit ones, Adafactor.
        free_gradients: ``param.grad`` is None as soon as its parameter has stepped.

    Attributes:
        optimizer: the one given.
        host_bytes: bytes of the states in host memory.

    Raises:
        ValueError: an optimizer whose states cannot be on the host.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, free_gradients: bool = False) -> None:
        expect_movable_states(optimizer)
        self.optimizer = optimizer
        self.host_bytes = 0
        self.free_gradients = free_gradients
        self._homes: dict[torch.Tensor, dict[str, list[torch.Tensor]]] = {}
        devices = {p.device for p in self._parameters()}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"optimizer: expected parameters on one device, got {names}")
        self._device = devices.pop() if devices else torch.device("cpu")
        on_gpu = self._device.type == "cuda"
        self._lanes: Lanes = LanesBeside(self._device) if on_gpu else Lanes()
        for name in ("pre", "post"):  # around all parts; the optimizer's own are around each
            for of in ("step", "state_dict", "load_state_dict"):
                setattr(self, f"_optimizer_{of}_{name}_hooks", OrderedDict())
        self._patch_step_function()
        if optimizer.state:
            self._keep_all_on_host()

    # As the optimizer is -------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer; its large tensors are in host memory."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer."""
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"HostStates({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of the optimizer."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the optimizer."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As of the optimizer; tensors are those of host memory, not copies."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self.optimizer.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of the optimizer, some parameters at a time."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict.copy())
            state_dict = state_dict if changed is None else changed
        groups, saved = state_dict["param_groups"], state_dict["state"]
        self.optimizer.load_state_dict({"state": {}, "param_groups": groups})
        self._homes, self.host_bytes = {}, 0
        numbers = [number for group in groups for number in group["params"]]
        place = dict(zip(self._parameters(), numbers, strict=True))
        whole: dict[torch.Tensor, State] = {}
        for part in parts_of(p for p, number in place.items() if number in saved):
            some = {place[p]: saved[place[p]] for p in part}
            self.optimizer.load_state_dict({"state": some, "param_groups": groups})
            self._keep_all_on_host()
            whole.update(self.optimizer.state)
        self.optimizer.state = defaultdict(dict, whole)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # Steps ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have gradients.

        Raises:
            ValueError: a closure, which would run the model between parameters.
            OutOfMemoryError: the host's memory does not suffice for states that are new.
        """
        if closure is not None:
            raise ValueError("closure: expected None, got one: parameters step one after another")
        self._begin_first_step()
        grads = {p: p.grad for p in self._parameters() if p.grad is not None}
        parts = list(parts_of(grads))
        stepped: dict[torch.Tensor, torch.Tensor | None] = {}
        for parameter in grads:  # the optimizer leaves out those without
            parameter.grad = None
        before: Any = None
        try:
            coming = self._bring(parts[0]) if parts else None
            for number, part in enumerate(parts):
                here, coming = coming, None
                if number + 1 < len(parts):
                    coming = self._bring(parts[number + 1])
                assert here is not None
                for parameter in part:
                    parameter.grad = grads.pop(parameter)
                try:
                    self._enter(here)
                    self.optimizer.step()
                finally:  # nothing stays on the device, if it fails either
                    going = self._send(part)
                for parameter in part:
                    stepped[parameter] = None if self.free_gradients else parameter.grad
                    parameter.grad = None
                if before is not None:
                    self._lanes.wait(before[0])
                before = going  # holds what is being copied
                del here, going
        finally:
            self._lanes.finish()
            for parameter, grad in (grads | stepped).items():
                parameter.grad = grad

    def _begin_first_step(self) -> None:
        """bitsandbytes' own would bring all loaded states to the device at once."""
        optimizer: Any = self.optimizer
        if not getattr(optimizer, "initialized", True):
            optimizer.check_overrides()
            optimizer.initialized = True

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _bring(self, part: list[torch.Tensor]) -> tuple[Any, list[tuple[Any, str, Any]]]:
        """Begin to load the states of a part: the batch, and what to put where."""
        places = [(p, name, home) for p in part for name, home in self._homes.get(p, {}).items()]
        loaded, batch = self._lanes.load([one for _, _, home in places for one in home])
        values = iter(loaded)
        return batch, [
            (p, name, _like(self.optimizer.state[p][name], [next(values) for _ in home]))
            for p, name, home in places
        ]

    def _enter(self, loaded: tuple[Any, list[tuple[Any, str, Any]]]) -> None:
        batch, states = loaded
        if states:
            self._lanes.wait(batch)
        for parameter, name, value in states:
            self.optimizer.state[parameter][name] = value

    def _send(self, part: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """Begin to store the states of a part, which the optimizer has on the host from now on."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for parameter in part:
            state = self.optimizer.state[parameter]
            large = {
                name: _plain(value)
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.numel() >= _SMALL
            }
            homes = self._homes_of(parameter, large)
            for name, values in large.items():
                sources += values
                targets += homes[name]
                state[name] = _like(state[name], homes[name])
        batch = self._lanes.store(targets, sources)
        return batch, sources

    def _homes_of(
        self, parameter: torch.Tensor, large: dict[str, list[torch.Tensor]]
    ) -> dict[str, list[torch.Tensor]]:
        """Host memory for the states of a parameter, in one block."""
        homes = self._homes.get(parameter)
        if homes is not None and _shapes(homes) == _shapes(large):
            return homes
        num_bytes = sum(_padded(one) for values in large.values() for one in values)
        free = free_memory(torch.device("cpu"))
        if num_bytes > free:
            raise OutOfMemoryError(
                f"optimizer states: the host has {bytes_text(free)} free, the next states take "
                f"{bytes_text(num_bytes)}, {bytes_text(self.host_bytes)} are there; keep them on "
                "the device, or take an optimizer with smaller ones, in 8 bits for one",
                needed_bytes=num_bytes,
                available_bytes=free,
            )
        block, begin = host_block(num_bytes, self._device), 0
        homes = {name: [] for name in large}
        for name, values in large.items():
            for one in values:
                own = block[begin : begin + one.nbytes].view(one.dtype).view(one.shape)
                homes[name].append(own)
                begin += _padded(one)
        self.host_bytes += num_bytes
        self._homes[parameter] = homes
        return homes

    def _keep_all_on_host(self) -> None:
        for part in parts_of(list(self.optimizer.state)):
            kept = self._send(part)
            self._lanes.finish()
            del kept


def expect_movable_states(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose states cannot be on the host.

    Raises:
        ValueError: the text names the nearest thing that works.
    """
    kind = type(optimizer)
    known = _KNOWN.get(kind.__module__.split(".")[0], set())
    if kind.__name__ not in known:
        raise ValueError(
            "optimizer: expected one that steps each parameter by itself (torch's AdamW, Adafactor "
            "or SGD, one of bitsandbytes or torchao in 8 bits, …) for states on the host, got "
            f"{kind.__name__}; keep its states on the device"
        )
    if getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"optimizer: expected one whose states are on the device, got {kind.__name__}, which "
            "pages them to the host by itself; take the one that is not paged"
        )
    for group in optimizer.param_groups:
        if any(isinstance(parameter, DTensor) for parameter in group["params"]):
            raise ValueError(
                "optimizer: expected whole parameters for states on the host, got sharded ones, "
                "whose states are sharded too; keep them on the device"
            )


def parts_of(parameters: Iterable[T]) -> Iterator[list[T]]:
    """Parameters that step together: neighbours of 256 MiB at most, or one that is larger."""
    return neighbours_within(_PART_BYTES, parameters, lambda parameter: parameter.nbytes)


def _plain(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a state is made of: torchao's are codes, scales and a table."""
    if not hasattr(value, "__tensor_flatten__"):
        return [value.detach()]
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]


def _like(value: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """A state made of ``parts`` as ``value`` is of its own."""
    if not hasattr(value, "__tensor_flatten__"):
        return parts[0]
    names, attributes = value.__tensor_flatten__()
    made: torch.Tensor = type(value).__tensor_unflatten__(  # type: ignore[attr-defined]
        dict(zip(names, parts, strict=True)), attributes, value.shape, value.stride()
    )
    return made


def _shapes(of: dict[str, list[torch.Tensor]]) -> dict[str, list[tuple[torch.Size, torch.dtype]]]:
    return {name: [(one.shape, one.dtype) for one in values] for name, values in of.items()}


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
