"""Numbers of tokens as people write them."""

from __future__ import annotations

import re

_LENGTH = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KM]?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "K": 1024, "M": 1024 * 1024}
_MOST = 2**31 - 1  # positions are int32


def parse_length(argument: str, text: str) -> int:
    """Tokens of ``"131072"``, ``"128K"`` or ``"1.1M"`` (1024 and 1024 * 1024), rounded down.

    Raises:
        ValueError: the text is no such number, less than 1, or more than positions can count.
    """
    match = _LENGTH.fullmatch(text)
    exact = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    tokens = int(exact)
    half = match is not None and not match[2] and tokens != exact
    if half or not 1 <= tokens <= _MOST:
        raise ValueError(f"{argument}: expected tokens such as 131072, 128K or 1M, got {text!r}")
    return tokens
