"""Tiny Llama 4: layers that see their own block of tokens, and layers that see all of them.

Its norms, router and rotation round to fp32; here they stay in the model's dtype, for chunked and
ordinary training alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama4 import modeling_llama4

from .models import SIZES, spread_weights

BLOCKS, ALL = "chunked_attention", "full_attention"


IMAGE = 90  # the placeholder of an image's tokens
_PIXELS, _PATCH = 56, 14
PER_IMAGE = (_PIXELS // _PATCH // 2) ** 2  # tokens


def make(block: int, dtype: torch.dtype = torch.float64, **settings: Any) -> PreTrainedModel:
    """Three layers: blocks of ``block`` tokens, everything, blocks; queries grow every 7 tokens."""
    sizes = {
        **SIZES,
        "num_hidden_layers": 3,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "attention_chunk_size": block,
        "layer_types": [BLOCKS, ALL, BLOCKS],
        "no_rope_layers": [1, 0, 1],
        "floor_scale": 7,
        "attn_scale": 0.5,
        "attention_dropout": 0.0,
        "max_position_embeddings": 512,
        **settings,
    }
    config = transformers.Llama4TextConfig(**sizes)
    return _in_own_dtype(transformers.Llama4ForCausalLM(config), dtype)


def make_with_images(block: int) -> PreTrainedModel:
    """The class that checkpoints are of, in fp64."""
    tower = transformers.Llama4VisionConfig(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=_PIXELS,
        patch_size=_PATCH,
        vision_output_dim=32,
        projector_input_dim=32,
        projector_output_dim=32,
    )
    config = transformers.Llama4Config(
        text_config=make(block).config.to_dict(),
        vision_config=tower.to_dict(),
        image_token_index=IMAGE,
    )
    return _in_own_dtype(transformers.Llama4ForConditionalGeneration(config), torch.float64)


def random_images(number: int) -> torch.Tensor:
    """[number, 3, pixels, pixels] in fp64."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(number, 3, _PIXELS, _PIXELS, generator=generator, dtype=torch.float64)


def _in_own_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    spread_weights(model)
    angles = [
        (part._buffers, name, x)
        for part in model.modules()
        for name, x in part._buffers.items()
        if x is not None and x.is_complex()
    ]
    model = model.to(dtype).eval()
    for buffers, name, x in angles:  # of the tower, which lose their imaginary part on the way
        buffers[name] = x
    for module in model.modules():
        kind = type(module).__name__
        if kind == "Llama4TextRMSNorm":
            module.forward = _norm(module, module.weight)  # type: ignore[method-assign]
        elif kind == "Llama4TextL2Norm":
            module.forward = _norm(module, None)  # type: ignore[method-assign]
        elif kind == "Llama4Router":
            module.forward = _router(module)  # type: ignore[method-assign]
    return model


def _rotated(
    q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles[:, :, None, :]).flatten(3)

    return rotated(q), rotated(k)


@contextmanager
def rotation_in_own_dtype() -> Iterator[None]:
    """For the length of a block, Llama 4 rotates in the dtype that it is in."""
    before = modeling_llama4.apply_rotary_emb
    modeling_llama4.apply_rotary_emb = _rotated
    try:
        yield
    finally:
        modeling_llama4.apply_rotary_emb = before


def _norm(norm: Any, weight: torch.Tensor | None) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
        return scaled if weight is None else scaled * weight

    return forward


def _router(router: Any) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = nn.functional.linear(hidden, router.weight)
        best, chosen = logits.topk(router.top_k, dim=1)
        scores = torch.full_like(logits, -torch.inf).scatter(1, chosen, best)
        return scores.sigmoid(), logits

    return forward
