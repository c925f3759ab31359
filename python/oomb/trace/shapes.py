"""Model shapes by name, with random weights: for benches, where values do not matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; ``family`` is the transformers model type."""

    family: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False

    @property
    def linear_weights(self) -> int:
        """Weights in matrix products, per token: projections, MLP and the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return (
            self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocabulary
        )


SHAPES = {
    "qwen2.5-0.5b": ModelShape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, tied=True),
    "qwen2.5-1.5b": ModelShape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, tied=True),
    "qwen2.5-3b": ModelShape("qwen2", 36, 2048, 11008, 16, 2, 128, 151936, tied=True),
    "qwen2.5-7b": ModelShape("qwen2", 28, 3584, 18944, 28, 4, 128, 152064),
    "qwen2.5-14b": ModelShape("qwen2", 48, 5120, 13824, 40, 8, 128, 152064),
    "qwen2.5-32b": ModelShape("qwen2", 64, 5120, 27648, 40, 8, 128, 152064),
    "llama-3.1-8b": ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3.1-70b": ModelShape("llama", 80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3-8b": ModelShape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936),
}


def random_model(
    shape: ModelShape, *, device: str, dtype: torch.dtype, positions: int, layers: int | None = None
) -> PreTrainedModel:
    """A model of a shape with random weights.

    Args:
        positions: longest sequence it is built for.
        layers: build fewer layers; None: all.
    """
    import torch  # heavy
    from transformers import AutoConfig, AutoModelForCausalLM  # heavy

    config = AutoConfig.for_model(
        shape.family,
        num_hidden_layers=shape.layers if layers is None else layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=shape.tied,
        attention_dropout=0.0,
    )
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model
