"""Chunked exact training on the CPU beside ordinary training with checkpointing and torch's SDPA.

    python bench/cpu_training.py                       # the project's bar: at most 1.6 x the time
    python bench/cpu_training.py --tokens 2048 --chunk 512

One step of each in turn, forward and backward of the same model on the same tokens, in float32; the
losses and gradients are compared as well.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time

import torch
from support.record import write_record
from transformers import AutoModelForCausalLM, Qwen2Config

import oomb
from oomb import _C


def make_model(tokens: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return AutoModelForCausalLM.from_config(config)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's CPU time, for a machine that is busy"
    )
    parser.add_argument(
        "--keep-outputs", default="auto", help="auto, all, none or a share: Config(keep_outputs=…)"
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write the numbers here")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    if arguments.cpu_time:
        torch.set_num_threads(1)
    _C.set_num_threads(torch.get_num_threads())

    ids = torch.randint(0, 32000, (1, arguments.tokens), generator=torch.Generator().manual_seed(1))
    model = make_model(arguments.tokens)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.0f}M parameters, {arguments.tokens} tokens, chunk {arguments.chunk}")

    ordinary_model = make_model(arguments.tokens)
    ordinary_model.gradient_checkpointing_enable({"use_reentrant": False})
    ordinary_model.train()
    keep = arguments.keep_outputs
    keep = keep if keep in ("auto", "none", "all") else float(keep)
    config = oomb.Config(chunk_size=arguments.chunk, keep_outputs=keep)
    times: dict[str, list[float]] = {"ordinary": [], "chunked": []}
    losses: dict[str, float] = {}
    with oomb.Engine(model, config) as engine:
        few = ids[:, : 2 * arguments.chunk]  # warm-up
        ordinary_model(input_ids=few, labels=few, use_cache=False).loss.backward()
        engine.forward_backward(input_ids=few, labels=few)
        for turn in range(arguments.repeat):
            for name in times:
                (ordinary_model if name == "ordinary" else model).zero_grad()
                start = clock()
                if name == "ordinary":
                    loss = ordinary_model(input_ids=ids, labels=ids, use_cache=False).loss
                    loss.backward()
                else:
                    loss = engine.forward_backward(input_ids=ids, labels=ids).loss
                times[name].append(clock() - start)
                losses[name] = float(loss.detach())
                print(f"{turn}: {name:9} {times[name][-1]:7.2f} s, loss {losses[name]:.6f}")

    pairs = zip(gradients(model), gradients(ordinary_model), strict=True)
    worst = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["chunked"] / medians["ordinary"]
    print(f"chunked takes {ratio:.2f} x the time; largest relative gradient difference {worst:.1e}")
    if arguments.json:
        record = {
            "tokens": arguments.tokens,
            "chunk": arguments.chunk,
            "keep_outputs": keep,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "clock": "cpu" if arguments.cpu_time else "wall",
            "seconds": medians,
            "ratio": ratio,
            "loss": losses,
            "largest_gradient_difference": worst,
        }
        write_record(arguments.json, record)


if __name__ == "__main__":
    main()
