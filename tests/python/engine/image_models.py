"""Tiny models that see images, in structure those that are released, and batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from .models import VOCABULARY, spread_weights

IMAGE, VIDEO = 90, 91  # placeholders
_PATCH = 4  # pixels
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "patch_size": _PATCH}
_QWEN_TOWER: dict[str, Any] = {
    **_TOWER,
    "depth": 3,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
_THREE_AXES = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA: dict[str, Any] = {
    "sliding_window": 24,
    "layer_types": [_SLIDING, _FULL, _SLIDING],
    "query_pre_attn_scalar": 8,
}

FAMILIES = ("qwen3-vl", "qwen3.5", "gemma3", "gemma4")
OTHERS = ("qwen2.5-vl", "qwen3-vl-moe")


def make_with_images(family: str, **text: Any) -> Any:
    """A model of either list in fp64 and eval mode, with weights that make errors show."""
    config: Any
    torch.manual_seed(0)
    sizes = {**_TEXT, **text}
    if family == "qwen3-vl":
        config = transformers.Qwen3VLConfig(
            text_config={**sizes, "rope_parameters": _THREE_AXES},
            vision_config={**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]},
            **_QWEN_TOKENS,
        )
        kind = transformers.Qwen3VLForConditionalGeneration
    elif family == "qwen2.5-vl":
        tower = {name: size for name, size in _QWEN_TOWER.items() if not name.startswith("num_pos")}
        three = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**sizes, "num_attention_heads": 6, "rope_parameters": three},
            vision_config={**tower, "fullatt_block_indexes": [0], "window_size": 16},
            **_QWEN_TOKENS,
        )
        kind = transformers.Qwen2_5_VLForConditionalGeneration
    elif family == "qwen3-vl-moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = transformers.Qwen3VLMoeConfig(
            text_config={**sizes, **experts, "rope_parameters": _THREE_AXES},
            vision_config={**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]},
            **_QWEN_TOKENS,
        )
        kind = transformers.Qwen3VLMoeForConditionalGeneration
    elif family == "qwen3.5":
        delta = {f"linear_num_{x}_heads": n for x, n in (("key", 2), ("value", 4))}
        delta |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        rope = {**_THREE_AXES, "partial_rotary_factor": 1.0}
        config = transformers.Qwen3_5Config(
            text_config={**sizes, **delta, "layer_types": kinds, "rope_parameters": rope},
            vision_config=_QWEN_TOWER,
            **_QWEN_TOKENS,
        )
        kind = transformers.Qwen3_5ForConditionalGeneration
    elif family == "gemma3":
        tower = {**_TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
        config = transformers.Gemma3Config(
            text_config={**sizes, **_GEMMA},
            vision_config={**tower, "vision_use_head": False},
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
        )
        kind = transformers.Gemma3ForConditionalGeneration
    else:
        tower = {**_TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
        tower |= {"num_key_value_heads": 2, "pooling_kernel_size": 2, "position_embedding_size": 32}
        own = {
            "layer_types": [_SLIDING, _FULL],
            "num_hidden_layers": 2,
            "sliding_window": 24,
            "global_head_dim": 16,
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        }
        config = transformers.Gemma4Config(
            text_config={**sizes, **own, **text},
            vision_config=tower,
            audio_config=None,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            audio_token_id=94,
        )
        kind = transformers.Gemma4ForConditionalGeneration
    model = kind(config)
    model.set_attn_implementation("sdpa")
    if family == "qwen3-vl-moe":
        model.set_experts_implementation("eager")
    spread_weights(model)
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, std=0.2)
        if "vision" in name and name.endswith("k_proj.bias"):
            parameter.requires_grad_(False)  # its gradient is 0, but for rounding
    if family == "gemma4":
        model.model.vision_tower.pooler._avg_pool_by_positions = _average
    return model.double().eval()


def _average(
    hidden: torch.Tensor, places: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gemma 4's mean over squares of patches, in the patches' dtype where its own takes fp32."""
    side = int((hidden.shape[1] // length) ** 0.5)
    places = places.clamp(min=0)
    columns = (places[..., 0].max(dim=-1, keepdim=True)[0] + 1) // side
    square = places[..., 0] // side + columns * (places[..., 1] // side)
    weights = torch.nn.functional.one_hot(square, length).to(hidden) / side**2
    return weights.transpose(1, 2) @ hidden, ~(weights == 0).all(dim=1)


@dataclass
class Batch:
    """Tokens, labels, and what a processor gives beside them."""

    input_ids: torch.Tensor
    arguments: dict[str, torch.Tensor]


def batch_of(
    family: str, rows: Sequence[Sequence[tuple[int, int, int]]], tokens: int, seed: int = 3
) -> Batch:
    """Rows of text with images.

    Args:
        rows: (first placeholder, height, width) of each image of a row; in placeholders. Gemma 3
            has 2 by 2 always.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, IMAGE, (len(rows), tokens), generator=generator)
    sizes = []
    for row, images in enumerate(rows):
        for begin, height, width in images:
            ids[row, begin : begin + height * width] = IMAGE
            sizes.append((height, width))
    kinds = (ids == IMAGE).int()

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if family == "gemma3":
        pixels = noise(len(sizes), 3, 16, 16)
        return Batch(ids, {"pixel_values": pixels, "token_type_ids": kinds})
    if family == "gemma4":
        most = max(4 * height * width for height, width in sizes)
        places = torch.full((len(sizes), most, 2), -1)
        for image, (height, width) in enumerate(sizes):
            y, x = torch.meshgrid(torch.arange(2 * height), torch.arange(2 * width), indexing="ij")
            places[image, : y.numel()] = torch.stack((x.flatten(), y.flatten()), dim=-1)
        return Batch(
            ids,
            {
                "pixel_values": noise(len(sizes), most, 3 * _PATCH**2),
                "image_position_ids": places,
                "mm_token_type_ids": kinds,
            },
        )
    grid = torch.tensor([(1, 2 * height, 2 * width) for height, width in sizes])
    return Batch(
        ids,
        {
            "pixel_values": noise(int(grid.prod(-1).sum()), 3 * 2 * _PATCH**2),
            "image_grid_thw": grid,
            "mm_token_type_ids": kinds,
        },
    )
