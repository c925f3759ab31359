"""Sizes of the two tiers for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import oomb
from oomb import _C

from .reference import Result, chunked

HOST = "1GiB"
MAPPED_AT_ONCE = 2**16  # bytes by which a pool on the CPU grows


def slot_bytes(model: nn.Module, config: oomb.Config) -> int:
    """Bytes of one page: K and V of ``page_size`` tokens."""
    settings: Any = model.config
    size = next(model.parameters()).element_size()
    return 2 * settings.num_key_value_heads * config.page_size * settings.head_dim * size  # type: ignore[no-any-return]


def smallest_slots(batch: int, grad_slots: int) -> int:
    """Device slots below which no call runs."""
    return _C.smallest_device_slots(batch=batch, grad_slots=grad_slots, backward=True)


def with_slots(
    model: nn.Module,
    settings: dict[str, Any],
    slots: int | None,
    ids: torch.Tensor,
    labels: torch.Tensor,
    switches: dict[str, object] | None = None,
    **arguments: Any,
) -> Result:
    """A call whose device tier has ``slots`` slots; None: all that it wants."""
    config = oomb.Config(**settings)
    if slots is not None:
        memory = slots * slot_bytes(model, config)
        config = oomb.Config(**settings, device_memory=memory, host_memory=HOST)
    return chunked(model, config, ids, labels, switches=switches, **arguments)


def wanted_slots(
    model: nn.Module,
    settings: dict[str, Any],
    ids: torch.Tensor,
    labels: torch.Tensor,
    smallest: int,
    **arguments: Any,
) -> int:
    """Slots that hold a whole call: what the refusal of tiny tiers says it needs. Where these hold
    it, as they may with one layer, they are told."""
    page = slot_bytes(model, oomb.Config(**settings))
    tiny = oomb.Config(**settings, device_memory=smallest * page, host_memory=page)
    try:
        chunked(model, tiny, ids, labels, **arguments)
    except oomb.OutOfMemoryError as error:
        return error.needed_bytes // page
    return smallest + 1
