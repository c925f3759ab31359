"""How far losses after steps of AdamW move by legal roundings of the same mathematics, on a CPU.

    python bench/rounding_after_updates.py --learning-rate 1e-2

A small Qwen2 of random weights takes the same steps in several ways: as transformers has it; with
attention composed by torch, or by transformers; with the loss as the sum of two halves, each
back-propagated; with fp32 weights' gradients, rounded once; and through the engine. Printed is each
loss's difference from the first way's, of the loss. Ways that are all right agree to rounding in
fp32. In bf16 they show what rounding makes of an update.
"""

from __future__ import annotations

import argparse
import copy
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen2Config, Qwen2ForCausalLM

import oomb

_SIZES = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
_WAYS = ("stock", "math", "eager", "halves", "fp32 gradients", "ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    given = parser.parse_args()
    for seed in range(given.seeds):
        losses = {way: run(way, seed, given) for way in _WAYS}
        stock = losses.pop("stock")
        print(f"seed {seed}, {given.dtype}: losses {', '.join(f'{x:.4f}' for x in stock)}")
        for way, found in losses.items():
            apart = [abs(x - y) / y for x, y in zip(found, stock, strict=True)]
            print(f"  {way:15s}" + "".join(f" {x:9.1e}" for x in apart), flush=True)


def run(way: str, seed: int, given: argparse.Namespace) -> list[float]:
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**_SIZES)).to(getattr(torch, given.dtype))
    if way == "eager":
        model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, _SIZES["vocab_size"], (1, given.tokens), generator=generator)
    losses = []
    with oomb.Engine(model, oomb.Config(chunk_size=128)) if way == "ours" else nullcontext() as own:
        step = partial(gradient, way, model, ids) if own is None else partial(
            own.forward_backward, ids, ids
        )  # fmt: skip
        for _ in range(given.steps):
            taken = step()
            losses.append(float(taken if own is None else taken.loss))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def gradient(way: str, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Add a step's gradient to that of the parameters; returns the loss."""
    if way == "fp32 gradients":
        wide = copy.deepcopy(model).float()
        loss = wide(ids, labels=ids, use_cache=False).loss
        loss.backward()
        for parameter, exact in zip(model.parameters(), wide.parameters(), strict=True):
            parameter.grad = exact.grad.to(parameter.dtype)
    elif way == "halves":
        logits, targets = model(ids, use_cache=False).logits[0, :-1].float(), ids[0, 1:]
        border = len(targets) // 2
        parts = [
            F.cross_entropy(logits[place], targets[place], reduction="sum") / len(targets)
            for place in (slice(border), slice(border, None))
        ]
        for part in parts:
            part.backward(retain_graph=True)
        loss = sum(parts)
    else:
        with sdpa_kernel(SDPBackend.MATH) if way == "math" else nullcontext():
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
    return loss.detach()


if __name__ == "__main__":
    main()
