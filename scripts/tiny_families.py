"""Every causal language model class of the installed transformers, tiny and with random weights:
what an engine says of it, and how far its gradients are from ordinary ones.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import oomb
from oomb.model.own_attention import watched_attention

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))
from engine.recurrent_models import nothing_rounds_to_float32

FAMILIES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # with the names of classes
LIMIT = 1e-12  # of a parameter's gradient in fp64, relative
_LIMIT_IN_FP32 = 1e-4

# What makes a config tiny, under any of its names; a config takes those that it has.
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "d_model": 48,
    "n_embd": 48,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "n_inner": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "num_layers": 2,
    "num_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_attention_heads": 6,
    "attention_heads": 6,
    "n_head": 6,
    "num_heads": 6,
    "num_key_value_heads": 2,
    "multi_query_group_num": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "kv_channels": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "max_seq_len": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "state_size": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "sliding_window": 12,
    "attention_chunk_size": 12,
    "attn_logit_softcapping": 2.0,  # so low that caps are felt
    "final_logit_softcapping": 3.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
    "layerdrop": 0.0,
    "is_decoder": True,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
_SHARED_BLOCKS: dict[str, Any] = {
    "num_hidden_layers": 4,  # two of them share their attention
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "n_mamba_heads": 2,
}
_DOTS3_NOTE: dict[str, Any] = {
    "layer_types": ["indexed_attention", "sliding_attention"],
    "head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 6,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,  # that of its two parts
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
}
_QWEN4_EXP: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
}
# A drafter: all of its layers read keys and values of another model's.
_ASSISTANT_TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
}
# What a family needs besides.
_OWN: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_chunk_size": 16},
    "mamba2": {"expand": 2, "num_heads": 6, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 12},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "dots1": {"layer_types": None, "max_window_layers": 1, "n_shared_experts": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "zamba": _SHARED_BLOCKS,
    "zamba2": _SHARED_BLOCKS,
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "nemotron_h": {"n_groups": 1, "layers_block_type": ["mamba", "attention"]},
    "gptj": {"rotary_dim": 4},
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "mimo_v2_flash": {
        "num_key_value_heads": 2,
        "num_attention_heads": 8,  # layers with a window have twice the key heads
        "head_dim": 24,  # a third of it rotates
        "v_head_dim": 16,
    },
    "deepseek_v32": {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "glm_moe_dsa": {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": [16, 32], "axial_pos_shape": [8, 8]},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v3": {"first_k_dense_replace": 1},
    # Padding stands for images too, which a text has none of.
    "gemma4": dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), 0),
    "gemma4_unified": dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), 0),
    "dots3_note": _DOTS3_NOTE,
    "dots3_note_text": _DOTS3_NOTE,
    "qwen4_exp": _QWEN4_EXP,
    "qwen4_exp_text": _QWEN4_EXP,
    "gemma3n_text": {"activation_sparsity_pattern": [0.0, 0.0]},
}
_SECONDS = 60  # that one family may take


@dataclass(frozen=True)
class Verdict:
    """What is known of a family.

    Attributes:
        kind: exact, wrong, refused, crash or not built.
        reason: why, where it is not exact; one sentence.
        error: the worst parameter's relative error.
        marks: what its attention has in the run, in the words of the page.
        mixers: classes that hand on states.
    """

    kind: str
    reason: str = ""
    error: float = 0.0
    marks: tuple[str, ...] = ()
    mixers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason or f'{self.error:.0e}'}"


class _Late(Exception):
    pass


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise _Late(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def config_of(family: str) -> Any:
    """The config that the family's class takes, with that class's own sizes."""
    kind = getattr(transformers, FAMILIES[family]).config_class
    return kind(text_config=_ASSISTANT_TEXT) if family == "gemma4_assistant" else kind()


def tiny_config(family: str) -> Any:
    """The same made small; parts of it (text, decoder) as well."""
    known = config_of(family).to_dict()
    kind = getattr(transformers, FAMILIES[family]).config_class
    settings = {name: value for name, value in _SIZES.items() if _has(kind, known, name)}
    for name, part in known.items():
        if name.endswith("_config") and isinstance(part, dict):
            settings[name] = {inner: value for inner, value in _SIZES.items() if inner in part} | (
                {"model_type": part["model_type"]} if "model_type" in part else {}
            )
            _shorten(settings[name], part, settings[name].get("num_hidden_layers", 2))
    if "kv_lora_rank" in known:  # latent attention has a key for each query head
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    _shorten(settings, known, settings.get("num_hidden_layers", 2))
    if family == "gemma4_assistant":
        settings["text_config"] |= _ASSISTANT_TEXT
    config = kind(**{**settings, **_OWN.get(family, {})})
    if family == "gemma3n":  # its own tower is timm's; another one stands there, as text meets none
        own = config.vision_config
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        tower = transformers.SiglipVisionConfig(**sizes, num_attention_heads=2, image_size=28)
        for name in ("vocab_offset", "vocab_size", "rms_norm_eps"):
            setattr(tower, name, getattr(own, name))
        vars(config)["vision_config"] = tower
    return config


def _shorten(settings: dict[str, Any], known: dict[str, Any], layers: int) -> None:
    """Each kind of layer once, as far as there is room."""
    for name, value in known.items():
        if isinstance(value, list) and value and name.endswith("layer_types"):
            kinds = list(dict.fromkeys(value))
            settings[name] = (kinds * layers)[:layers]


def _has(kind: Any, known: dict[str, Any], name: str) -> bool:
    return name in known or name in getattr(kind, "attribute_map", {})


def build(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The family's causal model with random weights of unit gain, in eval mode."""
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[family])(tiny_config(family))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.empty_like(weight, dtype=torch.float32).normal_(generator=generator)
            if "norm" in name or "ln_" in name:
                weight.copy_(1 + 0.2 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.2 * noise)
            elif "embed" in name or "wte" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
    model = model.to(dtype).eval()
    model.set_experts_implementation("eager")  # the others know no fp64
    return model  # type: ignore[no-any-return]


def worst_gradient(model: nn.Module) -> float:
    """Largest relative error of a parameter's gradient, chunked against ordinary."""
    ids = torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    ordinary = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        engine.forward_backward(ids, ids)
    scale = max(float(g.norm()) for g in ordinary.values())
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name in ordinary and float(ordinary[name].norm()) > 1e-9 * scale:
            ours = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            error = (ours - ordinary[name]).norm() / ordinary[name].norm()
            worst = max(worst, float(error.nan_to_num(math.inf)))
    assert ordinary and all(bool(g.isfinite().all()) for g in ordinary.values())
    return worst


def _marks(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What its attention has, in words, and the classes of its mixers."""
    caps, sinks = set(), set()

    def seen(call: Any, *_: Any) -> None:
        caps.add(call.softcap > 0)
        sinks.add(call.sinks is not None)

    with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
        shapes, mixers = engine._shapes, [type(x.module).__name__ for x in engine._model.mixers]
    with torch.no_grad(), watched_attention(seen):
        model(input_ids=torch.arange(3, 23)[None], use_cache=False)
    found = {
        "latents": any(shape.latent for shape in shapes),
        "window": any(shape.window and not shape.block for shape in shapes),
        "blocks": any(shape.block for shape in shapes),
        "sinks": True in sinks,
        "soft cap": True in caps,
    }
    return tuple(name for name, there in found.items() if there), tuple(dict.fromkeys(mixers))


def verdict(family: str, make: Callable[..., nn.Module] = build) -> Verdict:
    """What an engine says of a family, and how far its gradients are from ordinary ones.

    fp64 where the model's own forward knows it, with norms, recurrences and softmax kept there;
    else fp32, which the reason then says.
    """
    found = _verdict(family, make, torch.float64)
    if found.kind == "refused" and "its own forward fails" in found.reason:
        single = _verdict(family, make, torch.float32)
        if single.kind == "wrong" and single.error < _LIMIT_IN_FP32:
            return replace(single, kind="exact", reason="in fp32: its own forward knows no fp64")
        return single
    return found


def _verdict(family: str, make: Callable[..., nn.Module], dtype: torch.dtype) -> Verdict:
    kept_in_fp64 = nothing_rounds_to_float32() if dtype == torch.float64 else nullcontext()
    try:
        with _limited(_SECONDS):
            model = make(family, dtype)
    except Exception as error:  # whatever a config of another kind of model raises
        return Verdict("not built", sentence(error))
    try:
        with _limited(_SECONDS), kept_in_fp64:
            marks, mixers = _marks(model)
            error = worst_gradient(model)
    except oomb.UnsupportedModelError as refusal:
        return Verdict("refused", sentence(refusal))
    except Exception as crash:
        return Verdict("crash", f"{type(crash).__name__}: {sentence(crash)}")
    kind = "exact" if error < LIMIT else "wrong"
    return Verdict(kind, "", error, marks, mixers)


def sentence(error: Exception) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A config's check names itself first, and then what it found.
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] += " " + lines[1]
    return lines[0] if lines else type(error).__name__
