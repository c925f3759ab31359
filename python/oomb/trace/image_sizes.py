"""Tokens that show an image of a size, by a model's config."""

from __future__ import annotations

import math
from typing import Any

from oomb.errors import UnsupportedModelError
from oomb.trace.bare import config_of
from oomb.trace.shapes import SHAPES
from oomb.trace.tower import PADDED_IMAGE, tokens_of_square


def tokens_of_image(model: str, height: int, width: int) -> int:
    """Of an image of ``height`` x ``width`` pixels, as the model's processor leaves it.

    Args:
        model: as of :func:`oomb.trace.bare.bare_model`, by name.

    Raises:
        ValueError: no such model, or it sees no images.
        UnsupportedModelError: it is not known how it takes them.
    """
    config: Any = None if model.lower() in SHAPES else config_of(model)
    tower = getattr(config, "vision_config", None)
    if tower is None:
        raise ValueError(f"images: expected 0 for a model that sees none, got some for {model}")
    if hasattr(tower, "spatial_merge_size"):  # Qwen
        unit: int = tower.patch_size * tower.spatial_merge_size
        return max(1, round(height / unit)) * max(1, round(width / unit))
    if hasattr(tower, "pooling_kernel_size"):  # Gemma 4 resizes until there are so many
        high, wide = (math.sqrt(PADDED_IMAGE * x) for x in (height / width, width / height))
        return max(1, int(high)) * max(1, int(wide))
    number = tokens_of_square(config)
    if number is None:
        raise UnsupportedModelError(f"{model}: it is not known how it takes images")
    return number
