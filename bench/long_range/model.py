"""The decoders that are trained, and their checkpoints: small enough to be carried about."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from .start import set_heads
from .tasks import VOCABULARY


@dataclass(frozen=True)
class Size:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int


@dataclass(frozen=True)
class Rope:
    """Angles: base, and the tokens up to which a model that begins with them looks names up."""

    theta: float
    longest: int


SIZES = {
    "tiny": Size(2, 128, 4, 2, 256),  # 0.4M parameters, for a CPU
    "small": Size(4, 384, 6, 2, 1024),  # 6.5M parameters, 13 MB in bf16
    "base": Size(5, 768, 6, 2, 4096),  # 56M
}


def new_model(size: Size, seed: int, rope: Rope) -> Qwen2ForCausalLM:
    """Before training, fp32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        initializer_range=size.hidden**-0.5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        max_position_embeddings=rope.longest,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "sdpa"
    model = Qwen2ForCausalLM(config)
    for name, value in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias")):  # what attends by place alone
            torch.nn.init.normal_(value, std=0.5)
    set_heads(model, rope.theta, rope.longest)
    return model


def save(path: Path, model: Qwen2ForCausalLM, size: str, rope: Rope) -> None:
    """Weights in bf16; an interrupted save leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied
    parting = path.with_suffix(".part")
    torch.save({"size": size, "rope": asdict(rope), "weights": weights}, parting)
    parting.replace(path)


def load(path: Path, rope: Rope | None = None) -> Qwen2ForCausalLM:
    """A checkpoint's model; with ``rope`` under other angles than it was trained with."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model = new_model(SIZES[saved["size"]], 0, rope or Rope(**saved["rope"]))
    model.load_state_dict(saved["weights"], strict=False)
    return model
