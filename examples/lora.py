"""LoRA on one document through peft: only the adapters get gradients, the engine is the same.

python examples/lora.py [--model FOLDER] [--text FILE] [--tokens N] [--steps N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import oomb  # isort: skip  (before torch: its waiting threads then sleep)
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

# Of names that peft still uses.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="oomb-demo/model")
    parser.add_argument("--tokenizer", help="its folder or name; default: the model's own")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="oomb-demo/adapter")
    options = parser.parse_args()

    base = AutoModelForCausalLM.from_pretrained(options.model)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    model.print_trainable_parameters()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model)
    text = options.text.read_text(encoding="utf-8")
    input_ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, : options.tokens]

    with oomb.Engine(model, oomb.Config(chunk_size=1024)) as engine:
        for number in range(options.steps):
            step = engine.forward_backward(input_ids, labels=input_ids)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {number}: loss {step.loss:.4f}")
        after = engine.evaluate(input_ids, labels=input_ids)
    print(f"after {options.steps} steps: loss {after.loss:.4f}")
    model.save_pretrained(options.out)
    print(f"adapter: {options.out}")


if __name__ == "__main__":
    main()
