"""Other ways to train on one GPU, to be measured beside the engine: the whole sequence at once.

All see all tokens (dense, causal) and leave the gradients of the mean loss in ``param.grad``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from oomb.model.fused import fused_forwards, replaced_forwards
from oomb.model.layer_shape import LayerShape
from oomb.model.rotary import fused_rotation, modeling_files, replaced_rotation
from oomb.rivals.kept import KeptAttention
from oomb.rivals.offload import OffloadedInputs
from oomb.trace.layerwise import layerwise_bytes
from oomb.trace.shapes import ModelShape

_LOGIT_BYTES = 3 * 4  # per logit beyond the model's own: log-softmax and two gradients in fp32
_TILE = {"cpu": 64, "cuda": 16384}  # tokens of an MLP tile: large enough for full-rate products


class Ordinary:
    """Gradient checkpointing and SDPA, as transformers has them; logits of all tokens."""

    name = "ordinary"

    def __init__(self, model: PreTrainedModel, shape: ModelShape) -> None:
        self._model, self._shape = model, shape

    def least_device_bytes(self, tokens: int) -> int:
        """What a step certainly takes beyond the parameters."""
        size, layers = _element_bytes(self._model), len(_decoder(self._model).layers)
        logits = self._shape.vocabulary * (size + _LOGIT_BYTES)
        at_the_loss = tokens * (layers * self._shape.hidden * size + logits)
        return max(at_the_loss, _gradient_bytes(self._model))

    def host_bytes(self, tokens: int) -> int:
        """Host memory of a step."""
        return 0

    @contextmanager
    def prepared(self, tokens: int) -> Iterator[None]:
        """Context in which steps of so many tokens run; what it allocates is not timed."""
        model = self._model
        was_training = model.training
        model.train()  # transformers checkpoints nothing in eval mode
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()
            model.train(was_training)

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Loss of [1, tokens] int64; adds its gradient to ``param.grad``."""
        loss: torch.Tensor = self._model(
            input_ids=input_ids, labels=input_ids, use_cache=False
        ).loss
        loss.backward()
        return loss.detach()


class Tuned:
    """Layer by layer: inputs offloaded, MLP and loss in tiles, cuDNN's attention, fused kernels.

    Attention runs forward twice and the MLP too, as under checkpointing; norms, gates and rotation
    are the kernels that the engine uses.
    """

    name = "tuned"

    def __init__(self, model: PreTrainedModel, shape: ModelShape) -> None:
        self._model, self._shape = model, shape
        self._decoder = _decoder(model)
        self._layers = list(self._decoder.layers)
        self._device = model.device
        self._inputs: OffloadedInputs | None = None

    def least_device_bytes(self, tokens: int) -> int:
        return _gradient_bytes(self._model) + self._needed(tokens)[0]

    def host_bytes(self, tokens: int) -> int:
        return self._needed(tokens)[1]

    def _needed(self, tokens: int) -> tuple[int, int]:
        shape = self._shape
        needed = layerwise_bytes(
            tokens,
            layers=len(self._layers),
            hidden_size=shape.hidden,
            shape=LayerShape(shape.heads, shape.kv_heads, shape.head_dim, 0),
            element_bytes=_element_bytes(self._model),
        )
        return needed.device_bytes, needed.host_bytes

    @contextmanager
    def prepared(self, tokens: int) -> Iterator[None]:
        size = torch.Size((1, tokens, self._shape.hidden))
        with ExitStack() as stack:
            offloaded = OffloadedInputs(len(self._layers), size, self._model.dtype, self._device)
            self._inputs = stack.enter_context(offloaded)
            stack.callback(setattr, self, "_inputs", None)
            fused = fused_forwards(self._decoder, self._device)
            stack.enter_context(replaced_forwards(fused))
            files, rotation = modeling_files(self._decoder), fused_rotation(self._device)
            stack.enter_context(replaced_rotation(files, rotation))
            stack.enter_context(_fastest_attention(self._device))
            yield

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = self._decoder.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        with torch.no_grad():
            angles = self._decoder.rotary_emb(embedded, positions)
            x = embedded.detach()
            for index in range(len(self._layers)):
                x = self._layer_forward(index, x, angles)
        targets = F.pad(input_ids[0, 1:], (0, 1), value=-100)
        loss, grad = self._loss(x, targets, int((targets != -100).sum()))
        del x
        for index in reversed(range(len(self._layers))):
            grad = self._layer_backward(index, angles, grad)
        embedded.backward(grad)
        return loss

    def _forward(self, index: int) -> AbstractContextManager[None]:
        """Around a layer's attention in the forward."""
        return nullcontext()

    def _recompute(self, index: int) -> AbstractContextManager[None]:
        """Around a layer's attention when the backward runs it again."""
        return nullcontext()

    def _layer_forward(self, index: int, x: torch.Tensor, angles: Any) -> torch.Tensor:
        """A layer's output, without a graph; its input goes to the host."""
        assert self._inputs is not None, "use inside prepared()"
        layer = self._layers[index]
        self._inputs.put(index, x)
        with self._forward(index):
            x = _attended(layer, x, angles)
        for tile in _tiles(x):
            x[:, tile] += _mlp(layer, x[:, tile])
        return x

    def _layer_backward(self, index: int, angles: Any, grad: torch.Tensor) -> torch.Tensor:
        """From the gradient of a layer's output (overwritten) to that of its input."""
        assert self._inputs is not None, "use inside prepared()"
        layer = self._layers[index]
        x = self._inputs.get(index).requires_grad_()
        with self._recompute(index):
            middle = _attended(layer, x, angles)
        for tile in _tiles(middle):
            part = middle.detach()[:, tile].requires_grad_()
            _mlp(layer, part).backward(grad[:, tile])
            assert part.grad is not None
            grad[:, tile] += part.grad
        middle.backward(grad)
        assert x.grad is not None
        return x.grad

    def _loss(
        self, x: torch.Tensor, targets: torch.Tensor, count: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of losses over ``count``, and its gradient at the last layer's output."""
        x.requires_grad_()
        hidden = self._decoder.norm(x)[0]
        loss = _tiled_loss(self._model.get_output_embeddings(), hidden, targets, count)
        assert x.grad is not None
        return loss, x.grad


class TunedKept(Tuned):
    """As :class:`Tuned`, but attention runs forward once: its results wait on the host.

    The fastest of the three where the host has room for them, as much again as for the inputs.
    """

    name = "tuned-kept"

    def __init__(self, model: PreTrainedModel, shape: ModelShape) -> None:
        super().__init__(model, shape)
        self._kept: KeptAttention | None = None

    def least_device_bytes(self, tokens: int) -> int:
        on_its_way = self._sizes(tokens)[0] * _element_bytes(self._model)
        return super().least_device_bytes(tokens) + on_its_way

    def host_bytes(self, tokens: int) -> int:
        values, rows = self._sizes(tokens)
        size = _element_bytes(self._model)
        return super().host_bytes(tokens) + len(self._layers) * (
            values * size + rows * max(4, size)
        )

    def _sizes(self, tokens: int) -> tuple[int, int]:
        """Values of a layer's output, rows of its log-sum-exp."""
        rows = tokens * self._shape.heads
        return rows * self._shape.head_dim, rows

    @contextmanager
    def prepared(self, tokens: int) -> Iterator[None]:
        sizes = self._sizes(tokens)
        with ExitStack() as stack:
            kept = KeptAttention(len(self._layers), *sizes, self._model.dtype, self._device)
            self._kept = stack.enter_context(kept)
            stack.callback(setattr, self, "_kept", None)
            stack.enter_context(super().prepared(tokens))
            yield

    def _forward(self, index: int) -> AbstractContextManager[None]:
        assert self._kept is not None, "use inside prepared()"
        return self._kept.storing(index)

    def _recompute(self, index: int) -> AbstractContextManager[None]:
        assert self._kept is not None, "use inside prepared()"
        return self._kept.again(index)


Rival = Ordinary | Tuned
RIVALS = (Ordinary, Tuned, TunedKept)


def _attended(layer: Any, x: torch.Tensor, angles: Any) -> torch.Tensor:
    """The first half of a layer, with its residual."""
    attention: torch.Tensor
    attention, _ = layer.self_attn(
        hidden_states=layer.input_layernorm(x), position_embeddings=angles, attention_mask=None
    )
    return x + attention


def _mlp(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The second half, without its residual."""
    y: torch.Tensor = layer.mlp(layer.post_attention_layernorm(x))
    return y


def _tiled_loss(
    head: Any, hidden: torch.Tensor, targets: torch.Tensor, count: float
) -> torch.Tensor:
    """Losses of [tokens, hidden_size] over ``count``, propagated back to what made ``hidden``."""
    if hidden.is_cuda and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # optional

        total: torch.Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(
            head.weight, hidden, targets
        )
        loss = total / count
        loss.backward()
        return loss.detach()
    leaf = hidden.detach().requires_grad_()
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    for tile in _tiles(leaf[None]):
        logits = head(leaf[tile]).to(wide)
        loss = F.cross_entropy(logits, targets[tile], reduction="sum") / count
        loss.backward()
        total += loss.detach()
    hidden.backward(leaf.grad)
    return total


def _tiles(x: torch.Tensor) -> Iterator[slice]:
    """Slices of tokens of [1, tokens, hidden_size]."""
    step = _TILE[x.device.type]
    for first in range(0, x.shape[1], step):
        yield slice(first, first + step)


@contextmanager
def _fastest_attention(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel  # heavy

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        yield


def _decoder(model: PreTrainedModel) -> Any:
    return model.get_decoder()


def _element_bytes(model: nn.Module) -> int:
    return next(model.parameters()).element_size()


def _gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
