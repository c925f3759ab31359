"""Held-out loss of a small model trained from scratch: ordinary, chunked, page-sparse, sampled.

    python bench/loss_curves.py --json curves.json --plot curves.png

Every method sees the same text in the same order from the same weights, once per seed. The text is
the source of Python's library, one token per byte; the loss is in nats per byte, of files that are
not trained on, always under exact attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import oomb
from oomb.cli.demo_model import ordinary_loss
from oomb.cli.demo_text import Text, python_source

METHODS = ("ordinary", "exact", "sparse", "sampled 1/2", "sampled 1/4")
BUDGET_SHARE = 4  # a block sees one of so many past pages at the end of a sequence


def make_model(options: argparse.Namespace, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 256),
        head_dim=64,
        max_position_embeddings=options.tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: PreTrainedModel = Qwen2ForCausalLM(config).to(options.device)
    model.set_attn_implementation("sdpa")
    return model


def settings_of(method: str, options: argparse.Namespace, seed: int) -> oomb.Config:
    chunk, page = options.tokens // 16, options.tokens // 128
    settings: dict[str, Any] = {"chunk_size": chunk, "page_size": page}
    if method == "sparse":
        budget = options.tokens // page // BUDGET_SHARE
        settings["attention"] = oomb.TopKPages(budget=budget, sink_pages=1, recent_pages=2)
    if method.startswith("sampled"):
        settings["backward"] = oomb.SampledChunks(keep=1 / int(method[-1]), seed=seed, cap=2.0)
    return oomb.Config(**settings)


def train(method: str, seed: int, text: Text, options: argparse.Namespace) -> list[float]:
    """Held-out loss after each ``options.every`` steps, the untrained model's first."""
    model = make_model(options, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, options.steps)
    held_out = text.held_out_batch(options.tokens).to(options.device)
    exact = settings_of("exact", options, seed)
    losses = []

    def evaluate() -> None:
        with oomb.Engine(model, exact) as judge:
            losses.append(float(judge.evaluate(held_out, held_out).loss))

    def measured(step: int) -> bool:
        return step % options.every == 0 or step == options.steps

    start = seed * text.train.numel() // 7  # seeds read different parts first
    evaluate()
    with oomb.Engine(model, settings_of(method, options, seed)) as engine:
        for step in range(1, options.steps + 1):
            ids = text.batch(start + (step - 1) * options.tokens, options.tokens)
            ids = ids.to(options.device)
            if method == "ordinary":
                ordinary_loss(model, ids).backward()
            else:
                engine.forward_backward(ids, ids)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if measured(step):
                evaluate()
    return losses


def draw(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for method, runs in record["curves"].items():
        mean = [statistics.fmean(point) for point in zip(*runs, strict=True)]
        line = axes.plot(record["steps"], mean, label=method)[0]
        low, high = ([f(p) for p in zip(*runs, strict=True)] for f in (min, max))
        axes.fill_between(record["steps"], low, high, alpha=0.15, color=line.get_color())
    axes.set_xlabel("steps")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=16384, help="per sequence and step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()

    text = python_source()
    marks = [s for s in range(options.steps + 1) if s % options.every == 0 or s == options.steps]
    curves: dict[str, list[list[float]]] = {method: [] for method in options.methods}
    given = {k: v for k, v in vars(options).items() if k not in ("json", "plot")}
    record: dict[str, Any] = {"arguments": given, "steps": marks, "curves": curves}
    for seed in range(options.seeds):
        for method in options.methods:
            began = time.perf_counter()
            curves[method].append(train(method, seed, text, options))
            seconds = time.perf_counter() - began
            print(f"seed {seed}  {method:12} {curves[method][-1][-1]:.4f}  {seconds:.0f} s")
            if options.json is not None:
                options.json.write_text(json.dumps(record, indent=1))
    base = [run[-1] for run in curves[options.methods[0]]]
    print(f"\nfinal held-out loss, and its difference from {options.methods[0]!r}, per seed")
    for method, runs in curves.items():
        gaps = [run[-1] - other for run, other in zip(runs, base, strict=True)]
        mean = statistics.fmean(run[-1] for run in runs)
        print(f"{method:12} {mean:.4f}   " + "  ".join(f"{gap:+.4f}" for gap in gaps))
    if options.plot is not None:
        draw(record, options.plot)


if __name__ == "__main__":
    main()
