"""Tiny models with latent attention: few heads and layers, head dims, ranks and routers as real."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import oomb
from oomb.model import probe

from .models import of, spread_weights
from .reference import Result, chunked, random_ids

IDS = random_ids(2, 75)

_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "n_shared_experts": 1}
_SMALL: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}

# name: (class prefix in transformers, settings, numbers of a token in pages)
LATENT: dict[str, tuple[str, dict[str, Any], int]] = {
    "deepseek-v3": (  # experts chosen in groups, by sigmoids and a bias
        "DeepseekV3",
        {
            **_EXPERTS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
        320,
    ),
    "moonlight": (  # queries without a rank of their own
        "DeepseekV3",
        {
            **_SMALL,
            **_EXPERTS,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        24,
    ),
    "deepseek-v2": (  # experts chosen in groups by softmax; angles as complex numbers
        "DeepseekV2",
        {
            **_SMALL,
            **_EXPERTS,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 8,
            "first_k_dense_replace": 1,
        },
        24,
    ),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        {
            **_EXPERTS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "q_lora_rank": 24,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
        },
        192,
    ),
    "minicpm3": ("MiniCPM3", {**_SMALL, "qk_rope_head_dim": 4, "kv_lora_rank": 17}, 21),  # odd
    "small": (
        "DeepseekV3",
        {
            **_SMALL,
            **_EXPERTS,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        24,
    ),
}


def make_latent(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    """A model of ``LATENT`` in eval mode. It rounds to fp32 inside, unless that is kept off."""
    prefix, own, _ = LATENT[name]
    torch.manual_seed(0)
    sizes = {"head_dim": own.get("qk_rope_head_dim"), **own, **settings}
    model: PreTrainedModel = of(prefix, **sizes)
    spread_weights(model)
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")
    return model.to(dtype).eval()


def config(**settings: Any) -> oomb.Config:
    return oomb.Config(**{"chunk_size": 16, "page_size": 8, **settings})


def widths(model: nn.Module, **settings: Any) -> list[int]:
    """Of each layer, numbers of a token in its pages of latents."""
    with oomb.Engine(model, config(**settings)) as engine:
        return [shape.latent for shape in engine._shapes]


@contextlib.contextmanager
def keys_and_values() -> Iterator[None]:
    """Inside, engines are made whose pages hold keys and values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "latent_width", lambda *_, **__: 0)
        yield


def with_both(model: nn.Module, settings: oomb.Config, **arguments: Any) -> tuple[Result, Result]:
    """The same call on pages of latents, and on pages of keys and values."""
    ours = chunked(model, settings, IDS, IDS, **arguments)
    with keys_and_values():
        return ours, chunked(model, settings, IDS, IDS, **arguments)


def spilled(model: nn.Module, slots: int, **settings: Any) -> oomb.Config:
    """A device tier of so many pages."""
    with oomb.Engine(model, config(**settings)) as engine:
        page = engine._calls.layout(engine.config).slot_bytes
    return config(**settings, device_memory=slots * page, host_memory="16MiB")


def adapted(model: Any, dropout: float = 0.0, target: str = "kv_b_proj") -> Any:
    """LoRA on what expands the latents, and on nothing else; off its neutral start."""
    lora = peft.LoraConfig(r=4, target_modules=[target], lora_dropout=dropout)
    model = peft.get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, 0.0, 0.2, generator=torch.Generator().manual_seed(2))
    return model.to(torch.float64).eval()
