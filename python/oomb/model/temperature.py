"""Queries that grow with their place in the text, in Llama 4's layers without rotation.

transformers counts a token's place from the length of its cache; a chunk has none. So for a call
the layer's own growth is off, and its queries are scaled by the places that the call knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oomb.model.swap import Swaps, swapping

Places = Callable[[], torch.Tensor]  # [B or 1, C] of the tokens that are run, in their documents


@swapping
def temperatures_of_call(swaps: Swaps, decoder: nn.Module, places: Places) -> None:
    """Scale queries by ``places``, where the model would by places that it counts itself."""
    for module in _growing(decoder):
        swaps.replace(module, "attn_temperature_tuning", False)
        project: Any = module.q_proj
        swaps.replace(project, "forward", _scaled(module, project.forward, places))


def _growing(decoder: nn.Module) -> list[Any]:
    return [
        module
        for module in decoder.modules()
        if type(module).__name__ == "Llama4TextAttention"
        and getattr(module, "attn_temperature_tuning", False)
        and not getattr(module, "use_rope", True)
    ]


def _scaled(
    module: Any, project: Callable[..., torch.Tensor], places: Places
) -> Callable[..., torch.Tensor]:
    def grown(hidden: torch.Tensor) -> torch.Tensor:
        queries = project(hidden)
        steps = torch.floor((places().float() + 1.0) / module.floor_scale)
        factor = torch.log1p(steps) * module.attn_scale + 1.0
        scaled: torch.Tensor = queries * factor[..., None]
        return scaled.to(queries.dtype)

    return grown
