"""The pages of one call that is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oomb.config import Config
from oomb.core.keeping import MlpOutput
from oomb.core.layout import GradientReach
from oomb.core.page_demand import PageDemand
from oomb.engine.mlp_outputs import mlp_outputs
from oomb.model.layer_shape import LayerShape
from oomb.plan.machine import Machine
from oomb.trace.autocast import autocast_state
from oomb.trace.trace import Tracer


@dataclass(frozen=True, kw_only=True)
class PageCall(PageDemand):
    """Pages of one ``forward_backward``."""

    reach: GradientReach


def mlps_of(
    tracer: Tracer, machine: Machine, config: Config, shapes: Sequence[LayerShape], batch: int
) -> tuple[MlpOutput | None, ...]:
    """What the call could keep of MLPs, as the engine finds it.

    Args:
        shapes: of the layers of its pages.
    """
    sharded = machine.weights != "replicated" and machine.ranks > 1
    if sharded or autocast_state(machine.device_type)[0]:
        return ()
    given: dict[str, Any] = {
        "batch": batch,
        "chunk_size": config.chunk_size,
        "ranks": machine.ranks,
    }
    given["recurrent"] = tracer.state_bytes > 0
    return mlp_outputs(tracer.last_products, tracer.paged, shapes, **given)
