"""The option ``--keep-outputs``, a word or a share."""

from __future__ import annotations

KEEP_HELP = "auto, all, none or a share: attention's outputs kept for the sweep."


def share_or_word(text: str) -> float | str:
    """What ``Config(keep_outputs=…)`` is given; it says what fits neither."""
    try:
        return float(text)
    except ValueError:
        return text
