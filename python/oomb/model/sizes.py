"""A look at the sizes in a model's config, before a module is made from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

# Far above every model there is; below what takes minutes to build without any weight.
_MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "num_hidden_layers": 2**11,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "n_routed_experts": 2**14,
    "max_position_embeddings": 2**40,
    "num_labels": 2**20,  # transformers names each of them
}
_TRUTHS = (
    *("output_hidden_states", "output_attentions", "return_dict", "use_cache", "is_decoder"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"),
)
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse absurd values in a config.json as it was read, before transformers acts on them.

    Raises:
        ValueError: ``<field>: expected ..., got ...``.
    """
    for name, value in values.items():
        if name in _TRUTHS and not isinstance(value, bool) and value is not None:
            raise ValueError(f"{name}: expected true or false, got {repr(value)[:80]}")
        if isinstance(value, Mapping):
            check_values(value)
        elif name in _MOST and isinstance(value, int):
            _expect_size(name, value)


def check_sizes(config: PreTrainedConfig) -> None:
    """Refuse sizes that no model has: null, below one, or so large that building it never ends.

    Raises:
        ValueError: ``<field>: expected ..., got ...``.
    """
    text: Any = config.get_text_config()
    if not isinstance(text, PreTrainedConfig):
        raise ValueError(f"text_config: expected a known model's, got {type(text).__name__}")
    # Where layers differ in a field (Gemma 4's head dims), only each layer's own config tells it.
    of_layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    for config in of_layers:
        _check_sizes(config)


def _check_sizes(config: Any) -> None:
    for name in _MOST:
        for value in _values(config, name):
            _expect_size(name, value)
    heads, groups = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ValueError(f"num_key_value_heads: expected a divisor of {heads} heads, got {groups}")


def _expect_size(name: str, value: object) -> None:
    most = _MOST[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        # As text a number may have more digits than Python prints.
        got = "more" if isinstance(value, int) and value > most else repr(value)[:80]
        raise ValueError(f"{name}: expected an int in 1 ... {most:,}, got {got}")


def _values(config: Any, name: str) -> Iterator[object]:
    """What a config says of a field; some have one number for all layers, some a list."""
    value = getattr(config, name, 1)
    if isinstance(value, (list, tuple)):
        yield from value
    elif value is not None or name in _NEEDED:
        yield value
