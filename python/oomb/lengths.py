"""Numbers of tokens as people write them."""

from __future__ import annotations

import re

_LENGTH = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KM]?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "K": 1024, "M": 1024 * 1024}


def parse_length(argument: str, text: str) -> int:
    """Tokens of ``"131072"``, ``"128K"`` or ``"1M"`` (1024 and 1024 * 1024).

    Raises:
        ValueError: the text is no such number, or less than 1.
    """
    match = _LENGTH.fullmatch(text)
    tokens = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if tokens < 1:
        raise ValueError(f"{argument}: expected tokens such as 131072, 128K or 1M, got {text!r}")
    return tokens
