"""Every causal language model class of the installed transformers, tiny and random: what an engine
says of it at construction, and, if it takes it, how far its gradients are from ordinary ones.

    python scripts/model_families.py [--only NAME ...] [--out FILE] [--against FILE] [--page FILE]

A line each: family, ``exact`` (and the worst parameter's error in fp64), ``wrong`` (likewise),
``refused`` and why, ``cannot be built`` or ``crash``. ``--against`` prints what differs from a file
of another version; ``--page`` writes docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from published_sizes import section
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import oomb

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
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 2},
    "zamba2": {
        "num_hidden_layers": 4,  # two of them share their attention
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 2,
    },
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
    "gemma3n_text": {"activation_sparsity_pattern": [0.0, 0.0]},
}
_SECONDS = 60  # that one family may take


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


def tiny_config(family: str, classes: str) -> Any:
    """The config that the class takes, made small; parts of it (text, decoder) as well."""
    kind = getattr(transformers, classes).config_class
    known = kind().to_dict()
    settings = {name: value for name, value in _SIZES.items() if _has(kind, known, name)}
    for name, part in known.items():
        if name.endswith("_config") and isinstance(part, dict):
            settings[name] = {inner: value for inner, value in _SIZES.items() if inner in part} | (
                {"model_type": part["model_type"]} if "model_type" in part else {}
            )
    if "kv_lora_rank" in known:  # latent attention has a key for each query head
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    layers = settings.get("num_hidden_layers", 2)
    for name, value in known.items():
        if isinstance(value, list) and value and name.endswith("layer_types"):
            kinds = list(dict.fromkeys(value))  # each kind of layer once, as far as there is room
            settings[name] = (kinds * layers)[:layers]
    return kind(**{**settings, **_OWN.get(family, {})})


def _has(kind: Any, known: dict[str, Any], name: str) -> bool:
    return name in known or name in getattr(kind, "attribute_map", {})


def build(family: str, classes: str) -> nn.Module:
    """The family's causal model with random weights of unit gain, in fp64 and eval mode."""
    torch.manual_seed(0)
    model = getattr(transformers, classes)(tiny_config(family, classes))
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
    model = model.double().eval()
    model.set_experts_implementation("eager")  # the others know no fp64
    return model  # type: ignore[no-any-return]


def worst_gradient(model: nn.Module) -> float:
    """Largest relative error of a parameter's gradient, chunked against ordinary, in fp64."""
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
            worst = max(worst, float(error))
    return worst


def verdict(family: str, classes: str, make: Callable[[str, str], nn.Module] = build) -> str:
    """One line on a family."""
    try:
        with _limited(_SECONDS):
            model = make(family, classes)
    except Exception as error:  # whatever a config of another kind of model raises
        return f"cannot be built: {_first_line(error)}"
    try:
        with _limited(_SECONDS):
            with oomb.Engine(model, oomb.Config(chunk_size=16, page_size=8)) as engine:
                handed = "states" if engine._model.mixers else "pages"
            error = worst_gradient(model)
    except oomb.UnsupportedModelError as refusal:
        return f"refused: {_first_line(refusal)}"
    except Exception as crash:
        return f"crash: {type(crash).__name__}: {_first_line(crash)}"
    # Norms and routers round to fp32 inside, so fp64 models agree to about 1e-7.
    return f"{'exact' if error < 1e-4 else 'wrong'}: {error:.0e} ({handed})"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:240] if str(error) else type(error).__name__


_HEAD = """# Models

What an engine says of every causal language model class of transformers {version}, tiny and with
random weights, and how its gradients compare with one ordinary backward in fp64. This page is
written by `python scripts/model_families.py --page docs/models.md`.

{exact} families are exact, {refused} are refused, {wrong} are wrong or crash, and {unbuilt} cannot
be made tiny by the script. Gradients agree to 1e-12 where a model's own code stays in fp64; norms,
routers and recurrences that round to fp32 agree to about 1e-7. Layers may differ in heads and head
dims, and read one another's keys and values, as in the released sizes of Gemma 4. These runs are on
text; [images and videos](vision.md) says which families also take images exactly.

On a GPU attention runs on tensor cores with heads of up to 512 in bf16 and fp16, of up to 256 on
consumer cards, in pages of 64 or 128 tokens. Heads of another size than 64, 96, 128, 256 and 512
get zeros behind them, up to the next of these: 192 and 128 of latent attention become 256, and 80
becomes 96. The 512 of Gemma 4's global layers run on the plain kernels on consumer cards, and so do
heads below 32 everywhere; these kernels are slow. Soft caps (Gemma 2, VaultGemma) run on the
kernels for every GPU, on Hopper too.
"""
_PARTS = (
    ("Exact, with keys and values alone", "exact", "(pages)", ""),
    (
        "Exact, with states of recurrences or convolutions",
        "exact",
        "(states)",
        "From transformers 5.21 on. [usage](usage.md#recurrent-layers) says which kernels run.\n\n",
    ),
)


def page(verdicts: dict[str, str]) -> str:
    """docs/models.md."""
    kinds = [text.split(":")[0] for text in verdicts.values()]
    head = _HEAD.format(
        version=transformers.__version__,
        exact=kinds.count("exact"),
        refused=kinds.count("refused"),
        wrong=kinds.count("wrong") + kinds.count("crash"),
        unbuilt=kinds.count("cannot be built"),
    )
    parts = ["\n\n".join(_wrapped(part) for part in head.split("\n\n"))]
    for title, kind, end, note in _PARTS:
        names = [f"`{n}`" for n, x in verdicts.items() if x.startswith(kind) and x.endswith(end)]
        parts.append(f"## {title}\n\n{note}{_wrapped(', '.join(names))}")
    parts.append(section())
    for title, kind in (("Refused", "refused"), ("Not built", "cannot be built")):
        rows = [
            _wrapped(f"- `{name}`: {text.split(': ', 1)[1] or 'no reason given'}")
            for name, text in verdicts.items()
            if text.startswith(kind)
        ]
        parts.append(f"## {title}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    if text.startswith("#"):
        return text
    indent = "  " if text.startswith("- ") else ""
    words = " ".join(text.split())
    return textwrap.fill(
        words, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", help="families, by their model_type")
    parser.add_argument("--out", type=Path, help="write verdicts as JSON")
    parser.add_argument("--against", type=Path, help="print what differs from this JSON")
    parser.add_argument("--page", type=Path, help="write docs/models.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    verdicts: dict[str, str] = {}
    for family, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if arguments.only and family not in arguments.only:
            continue
        verdicts[family] = verdict(family, classes)
        print(f"{family}: {verdicts[family]}", flush=True)
    kinds = [text.split(":")[0] for text in verdicts.values()]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))}, file=sys.stderr)
    if arguments.out:
        arguments.out.write_text(json.dumps(verdicts, indent=1) + "\n")
    if arguments.page:
        arguments.page.write_text(page(verdicts))
    if arguments.against:
        before = json.loads(arguments.against.read_text())
        for family, text in verdicts.items():
            was = before.get(family, "not there")
            if was.split(":")[0] != text.split(":")[0]:
                print(f"- {family}: {was}\n+ {family}: {text}")


if __name__ == "__main__":
    main()
