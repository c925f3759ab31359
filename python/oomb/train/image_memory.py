"""What images of a call take beside its chunks."""

from __future__ import annotations

from torch import nn

from oomb.model.causal import CausalModel
from oomb.model.images import trains_images


def feature_bytes(model: nn.Module, num_tokens: int) -> int:
    """Of the host's memory: features of images that ``num_tokens`` tokens show.

    Where tower or projector train, or adapters in them, gradients take as much again.

    Args:
        model: with or without weights.
    """
    causal = CausalModel(model)
    tower = getattr(causal.causal.config, "vision_config", None)
    levels = 1 + len(getattr(tower, "deepstack_visual_indexes", None) or ())
    width: int = causal.decoder.config.hidden_size
    both = 2 if trains_images(causal) else 1
    return num_tokens * width * causal.dtype.itemsize * levels * both
