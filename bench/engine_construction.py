"""Seconds that making an engine takes, nearly all of it the check of the model.

    python bench/engine_construction.py [--size tiny|7b] [--device cuda] [--repeats 3]

The first time includes what a device and its libraries load once.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import oomb

_SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=_SIZES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES[arguments.size]))
    torch.set_default_dtype(torch.float32)
    for _ in range(arguments.repeats):
        begin = time.perf_counter()
        oomb.Engine(model).close()
        print(f"{arguments.size} on {arguments.device}: {time.perf_counter() - begin:.2f} s")


if __name__ == "__main__":
    main()
