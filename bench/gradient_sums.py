"""Sums of parameter gradients in fp32, in bf16 rounded stochastically, and in bf16 to nearest.

    python bench/gradient_sums.py [--chunks 64 256 1024] [--steps 100] [--json out.json]

Every chunk's gradient of a small bf16 model is added to four sums at once: fp64, to compare with,
and the three. Errors are relative (norms over all weights of linear layers). Then the model trains
with AdamW from the same weights on the same text, once with each kind of sum. Runs on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from support.record import write_record
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import oomb
from oomb.cli.demo_text import python_source
from oomb.core import main_grad
from oomb.core.main_grad import MainGrads
from oomb.core.rounded_sums import add_rounded, seed_of_addition

CHUNK, PAGE = 16, 8
KINDS = ("fp32", "bf16, stochastic", "bf16, nearest")


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**16,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def settings(kind: str) -> oomb.Config:
    dtype: Any = "float32" if kind == "fp32" else "bfloat16"
    return oomb.Config(chunk_size=CHUNK, page_size=PAGE, main_grad_dtype=dtype)


class AllSums(MainGrads):
    """Beside its own sums those of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[torch.Tensor, list[torch.Tensor]] = {}
        self.added: dict[torch.Tensor, int] = {}

    def _collect(self, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        if grad is not None and parameter.ndim == 2:
            kinds = (torch.float64, torch.float32, torch.bfloat16, torch.bfloat16)
            if parameter not in self.kinds:
                self.kinds[parameter] = [torch.zeros_like(grad, dtype=kind) for kind in kinds]
            exact, wide, rounded, nearest = self.kinds[parameter]
            addition = self.added[parameter] = self.added.get(parameter, 0) + 1
            for total in (exact, wide, nearest):
                total += grad
            add_rounded(rounded, grad, seed_of_addition(parameter.numel(), addition))
        super()._collect(parameter)


def errors(tokens: torch.Tensor) -> dict[str, float]:
    model = make_model()
    with oomb.Engine(model, settings("fp32")) as engine:
        engine._grads = engine._calls._grads = sums = AllSums()
        engine.forward_backward(tokens, tokens)
    found = {}
    for place, kind in enumerate(KINDS, start=1):
        error = sum(float((all_[place] - all_[0]).norm() ** 2) for all_ in sums.kinds.values())
        norm = sum(float(all_[0].norm() ** 2) for all_ in sums.kinds.values())
        found[kind] = (error / norm) ** 0.5
    return found


def curve(kind: str, text: torch.Tensor, steps: int, tokens: int) -> list[float]:
    """Mean loss of each tenth of the steps."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    plain = main_grad.add_rounded
    if kind == "bf16, nearest":
        main_grad.add_rounded = lambda total, addend, seed: total.add_(addend)  # type: ignore[assignment]
    losses = []
    try:
        with oomb.Engine(model, settings(kind)) as engine:
            for step in range(steps):
                ids = text[None, step * tokens : (step + 1) * tokens]
                losses.append(float(engine.forward_backward(ids, ids).loss))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        main_grad.add_rounded = plain
    size = steps // 10
    return [sum(losses[i * size : (i + 1) * size]) / size for i in range(10)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1024, help="of a training step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = python_source().train[: 2**20].long()
    print("error of the sums\nchunks  " + "  ".join(f"{kind:>16}" for kind in KINDS))
    record: dict[str, Any] = {"errors": {}, "curves": {}}
    for chunks in options.chunks:
        found = record["errors"][chunks] = errors(text[None, : chunks * CHUNK + 1])
        print(f"{chunks:6d}  " + "  ".join(f"{found[kind]:16.2e}" for kind in KINDS), flush=True)
    print(f"mean loss of each tenth of {options.steps} steps of {options.tokens // CHUNK} chunks")
    for kind in KINDS:
        losses = record["curves"][kind] = curve(kind, text, options.steps, options.tokens)
        print(f"{kind:>16}  " + " ".join(f"{loss:.4f}" for loss in losses), flush=True)
    if options.json is not None:
        write_record(options.json, record)


if __name__ == "__main__":
    main()
