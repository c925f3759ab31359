"""Train on one long document, offline, with the model that `make demo` leaves in oomb-demo/model.

python examples/quickstart.py [--model FOLDER] [--text FILE] [--tokens N] [--steps N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import oomb  # isort: skip  (before torch: its waiting threads then sleep)
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="oomb-demo/model")
    parser.add_argument("--tokenizer", help="its folder or name; default: the model's own")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model)
    text = options.text.read_text(encoding="utf-8")
    input_ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : options.tokens]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    with oomb.Engine(model, oomb.Config(chunk_size=1024)) as engine:
        plan = engine.plan(input_ids.shape[1])
        print(f"{input_ids.shape[1]:,} tokens need about {plan.device_bytes / 2**20:.0f} MiB")
        for number in range(options.steps):
            step = engine.forward_backward(input_ids, labels=input_ids)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds = step.stats.fill_seconds + step.stats.sweep_seconds
            print(f"step {number}: loss {step.loss:.4f}, {seconds:.1f} s")
        after = engine.evaluate(input_ids, labels=input_ids)
    print(f"after {options.steps} steps: loss {after.loss:.4f}")


if __name__ == "__main__":
    main()
