"""Which calls of a model that adds a loss of its routers can be made: those known to be exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oomb.config import AllChunks, Config
from oomb.core.inputs import CallInputs, expect
from oomb.errors import UnsupportedModelError
from oomb.model.causal import CausalModel
from oomb.model.routers import asks_for_router_loss as asks_for_router_loss

_WITHOUT = "set output_router_logits to False in the model's config to train without that loss"


def expect_settings_fit(model: CausalModel, config: Config) -> None:
    """Before the engine is made.

    Raises:
        UnsupportedModelError: not every chunk is swept whole.
    """
    if not asks_for_router_loss(model.causal):
        return
    name = type(model.causal).__name__
    if not isinstance(config.backward, AllChunks):
        raise UnsupportedModelError(
            f"{name}: a router auxiliary loss (config.output_router_logits) needs "
            f"backward=oomb.AllChunks(), got {type(config.backward).__name__}; {_WITHOUT}"
        )


def expect_no_router_loss(model: CausalModel, call: str) -> None:
    """Of a call that has no place for it.

    Raises:
        UnsupportedModelError: the model adds one.
    """
    if model.routers is not None:
        raise UnsupportedModelError(
            f"{call}: expected a model without a router auxiliary loss, got "
            f"{type(model.causal).__name__} with config.output_router_logits; {_WITHOUT}"
        )


def routed(
    model: CausalModel, images: Mapping[str, Any] | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of a call, which runs every token where routers count them, a target or not.

    Raises:
        UnsupportedModelError: there are images.
        ValueError: the config has changed since the engine was made.
    """
    now, before = asks_for_router_loss(model.causal), model.routers is not None
    same = f"{before}, as when the engine was made (another engine takes another value)"
    expect(now == before, "config.output_router_logits", same, now)
    if model.routers is None:
        return given
    for name, value in (images or {}).items():
        if value is not None:
            expect_no_router_loss(model, name)
    return {**given, "every_token": True}


def expect_divisor(inputs: CallInputs, given: dict[str, Any]) -> None:
    """Check that a call whose routers count all tokens has targets, or a divisor that is given.

    Raises:
        ValueError: neither is so; the model's own loss is not a number then.
    """
    known = given.get("num_items_in_batch") is not None or given.get("every_token", False)
    some = inputs.num_valid > 0 or known
    expect(some, "labels", "at least one token to predict", "none (all -100)")
