"""Hashes losses and gradients of many configurations, to show that a change altered no bit.

    python scripts/same_bits.py --out before.json       # at the commit before, on the same machine
    python scripts/same_bits.py --against before.json   # after it; exit 1 where a bit differs

Uses public names alone, so that it runs at any commit. Bits are those of one machine: processors
with other vector widths add in another order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers

import oomb

VOCABULARY, TOKENS, CHUNK, PAGE = 61, 149, 32, 8
SMALL_TIER = 40 << 10  # bytes: a few pages of the fp32 models below
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "phi3": ("Phi3", {}),
    "granite": ("Granite", {"logits_scaling": 3.0, "residual_multiplier": 0.7}),
    "cohere": ("Cohere", {"logit_scale": 0.2}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS}),
    "olmo2": ("Olmo2", {}),
    "one-layer": ("Llama", {"num_hidden_layers": 1}),
}
TOPK = oomb.TopKPages(budget=3)


@dataclass(frozen=True)
class Case:
    """One configuration: a family, the engine's settings, and what the batch looks like."""

    family: str
    variant: str
    settings: dict[str, Any] = field(default_factory=dict)
    batch: str = "one"
    dtype: torch.dtype = torch.float32
    autocast: bool = False

    @property
    def name(self) -> str:
        return f"{self.family} {self.variant}"


def cases() -> Iterator[Case]:
    """Every family in five ways, one family in all others."""
    for family in FAMILIES:
        yield Case(family, "dense")
        yield Case(family, "dense, spilled", {"device_memory": SMALL_TIER})
        yield Case(family, "sparse", {"attention": TOPK})
        yield Case(family, "documents", batch="documents")
        yield Case(family, "bf16", dtype=torch.bfloat16)
    spilled = {"device_memory": SMALL_TIER}
    sparse = {"attention": TOPK}
    for variant, settings in {
        "token_softmax": {"attention": oomb.TopKPages(budget=3, score="token_softmax")},
        "per head": {"attention": oomb.TopKPages(budget=3, share="kv_head")},
        "sinks and recent": {"attention": oomb.TopKPages(budget=4, sink_pages=1, recent_pages=1)},
        "sparse, spilled": {**sparse, **spilled},
        "sampled": {"backward": oomb.SampledChunks(keep=0.5, seed=3)},
        "sampled, sparse": {"backward": oomb.SampledChunks(keep=0.5, seed=5, cap=1.5), **sparse},
        "recompute": {"recompute": "layer"},
        "no recompute, spilled": {"recompute": "none", **spilled},
        "bf16 gradient pages": {"kv_grad_dtype": "bfloat16"},
        "bf16 gradient pages, spilled": {"kv_grad_dtype": "bfloat16", **spilled},
        "pages of 16": {"page_size": 16},
        "chunks of 64": {"chunk_size": 64},
        "float64 angles": {"rope_angles": "float64"},
    }.items():
        yield Case("qwen3", variant, settings)
    for batch in ("padded", "documents"):
        yield Case("llama", f"{batch}, sparse, spilled", {**sparse, **spilled}, batch)
        yield Case("qwen3", f"{batch}, fp64", {}, batch, torch.float64)
    for family in ("llama", "gpt-oss"):
        yield Case(family, "padded", batch="padded")
        yield Case(family, "weighted", batch="weighted")
        yield Case(family, "autocast", autocast=True)
        yield Case(family, "autocast, sparse, spilled", {**sparse, **spilled}, autocast=True)
        yield Case(family, "bf16, spilled", spilled, dtype=torch.bfloat16)


def model_of(case: Case) -> torch.nn.Module:
    """Random weights of unit gain, so that a wrong page would show."""
    prefix, own = FAMILIES[case.family]
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **own})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.empty_like(parameter).normal_(generator=generator)
        scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        parameter.data = parameter.data * (parameter.ndim == 1) + scale * noise
    if prefix == "GptOss":
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
    return model.to(case.dtype).eval()


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """Arguments of a call."""
    generator = torch.Generator().manual_seed(2)
    rows = 2 if kind == "padded" else 1
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, 90:] = 0
        batch["labels"][1, 90:] = -100
    if kind == "documents":
        lengths = torch.tensor([31, 1, 40, TOKENS - 72])
        batch["document_ids"] = torch.arange(4).repeat_interleave(lengths)[None]
    if kind == "weighted":
        batch["loss_weights"] = torch.rand(ids.shape, generator=generator)
    return batch


def digest(case: Case) -> str:
    """Hash of the loss, of every gradient, and of an evaluation's log-probabilities."""
    model = model_of(case)
    config = oomb.Config(**{"chunk_size": CHUNK, "page_size": PAGE, **case.settings})
    result = hashlib.sha256()
    around = torch.autocast("cpu", dtype=torch.bfloat16) if case.autocast else nullcontext()
    with oomb.Engine(model, config) as engine, around:
        batch = batch_of(case.batch)
        step = engine.forward_backward(**batch)
        evaluated = engine.evaluate(**batch, return_logprobs=True)
    tensors = [step.loss, evaluated.loss, evaluated.logprobs]
    tensors += [p.grad for _, p in sorted(model.named_parameters())]
    for tensor in tensors:
        assert tensor is None or tensor.isfinite().all(), case.name
        if tensor is not None:
            flat = tensor.detach().contiguous().reshape(-1)
            result.update(flat.view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:24]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the hashes here")
    parser.add_argument("--against", type=Path, help="compare with hashes written before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hashes = {case.name: digest(case) for case in cases()}
    if arguments.out:
        arguments.out.write_text(json.dumps(hashes, indent=1) + "\n")
    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    differing = [name for name, value in hashes.items() if before.get(name, value) != value]
    for name in differing:
        print(f"differs: {name}")
    print(f"{len(hashes)} configurations, {len(before)} compared, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
