"""Tiny models that chunks give exactly, and models that they do not, at several strengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from .models import spread_weights

STRENGTHS = (1.0, 0.3, 0.1, 0.03)
DTYPES = (torch.float32, torch.bfloat16)

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Class prefix: settings besides the sizes. Those with experts have routers that rounding can flip.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "GptOss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": None},
    "Glm4Moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "FalconH1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "Qwen3Next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


def exact(
    family: str, dtype: torch.dtype, layers: int, seed: int, *, loud: bool
) -> PreTrainedModel:
    """A random model of a family.

    Args:
        loud: experts and other feed-forward parts of unit gain, so that what a router chooses makes
            up much of the hidden state; else as the library initialises them.
    """
    torch.manual_seed(seed)
    settings = {**_SIZES, **FAMILIES[family], "num_hidden_layers": layers}
    config = getattr(transformers, f"{family}Config")(**settings)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    if loud:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".mlp." in name and weight.ndim > 1:
                    rows_in = weight.shape[1] if weight.ndim == 3 else weight.shape[-1]
                    weight.normal_().mul_(rows_in**-0.5)
            model.get_input_embeddings().weight.normal_()
    return model.to(dtype).eval()


def _llama() -> PreTrainedModel:
    config = transformers.LlamaConfig(**_SIZES, num_hidden_layers=4)
    model = transformers.LlamaForCausalLM(config).eval()
    spread_weights(model)
    return model


def _with_mlp(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """Llama whose third layer passes its feed-forward input and output through ``change``."""
    model = _llama()
    mlp: Any = model.model.layers[2].mlp
    inner = mlp.forward
    mlp.forward = lambda x: change(x, inner(x))
    return model


def token_shift(strength: float) -> PreTrainedModel:
    return _with_mlp(lambda x, y: y + strength * F.pad(x, (0, 0, 1, 0))[:, :-1])


def convolution(strength: float) -> PreTrainedModel:
    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kernel = x.new_tensor([0.5, -0.3, 0.2]).expand(x.shape[-1], 1, 3)
        padded = F.pad(x.transpose(1, 2), (2, 0))
        return y + strength * F.conv1d(padded, kernel, groups=x.shape[-1]).transpose(1, 2)

    return _with_mlp(change)


def running_mean(strength: float) -> PreTrainedModel:
    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        number = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return y + strength * (x.cumsum(1) / number).to(y.dtype)

    return _with_mlp(change)


def batch_statistic(strength: float) -> PreTrainedModel:
    """A scale that all tokens of a call share, whatever their row."""
    return _with_mlp(lambda x, y: y * (1 + strength * (x[..., 0].mean() + 0.5)))


def length_factor(strength: float) -> PreTrainedModel:
    return _with_mlp(lambda x, y: y * (1 + strength * math.log(x.shape[1])))


def own_positions(strength: float) -> PreTrainedModel:
    table = torch.randn(512, _SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
    return _with_mlp(lambda x, y: y + strength * table[: x.shape[1]].to(y))


def learnt_positions(strength: float) -> PreTrainedModel:
    """BART's decoder counts its positions itself."""
    config = transformers.BartConfig(
        vocab_size=97,
        d_model=64,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        dropout=0.0,
        max_position_embeddings=512,
    )
    model = transformers.BartForCausalLM(config).eval()
    spread_weights(model)
    with torch.no_grad():
        model.model.decoder.embed_positions.weight.mul_(strength)
    return model  # type: ignore[no-any-return]


def biased_attention(strength: float) -> PreTrainedModel:
    """A registered attention function that prefers near keys."""

    def attend(
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        place = torch.arange(q.shape[2], device=q.device)
        distance = place[:, None] - place
        logits = q @ k.transpose(2, 3) * scaling - strength * distance.to(q.dtype)
        logits = logits.masked_fill(distance < 0, float("-inf"))
        return (logits.softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("test_biased", attend)
    model = _llama()
    model.set_attn_implementation("test_biased")
    return model


def falcon_h1(strength: float) -> PreTrainedModel:
    """Attention and a recurrence side by side in each layer."""
    config = transformers.FalconH1Config(
        **_SIZES, num_hidden_layers=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
        mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16, ssm_out_multiplier=strength,
    )  # fmt: skip
    model = transformers.FalconH1ForCausalLM(config).eval()
    spread_weights(model)
    return model  # type: ignore[no-any-return]


def zaya1(strength: float) -> PreTrainedModel:
    """Convolutions over queries and keys, values of the token before."""
    config = transformers.ZayaConfig(
        **{k: x for k, x in _SIZES.items() if k != "intermediate_size"},
        num_hidden_layers=2, moe_intermediate_size=48, num_experts=4, router_hidden_size=16,
    )  # fmt: skip
    model = transformers.ZayaForCausalLM(config).eval()
    spread_weights(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "conv" in name:
                weight.mul_(strength)
    return model  # type: ignore[no-any-return]


def _mixing_in_silence(layer: int, mix: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """Llama with a layer that adds what ``mix`` makes of its normed input to its output."""
    model = _llama()
    chosen: Any = model.model.layers[layer]
    inner = chosen.forward

    def forward(hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        added = mix(chosen.input_layernorm(hidden_states))
        output: torch.Tensor = inner(hidden_states, **keywords)
        return output + added

    chosen.forward = forward
    return model


def _attending(sharpness: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Attention so sharp that each token sees itself alone, to the last digit of fp32."""

    def mix(x: torch.Tensor) -> torch.Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(sharpness * q, q, q, is_causal=True)[:, 0]

    return mix


def sharp_attention() -> PreTrainedModel:
    """Beside the layer's own."""
    return _mixing_in_silence(1, _attending(8.0))


def _attending_alone(attend: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """Llama with a layer that has attention of its own in place of all else."""
    model = _llama()
    layer: Any = model.model.layers[1]
    layer.forward = lambda hidden_states, **_: hidden_states + attend(layer, hidden_states)
    return model


def sharp_attention_alone() -> PreTrainedModel:
    mix = _attending(8.0)
    return _attending_alone(lambda layer, x: mix(layer.input_layernorm(x)))


def loud_attention_alone() -> PreTrainedModel:
    """What it is given is not normed, and so large that a softmax in fp32 gives others nothing."""
    mix = _attending(1.0)
    return _attending_alone(lambda _, x: mix(20 * x) / 20)


def silent_shift() -> PreTrainedModel:
    """By a weight that is next to nothing yet."""
    return _mixing_in_silence(2, lambda x: 1e-9 * F.pad(x, (0, 0, 1, 0))[:, :-1])


def silent_shift_of_queries() -> PreTrainedModel:
    model = _llama()
    projection: Any = model.model.layers[3].self_attn.q_proj
    inner = projection.forward
    projection.forward = lambda x: inner(x + 1e-9 * F.pad(x, (0, 0, 1, 0))[:, :-1])
    return model


def blocks() -> PreTrainedModel:
    """Attention of its own within blocks of as many tokens as the chunks that are compared."""

    def mix(x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        seen = (place[:, None] // 16 == place // 16) & (place[:, None] >= place)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)

    return _mixing_in_silence(1, mix)


def silent_shift_of_outputs() -> PreTrainedModel:
    """Of attention, before they are projected."""
    model = _llama()
    projection: Any = model.model.layers[3].self_attn.o_proj
    inner = projection.forward
    projection.forward = lambda x: inner(x + 1e-9 * F.pad(x, (0, 0, 1, 0))[:, :-1])
    return model


def shift_to_be_learnt() -> PreTrainedModel:
    """By a weight that begins at zero."""
    shift = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(shift.weight)
    model = _mixing_in_silence(2, lambda x: shift.weight[0] * F.pad(x, (0, 0, 1, 0))[:, :-1])
    model.model.layers[2].shift = shift
    return model


# Builder of what values do not tell: what its refusal says.
SILENT: dict[Callable[[], PreTrainedModel], str] = {
    sharp_attention: r"layers\.1 .*: its hidden states at a token depend on the hidden states of",
    sharp_attention_alone: r"layers\.1 .*does not call .*: it computes attention by itself",
    loud_attention_alone: r"layers\.1 .*does not call .*: it computes attention by itself",
    silent_shift: r"layers\.2 .*: its hidden states at a token depend on the hidden states of",
    silent_shift_of_queries: r"layers\.3 .*: its queries at a token depend on the hidden states",
    silent_shift_of_outputs: r"layers\.3 .*: its hidden states at a token depend on the hidden",
    blocks: r"layers\.1 .*: its hidden states at a token depend on the hidden states of other",
    shift_to_be_learnt: r"layers\.2 .*: its hidden states at a token depend on the hidden states",
}

# Builder: what its refusal says.
WRONG: dict[Callable[[float], PreTrainedModel], str] = {
    token_shift: r"layers\.2 .*hidden states at a token depend on the tokens before it",
    convolution: r"layers\.2 .*hidden states at a token depend on the tokens before it",
    running_mean: r"layers\.2 .*hidden states at a token depend on the tokens before it",
    batch_statistic: r"layers\.2 .*differ when given other tokens beside them in the batch",
    length_factor: r"layers\.2 .*depend on how many tokens it is given",
    own_positions: r"layers\.2 .*depend on how many tokens it is given, or on its place",
    learnt_positions: r"hidden states before layers\.0 .*positions that it counts itself",
    biased_attention: r"layers\.0 .*'test_biased'\) does not give the softmax",
}
