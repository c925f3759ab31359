"""Ordinary training at its thriftiest: whole sequences by layers, layer inputs on the host."""

from __future__ import annotations

from dataclasses import dataclass

from oomb.model.layer_shape import LayerShape

# Living at once while a layer's attention is propagated back, in tensors of all tokens: its input
# and that input's gradient, the next input on its way, the norm's output, the middle of the layer
# and the gradient there; queries, attention's output and their gradients; keys, values likewise.
_HIDDEN, _QUERIES, _KEYS = 6, 4, 4


@dataclass(frozen=True)
class LayerwiseBytes:
    """Beyond parameters, optimizer and gradients.

    Attributes:
        device_bytes: one layer's attention over all tokens; MLP and loss run in tiles.
        host_bytes: every layer's input.
    """

    device_bytes: int
    host_bytes: int


def layerwise_bytes(
    tokens: int, *, layers: int, hidden_size: int, shape: LayerShape, element_bytes: int
) -> LayerwiseBytes:
    """Estimate for ``tokens`` tokens in all; logits and MLP tiles, which do not grow, left out."""
    queries, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    values = _HIDDEN * hidden_size + _QUERIES * queries + _KEYS * keys
    return LayerwiseBytes(
        device_bytes=tokens * values * element_bytes,
        host_bytes=tokens * hidden_size * layers * element_bytes,
    )
