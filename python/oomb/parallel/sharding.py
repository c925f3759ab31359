"""Weights that FSDP2 has sharded over the ranks of a sequence: gathered when a call runs them.

    zero1   gather all │ fill, sweep                             │ scatter sums │ release
    zero2   gather all │ fill, sweep; a layer's sums scattered   │              │ release
    zero3              │ gather layer, run, release; likewise    │              │
            each chunk of the sweep passes a layer twice: forward and backward

FSDP2 owns shards, gathers and frees; the engine says when. FSDP2's own hooks do not run in a call:
they expect one forward and one backward of the root, and average what they reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from oomb.errors import UnsupportedModelError
from oomb.parallel.fsdp_hooks import Afterwards, hide
from oomb.parallel.group import Ranks
from oomb.parallel.sharded_by_users import expect_mesh, expect_ties
from oomb.parallel.shards import scattered
from oomb.parallel.weights import OnDone, OnUse, Weights
from oomb.parallel.whole import own_rows

_AT_A_TIME = 3  # layers that are gathered together: one runs, one comes, one goes


class ShardedWeights(Weights):
    """Weights of a model after ``torch.distributed.fsdp.fully_shard``.

    Each group is gathered once when this is made, which finds its parameters.

    Args:
        model: after ``fully_shard`` over the ranks of the sequence.
        ranks: of the sequence.
        policy: ``"zero1"``, ``"zero2"`` or ``"zero3"``.

    Raises:
        UnsupportedModelError: it is sharded over other ranks, or along other dimensions.
    """

    is_sharded = True

    def __init__(self, model: nn.Module, ranks: Ranks, policy: str) -> None:
        expect_mesh(model, ranks.members)
        expect_ties(model)
        self._ranks = ranks
        self.ranks = ranks.size
        self._policy = policy
        self._transport = _Transport(ranks)
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._groups = self._found(model)
        self._layers: list[_Group] = []
        self._owners: dict[nn.Parameter, nn.Parameter] = {}
        self._active: list[_Group] = []  # whose backward is under way
        self._on_done: OnDone | None = None
        self._on_use: OnUse | None = None

    def _found(self, model: nn.Module) -> list[_Group]:
        entries = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        of_state: dict[object, list[FSDPModule]] = {}
        for module in self._modules:
            of_state.setdefault(module._get_fsdp_state(), []).append(module)
        self._transport.begin()
        try:
            return [_Group(modules, entries, self._transport) for modules in of_state.values()]
        finally:
            self._transport.end()

    @property
    def num_bytes(self) -> int:  # type: ignore[override]
        return sum(group.num_bytes for group in self._groups)

    @property
    def gathered_bytes(self) -> int:  # type: ignore[override]
        return self._transport.gathered_bytes

    def know_layers(self, layers: Sequence[nn.Module]) -> None:
        inside = {module for layer in layers for module in layer.modules()}
        self._layers = [g for g in self._groups if inside.issuperset(g.modules)]
        for place, group in enumerate(self._layers):
            group.place = place

    def begin(self, afterwards: Afterwards) -> None:
        owners = {}
        for group in self._groups:
            for (module, name), plain in zip(group.places, group.plain, strict=True):
                owner = module._parameters[name]
                assert isinstance(owner, nn.Parameter)
                afterwards(partial(module._parameters.__setitem__, name, owner))
                plain.requires_grad_(owner.requires_grad)  # it may have been changed since
                owners[plain] = owner
                module._parameters[name] = plain
        self._owners = owners
        for module in self._modules:
            hide(module, afterwards)

    def gather(
        self,
        afterwards: Afterwards,
        on_done: OnDone | None = None,
        on_use: OnUse | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        self.begin(afterwards)
        afterwards(self._end)
        self._transport.begin()
        for group in self._groups:  # another engine of this model may have told it of its own
            group.gather_through(self._transport)
        self.scattered_bytes = 0
        one_by_one = self._layers if self._policy == "zero3" and not at_once else []
        self._on_done, self._on_use = on_done, on_use if one_by_one else None
        for group in self._layers if self._policy != "zero1" else []:
            for module in group.modules:
                before = module.register_forward_pre_hook(partial(self._before, group))
                afterwards(before.remove)
                after = module.register_forward_hook(partial(self._after, group), always_call=True)
                afterwards(after.remove)
        for group in self._groups:
            if group not in one_by_one:
                group.users = 1
                group.gather()

    def _end(self) -> None:
        self._transport.end()
        self._active.clear()
        self._on_done = self._on_use = None
        for group in self._groups:
            group.users = 0
            group.release()

    # Layers of a call -----------------------------------------------------------------------------

    def _before(self, group: _Group, module: nn.Module, _: object) -> None:
        if module in group.modules:  # not a copy that is planned with
            self._use(group, following=group.place + 1)

    def _after(self, group: _Group, module: nn.Module, _: object, output: Any) -> None:
        if module not in group.modules:
            return
        is_last = group is self._layers[-1]
        waits = False
        for tensor in _tensors(output):
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._before_backward, group))
                waits = is_last  # its backward comes next
        self._leave(group, keep=waits)

    def _before_backward(self, group: _Group, _: torch.Tensor) -> None:
        if group in self._active:
            return
        if not self._active:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        self._finish(around=group)
        self._active.append(group)
        self._use(group, following=group.place - 1)

    def _finish(self, around: _Group | None = None) -> None:
        """A backward has left the layers that it was in, but those around a module in them."""
        for group in list(self._active):
            if around is None or not group.is_around(around):
                self._active.remove(group)
                if self._on_done is not None:
                    self._on_done(group.trained)
                self._leave(group, keep=group is self._layers[0])  # where the next chunk begins

    def pass_by(self, layer: int) -> None:
        self._use(self._layers[layer], following=layer + 1)
        self._leave(self._layers[layer], keep=False)

    def _use(self, group: _Group, following: int) -> None:
        if self._on_use is not None:
            self._on_use(group.place)
        group.users += 1
        group.gather()
        if 0 <= following < len(self._layers):
            self._layers[following].gather_ahead()

    def _leave(self, group: _Group, *, keep: bool) -> None:
        group.users -= 1
        if group.users <= 0 and not keep:
            group.release()

    # Gradients ------------------------------------------------------------------------------------

    def plain(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        of_owner = {owner: plain for plain, owner in self._owners.items()}
        for owner in parameters:
            if owner in of_owner and getattr(owner, "_post_accumulate_grad_hooks", None):
                raise UnsupportedModelError(
                    "a sharded parameter has a post-accumulate-grad hook (an optimizer fused into "
                    "backward?), which would never be called; remove it"
                )
        return [of_owner.get(owner, owner) for owner in parameters]

    def is_shard(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter as of :meth:`plain` is whole in a call alone."""
        return parameter in self._owners

    def sum_shape(self, parameter: nn.Parameter) -> torch.Size:
        owner = self._owners.get(parameter, parameter)
        return own_rows(owner).shape

    def scatter(
        self, parameters: Sequence[nn.Parameter], sums: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        shards = scattered(self._ranks, list(sums))
        for shard, total in zip(shards, sums, strict=True):
            self.scattered_bytes += (self.ranks - 1) * shard.numel() * total.element_size()
        return shards

    def shard_like(self, parameter: nn.Parameter, shard: torch.Tensor) -> torch.Tensor:
        owner: Any = self._owners[parameter]
        return DTensor.from_local(
            shard.to(owner.device),
            owner.device_mesh,
            owner.placements,
            run_check=False,
            shape=owner.shape,
            stride=owner.stride(),
        )

    # Memory ---------------------------------------------------------------------------------------

    def held(self, parameters: Sequence[nn.Parameter], sizes: Sequence[int]) -> int:
        if self._policy == "zero1":
            return sum(sizes)
        of = dict(zip(parameters, sizes, strict=True))
        layers = [sum(of.get(p, 0) for p in group.plain) for group in self._layers]
        whole = sum(of.values()) - sum(layers)
        # Of one layer there are its whole sums, and what is sent and received of them.
        return whole + sum(layers) // self._ranks.size + 3 * max(layers, default=0)

    def to_come(self, *, begun: bool) -> int:
        layers = sorted((group.num_bytes for group in self._layers), reverse=True)
        others = self.num_bytes - sum(layers)
        if self._policy != "zero3":
            return 0 if begun else sum(layers) + others
        return sum(layers[:_AT_A_TIME]) + (0 if begun else others)


class _Group:
    """Parameters that FSDP2 gathers together.

    Attributes:
        modules: that were sharded as one.
        places: modules and names under which its parameters are.
        plain: what is there while they are gathered; the same objects each time.
        num_bytes: of these.
        users: passes through the modules that are under way.
        place: among those of decoder layers.
    """

    def __init__(self, modules: list[FSDPModule], entries: _Entries, transport: _Transport) -> None:
        self._handle = handle = _Handle(modules[0]._get_fsdp_state)
        self.modules: list[nn.Module] = [m for m in modules if isinstance(m, nn.Module)]
        self.users = 0
        self.place = -1
        self._ahead = False
        self._inside = {inner for module in self.modules for inner in module.modules()}
        self.gather_through(transport)
        handle.unshard()
        found = [(m, name) for m, name, p in entries if m._parameters[name] is not p]
        self.places = [(m, name) for m, name in found if m in self._inside]
        self.plain: list[Any] = [m._parameters[name] for m, name in self.places]
        self.num_bytes: int = sum(p.numel() * p.element_size() for p in dict.fromkeys(self.plain))
        handle.reshard()

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those that receive gradients, each once."""
        return [p for p in dict.fromkeys(self.plain) if p.requires_grad]

    def is_around(self, other: _Group) -> bool:
        """Whether the other's modules are in these."""
        return all(module in self._inside for module in other.modules)

    def gather_through(self, transport: _Transport) -> None:
        """From here on; FSDP2 knows one at a time."""
        self._handle.set_custom_all_gather(transport)

    def gather(self) -> None:
        self._handle.unshard()
        self._ahead = False

    def gather_ahead(self) -> None:
        """Begin a gather that a GPU carries out beside its computing."""
        if self.plain and self.plain[0].device.type == "cuda":
            self._handle.unshard(async_op=True)
            self._ahead = True

    def release(self) -> None:
        """Free what was gathered. The places keep the parameters that were there."""
        if self._ahead:  # what is under way comes to its end first
            try:
                self.gather()
            except Exception:  # the group was aborted: nothing will come
                self._forget()
        before = [module._parameters[name] for module, name in self.places]
        self._handle.reshard()
        for (module, name), parameter in zip(self.places, before, strict=True):
            module._parameters[name] = parameter

    def _forget(self) -> None:
        self._ahead = False
        state = self._handle._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            group._all_gather_result = None


class _Handle:
    """FSDP2's public methods for a module, whose class no longer has them inside ``begin``.

    Args:
        state: gives FSDP2's state of the module.
    """

    unshard: Any = FSDPModule.unshard
    reshard: Any = FSDPModule.reshard
    set_custom_all_gather: Any = FSDPModule.set_custom_all_gather

    def __init__(self, state: Callable[[], Any]) -> None:
        self._get_fsdp_state = state


_Entries = list[tuple[nn.Module, str, nn.Parameter | None]]


class _Transport:
    """FSDP2's all-gather: in a call through the engine's own groups, where a failure ends it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_call = False
        self.gathered_bytes = 0

    def begin(self) -> None:
        self._in_call, self.gathered_bytes = True, 0

    def end(self) -> None:
        self._in_call = False

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        if not self._in_call:
            return dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        self.gathered_bytes += (output_tensor.numel() - input_tensor.numel()) * (
            input_tensor.element_size()
        )
        return self._ranks.gather_into(output_tensor, input_tensor, later=async_op)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Those in what a module returned."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _tensors(part)
