"""The ``model.rope`` section: position extension through the model's own config."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from oomb.model.rope import positions
from oomb.train.errors import BadInput
from oomb.train.settings import ModelSettings


def extend_positions(config: PreTrainedConfig, settings: ModelSettings) -> None:
    """Write rope parameters and positions into a config.

    Raises:
        BadInput: the model has no such parameters, or transformers does not take them.
    """
    text: Any = config.get_text_config()
    if settings.max_position_embeddings is not None:
        text.max_position_embeddings = settings.max_position_embeddings
    if settings.rope is None:
        return
    present = getattr(text, "rope_parameters", None)
    if not present:
        raise BadInput(f"model.rope: expected a model with rotary positions, got {text.model_type}")
    if any(isinstance(value, dict) for value in present.values()):
        raise BadInput(
            "model.rope: expected a model whose layers share their angles, got one with several "
            f"({', '.join(present)}); change them in its config.json"
        )
    changes = settings.rope.model_dump(exclude_none=True)
    kind = changes.get("rope_type", present.get("rope_type", "default"))
    needs = {"linear", "dynamic", "yarn", "longrope", "llama3"}
    if kind in needs and "factor" not in present | changes:
        raise BadInput(f"model.rope.factor: expected a number for {kind}, got none")
    if kind in ("yarn", "llama3", "longrope"):
        changes.setdefault(
            "original_max_position_embeddings",
            present.get("original_max_position_embeddings", text.max_position_embeddings),
        )
    text.rope_parameters = present | changes
    try:
        text.standardize_rope_params()
        text.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"model.rope: expected parameters of {kind}, got {error}") from error


def check_positions(config: PreTrainedConfig, needed: int) -> None:
    """Refuse documents longer than the model's positions.

    Raises:
        BadInput: with the setting that would extend them.
    """
    made_for = positions(config)
    if made_for is not None and needed > made_for:
        yarn = f"{{rope_type: yarn, factor: {-(-needed // made_for)}}}"
        raise BadInput(
            f"context: expected at most the model's {made_for:,} positions, got {needed:,}; extend "
            f"them, for example with model.rope: {yarn}, or a larger rope_theta with "
            "model.max_position_embeddings"
        )
