"""Training of one sequence over ranks without the engine, as well as torch's own parts do it.

Each rank holds two blocks of the sequence (:mod:`support.balanced_parts`) through all layers, and a
layer gathers keys and values. What a rank does with its tokens is what the rivals on one GPU do:
inputs of layers on the host, fused kernels, MLP and loss in tiles. Weights are whole on each rank,
with each layer's gradients summed while the layer before is propagated back; or FSDP2's shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from support.balanced_parts import BalancedParts
from support.gathered_attention import KERNELS, Found, GatheredAttention
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from oomb.model.fused import replaced_forwards
from oomb.model.swap import Swaps, swapping
from oomb.rivals.offload import OffloadedInputs
from oomb.rivals.training import Tuned
from oomb.trace.shapes import ModelShape

_NAME = "gathered-kv"  # of the attention, among those of transformers


class Gathered(Tuned):
    """Steps that all ranks of ``mesh`` take together; each is given the whole sequence.

    Args:
        model: whole on each rank, or sharded by FSDP2: each layer, then the model. Gradients are
            left as sums over ranks.
        keep: attention's outputs wait on the host, and its forward runs once.
        kernel: a key of ``KERNELS``.
    """

    name = "gathered"

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        mesh: DeviceMesh,
        *,
        keep: bool,
        kernel: str,
    ) -> None:
        super().__init__(model, shape)
        self.name = "gathered-kept" if keep else "gathered"
        self._group, self._keeps, self._kernel = mesh.get_group(), keep, KERNELS[kernel]
        self._sharded = isinstance(model, FSDPModule)
        self._outputs: KeptOutputs | None = None
        self._keep: Callable[[Found], None] | None = None
        self._found: Found | None = None
        self._sums: list[Any] = []

    @contextmanager
    def prepared(self, tokens: int) -> Iterator[None]:
        self._parts = BalancedParts(self._group, tokens)
        own = 2 * self._parts.block
        forwards = {layer: self._forward_of(index) for index, layer in enumerate(self._layers)}
        with ExitStack() as stack:
            stack.enter_context(super().prepared(own))
            stack.enter_context(replaced_forwards({**forwards, self._model: self._whole}))
            stack.enter_context(_attention(self._model.config, self._attend))
            if self._keeps:
                size = (1, self._shape.heads, own, self._shape.head_dim)
                kept = KeptOutputs(len(self._layers), size, self._model.dtype, self._device)
                self._outputs = stack.enter_context(kept)
                stack.callback(setattr, self, "_outputs", None)
            yield

    def host_bytes(self, tokens: int) -> int:
        """Of this rank."""
        own, size = tokens // self._group.size(), self._model.dtype.itemsize
        rows = own * self._shape.heads
        outputs = rows * (self._shape.head_dim * size + max(4, size)) if self._keeps else 0
        return len(self._layers) * (own * self._shape.hidden * size + outputs)

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        targets = F.pad(input_ids[0, 1:], (0, 1), value=-100)
        averaged = self._group.size() if self._sharded else 1  # FSDP2 divides sums of gradients
        count = int((targets != -100).sum()) / averaged
        loss = self._model(self._parts.own(input_ids, 1), self._parts.own(targets, 0), count)
        loss.backward()
        if not self._sharded:
            self._sum(p for p in self._model.parameters() if not self._in_a_layer(p))
            for work in self._sums:
                work.wait()
            self._sums.clear()
        total: torch.Tensor = loss.detach() / averaged
        dist.all_reduce(total, group=self._group)
        return total

    def _whole(self, ids: torch.Tensor, targets: torch.Tensor, count: float) -> torch.Tensor:
        """The model's forward: this rank's part of the mean loss."""
        x = self._decoder.embed_tokens(ids)
        with torch.no_grad():
            positions = self._parts.own(torch.arange(self._tokens, device=ids.device)[None], 1)
            angles = self._decoder.rotary_emb(x, positions)
        for layer in self._layers:
            x = layer(x, angles)
        loss: torch.Tensor = _Loss.apply(x, self, targets, count)
        return loss

    @property
    def _tokens(self) -> int:
        return 2 * self._parts.block * self._group.size()

    def _forward_of(self, index: int) -> Callable[..., Any]:
        return lambda x, angles: _Layer.apply(x, self, index, angles)

    def _in_a_layer(self, parameter: torch.Tensor) -> bool:
        return any(parameter is p for layer in self._layers for p in layer.parameters())

    def _sum(self, parameters: Any) -> None:
        """Begin to add gradients over ranks."""
        for parameter in parameters:
            work = dist.all_reduce(parameter.grad, group=self._group, async_op=True)
            self._sums.append(work)

    def _propagated(self, index: int, angles: Any, grad: torch.Tensor) -> torch.Tensor:
        back = self._layer_backward(index, angles, grad)
        if not self._sharded:
            self._sum(self._layers[index].parameters())
        return back

    @contextmanager
    def _forward(self, index: int) -> Iterator[None]:
        if self._outputs is not None:
            self._keep = lambda found: self._outputs.put(index, found)
        yield
        self._keep = None

    @contextmanager
    def _recompute(self, index: int) -> Iterator[None]:
        if self._outputs is not None:
            self._found = self._outputs.get(index)
        yield
        self._found = None

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        out: torch.Tensor = GatheredAttention.apply(
            query, key, value, self._parts, self._kernel, scaling, self._found, self._keep
        )
        return out.transpose(1, 2).contiguous(), None


class KeptOutputs(ExitStack):
    """Outputs and log-sum-exps of each layer's attention in pinned host memory.

    Args:
        size: of a layer's output, [1, heads, own tokens, D].
    """

    def __init__(
        self, layers: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        kinds = [(size, dtype), (size[:-1], torch.promote_types(dtype, torch.float32))]
        self._outs, self._sums = (
            self.enter_context(OffloadedInputs(layers, torch.Size(shape), kind, device))
            for shape, kind in kinds
        )
        self._others: dict[int, tuple[torch.Size, list[tuple[Any, ...]]]] = {}

    def put(self, layer: int, found: Found) -> None:
        """Start storing."""
        self._outs.put(layer, found.out)
        self._sums.put(layer, found.lse.view(found.out.shape[:-1]))
        self._others[layer] = found.lse.shape, found.rest

    def get(self, layer: int) -> Found:
        """Those of a layer, on the device."""
        shape, rest = self._others.pop(layer)
        return Found(self._outs.get(layer), self._sums.get(layer).view(shape), rest)


class _Layer(torch.autograd.Function):
    """A layer whose backward runs it again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rival: Gathered, index: int, angles: Any) -> Any:
        ctx.rival, ctx.index, ctx.angles = rival, index, angles
        return rival._layer_forward(index, x, angles)

    @staticmethod
    @torch.enable_grad()
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rival._propagated(ctx.index, ctx.angles, grad), None, None, None


class _Loss(torch.autograd.Function):
    """A part of the mean loss; its gradient is there when the loss is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rival: Gathered, *told: Any) -> Any:
        with torch.enable_grad():
            loss, ctx.grad = rival._loss(x.detach(), *told)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.grad * grad, None, None, None


@swapping
def _attention(swaps: Swaps, config: Any, attend: Callable[..., Any]) -> None:
    """Every layer attends so."""
    AttentionInterface.register(_NAME, attend)
    swaps.replace(config, "_attn_implementation_internal", _NAME)
