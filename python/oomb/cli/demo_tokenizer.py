"""The demo's tokenizer: a token per byte, its id the byte's value."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode


def byte_tokenizer() -> Qwen2Tokenizer:
    """256 tokens, no special ones; decodes what it encodes, composed characters (NFC) at least.

    A Qwen2 tokenizer, because ``AutoTokenizer`` makes one of whatever lies beside a Qwen2 model.
    """
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    none: dict[str, Any] = {"unk_token": None, "eos_token": None, "pad_token": None}
    tokenizer: Qwen2Tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], clean_up_tokenization_spaces=False, **none
    )
    return tokenizer
