"""KiB per token that keys, values and states of published models take, for docs/models.md.

    python scripts/published_sizes.py [--only NAME ...] [--page FILE]

Sizes are those of the models' configs; what the pages take comes from a plan of a call, which runs
each model without weights. ``--page`` writes the table into docs/models.md, whose other parts
``scripts/model_families.py`` writes.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig

from oomb import Config
from oomb.model.layer_shape import LayerShape
from oomb.plan import Machine, Planner

TITLE = "KiB per token"
TOKENS = 128 * 1024
_KIB = 1024
_NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def _gemma4(layers: int, period: int, heads: int, others: int, **settings: Any) -> dict[str, Any]:
    """Every ``period``-th layer sees everything, with heads of 512 and ``others`` of keys."""
    kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
    return {
        "num_hidden_layers": layers,
        "layer_types": (kinds * layers)[:layers],
        "head_dim": 256,
        "global_head_dim": 512,
        "num_key_value_heads": heads,
        "num_global_key_value_heads": others,
        "vocab_size": 262144,
        **settings,
    }


# model: its model type, and what of its config is not the default of that type's class
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": (
        "llama",
        {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    ),
    "Llama 3.3 70B": (
        "llama",
        {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "vocab_size": 128256,
        },
    ),
    "Qwen2.5 7B": (
        "qwen2",
        {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
        },
    ),
    "Qwen3 8B": (
        "qwen3",
        {"num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12288},
    ),
    "Qwen3 32B": (
        "qwen3",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 25600,
        },
    ),
    "Qwen3 30B-A3B": ("qwen3_moe", {"num_hidden_layers": 48, "head_dim": 128}),
    "Qwen3.5 9B": ("qwen3_5_text", {}),
    "Qwen3.5 27B": (
        "qwen3_5_text",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "intermediate_size": 17408,
            "linear_num_value_heads": 48,
        },
    ),
    "Qwen3-Next 80B-A3B": ("qwen3_next", {}),
    "Gemma 3 12B": (
        "gemma3_text",
        {
            "hidden_size": 3840,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 15360,
            "sliding_window": 1024,
        },
    ),
    "Gemma 3 27B": (
        "gemma3_text",
        {
            "hidden_size": 5376,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "intermediate_size": 21504,
            "sliding_window": 1024,
        },
    ),
    "Gemma 4 E2B": (
        "gemma4_text",
        _gemma4(35, 5, 1, 1, hidden_size=1536, num_kv_shared_layers=20),
    ),
    "Gemma 4 E4B": (
        "gemma4_text",
        _gemma4(42, 6, 2, 2, hidden_size=2560, num_kv_shared_layers=18),
    ),
    "Gemma 4 31B": (
        "gemma4_text",
        _gemma4(
            60,
            6,
            16,
            4,
            hidden_size=5376,
            num_attention_heads=32,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            sliding_window=1024,
        ),
    ),
    "Llama 4 Scout": ("llama4_text", {}),
    "gpt-oss 20B": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss 120B": ("gpt_oss", {}),
    "Olmo 3 7B": ("olmo3", {}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "MiniCPM3 4B": ("minicpm3", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
        },
    ),
    "Nemotron 3 Nano 30B": (
        "nemotron_h",
        {
            "hidden_size": 2688,
            "layers_block_type": [
                {"M": "mamba", "E": "moe", "*": "attention"}[x] for x in _NEMOTRON_3_NANO
            ],
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a model keeps of a token, in KiB over all layers.

    Attributes:
        attending, layers: layers with attention, and all.
        heads: number and head dim of keys, or numbers of a latent, of each kind of layer.
        kv, gradients: what pages hold in bf16, and its gradients in fp32, at the sweep's begin.
        states: of recurrences and convolutions at the borders of chunks.
    """

    attending: int
    layers: int
    heads: tuple[str, ...]
    kv: float
    gradients: float
    states: float


def row_of(name: str) -> Row:
    """What the plan of an exact step on ``TOKENS`` tokens says of a model."""
    family, settings = MODELS[name]
    model = AutoConfig.for_model(family, **settings)
    planner = Planner(model, Machine.described(gpu="h200"))
    call = planner.pages(TOKENS + 1, Config(), 1)  # the last predicts nothing
    stored = call.filled * call.chunks.chunk_size  # tokens with pages: nothing reads the last chunk
    forward = replace(call, reach=None).page_slots
    gradients = call.page_slots - forward
    return Row(
        attending=len(planner.shapes),
        layers=len(planner.tracer.layers),
        heads=tuple(dict.fromkeys(map(_heads_of, planner.shapes))),
        kv=forward * call.layout.slot_bytes / stored / _KIB,
        gradients=gradients * call.layout.slot_bytes / stored / _KIB,
        states=planner.tracer.state_bytes / call.chunks.chunk_size / _KIB,
    )


def _heads_of(shape: LayerShape) -> str:
    return f"latent of {shape.latent}" if shape.latent else f"{shape.kv_heads} of {shape.head_dim}"


def line_of(name: str, row: Row) -> str:
    """A row of the table."""
    heads = ", ".join(row.heads)
    attending = str(row.layers)
    if row.attending != row.layers:
        attending = f"{row.attending} of {row.layers}"
    numbers = " | ".join(f"{x:,.0f}" for x in (row.kv, row.gradients, row.states))
    return f"| {name} | {attending} | {heads} | {numbers} |"


def section(names: Sequence[str] = tuple(MODELS)) -> str:
    """The part of docs/models.md."""
    config = Config()
    text = f"""What an exact step on {TOKENS:,} tokens keeps of each token at the begin
of the sweep, over all layers, in chunks of {config.chunk_size:,} and pages of {config.page_size}:
bf16 keys and values, their gradients in fp32 (`kv_grad_dtype="bfloat16"`: half of that), and states
of recurrences and convolutions at the borders of chunks (larger chunks: less). Of latent
attention pages hold the latents and the rotated key.
`python scripts/published_sizes.py --page docs/models.md` computes the table from the models'
configs. [oomb plan](plan.md) says what fits a machine."""
    rows = "\n".join(line_of(name, row_of(name)) for name in names)
    return (
        f"## {TITLE}\n\n{textwrap.fill(' '.join(text.split()), 100, break_on_hyphens=False)}\n\n"
        "| model | layers that attend | key heads | K and V | gradients | states |\n"
        f"|---|---|---|---|---|---|\n{rows}"
    )


def with_section(page: str, new: str) -> str:
    """A page with its table replaced."""
    found = re.compile(rf"^## {TITLE}.*?(?=\s*^## |\s*\Z)", re.DOTALL | re.MULTILINE)
    assert found.search(page), f"no '## {TITLE}' in the page"
    return found.sub(lambda _: new, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(MODELS), help="print these")
    parser.add_argument("--page", type=Path, help="write the table into docs/models.md")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.page:
        page = arguments.page.read_text()
        arguments.page.write_text(with_section(page, section()))
        return
    for name in arguments.only or MODELS:
        print(line_of(name, row_of(name)), flush=True)


if __name__ == "__main__":
    main()
