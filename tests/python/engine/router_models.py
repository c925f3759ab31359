"""Tiny mixtures of experts that add a loss of their routers, and the ordinary backward of one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from .models import of, spread_weights
from .recurrent_models import nothing_rounds_to_float32
from .reference import Result, take_gradients

# Class prefix: settings besides the sizes. The coefficient is large: an error of it shows.
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    "Olmoe": {"num_experts": 4, "clip_qkv": None, "eos_token_id": 2},
    "GptOss": {"num_local_experts": 4, "sliding_window": 12},
    "GraniteMoe": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32},
    "FlexOlmo": {"num_experts": 4},
    "Phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0},
    "MiniMaxM2": {"num_local_experts": 4},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_intermediate_size": 32, "moe_k": 2},
}


def routed(prefix: str = "Mixtral", dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """A model whose routers prefer some experts to others."""
    given = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.7}
    own = {**given, **FAMILIES[prefix], "output_router_logits": True, **settings}
    model = of(prefix, **own)
    spread_weights(model)
    model.set_experts_implementation("eager")
    return model.to(dtype)


@contextmanager
def in_float64(model: Any) -> Iterator[None]:
    """Inside, nothing rounds to fp32, the sums of transformers' load-balancing loss neither."""
    modeling = sys.modules[type(model).__module__]
    stock, double = modeling.load_balancing_loss_func, torch.float64

    def widened(*arguments: Any, **keywords: Any) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch, "float32", double)
            return stock(*arguments, **keywords)  # type: ignore[no-any-return]

    with nothing_rounds_to_float32(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "load_balancing_loss_func", widened)
        yield


def stock_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor, **arguments: Any) -> Result:
    """The model's own loss, and one ordinary backward of it."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels, use_cache=False, **arguments).loss
    loss.backward()
    return Result(loss.detach(), take_gradients(model))
