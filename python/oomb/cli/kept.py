"""The option ``--keep-outputs``, a word or a share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEEP_HELP = "auto, all, none or a share: attention's outputs kept for the sweep; auto: MLPs' too."


def share_or_word(text: str) -> float | str:
    """What ``Config(keep_outputs=…)`` is given; it says what fits neither."""
    try:
        return float(text)
    except ValueError:
        return text


def levels_text(chunks: Mapping[Any, int]) -> str:
    """``Config(recompute=…)`` of how many chunks, in the order of the sweep."""
    known = [level for level in ("layer", "pointwise", "none") if level in chunks]
    return ", ".join(f"{level!r} in {chunks[level]}" for level in known) + " chunks"
