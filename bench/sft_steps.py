"""Steps of TRL's SFTTrainer: the stock one three ways, ours with the default Config, ours alone.

    python bench/sft_steps.py                                   # Qwen2.5-7B: needs 141 GB
    python bench/sft_steps.py --optimizer adafactor             # 80 GB
    python bench/sft_steps.py --model qwen2.5-0.5b --short 96 --long 0 --cpu --layers 2    # a try

Weights are random (the same in every run), one sequence is a step and every step has the same one,
so that a loss after a step shows that step's gradient. Each run has a process of its own.

First losses agree to ``--tolerance``. Later ones differ by what rounding makes of an update: the
first steps of Adam are nearly the gradient's signs, and updates of bf16 weights are rounded. How
much that is the stock trainer shows against itself, with attention by two other functions of torch
and transformers, which round elsewhere: the spread is the largest difference between two of these
runs. Ends with 1 where the first loss of ours is further off than the tolerance, or a later one
further from the stock trainer's than twice the spread. (Of four runs that differ by chance alone,
one is often further from a second than the other three from each other, but rarely twice as far.)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from support.trl_trainers import WORDS, Clock, Observed, in_own_process, tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomb.lengths import parse_length
from oomb.trace.shapes import SHAPES, random_model

GIB = 2**30
# The stock trainer's attention: torch's choice, its plain composition, transformers' own.
STOCK = {"stock": "sdpa", "stock-math": "sdpa", "stock-eager": "eager"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--short", default="4K", help="tokens where both trainers run")
    parser.add_argument("--long", default="64K", help="tokens where ours runs alone; 0: nowhere")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--optimizer", default="adamw_torch_fused")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of the first loss")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", choices=[*STOCK, "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        given.json.write_text(json.dumps(steps(given)))
        return
    short, long = parse_length("--short", given.short), given.long
    runs = [(name, short) for name in (*STOCK, "ours")]
    runs += [("ours", parse_length("--long", long))] if long != "0" else []
    found = []
    for trainer, tokens in runs:
        found.append(in_own_process("--run", trainer, "--tokens", str(tokens)))
        show(found[-1])
    losses = [run["losses"] for run in found]
    stock, ours = losses[: len(STOCK)], losses[len(STOCK)]
    spread = max(apart(x, y) for x, y in combinations(stock, 2))
    first, largest = apart(stock[0][:1], ours[:1]), apart(stock[0], ours)
    print(
        f"losses of ours and the stock trainer differ by {first:.2e} in the first step, at most "
        f"{largest:.2e}; those of the stock trainer with other attention by at most {spread:.2e}"
    )
    if given.json is not None:
        kept = {key: value for key, value in vars(given).items() if key not in ("run", "tokens")}
        record = {"settings": kept | {"json": None}, "runs": found}
        record |= {"first": first, "largest": largest, "spread": spread}
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    if not (first <= given.tolerance and largest <= 2 * max(spread, given.tolerance)):
        sys.exit(1)


def apart(some: list[float], others: list[float]) -> float:
    """The largest difference of two losses of the same step, of the first."""
    return max(abs(x - y) / x for x, y in zip(some, others, strict=True))


def steps(given: argparse.Namespace) -> dict[str, Any]:
    import trl
    from datasets import Dataset

    from oomb.hf import SFTTrainer

    device = "cpu" if given.cpu else "cuda"
    torch.manual_seed(0)
    model = random_model(
        SHAPES[given.model],
        device=device,
        dtype=torch.bfloat16,
        positions=max(given.tokens, 2**15),
        layers=given.layers,
    )
    if given.run in STOCK:
        model.set_attn_implementation(STOCK[given.run])
    row = torch.randint(3, WORDS, (given.tokens,), generator=torch.Generator().manual_seed(1))
    observed, clock = Observed(), Clock(device)
    own: dict[str, Any] = {"observer": observed} if given.run == "ours" else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = (trl.SFTTrainer if given.run in STOCK else SFTTrainer)(
            model,
            args=trl.SFTConfig(
                output_dir=folder,
                max_steps=given.steps,
                max_length=given.tokens,
                per_device_train_batch_size=1,
                optim=given.optimizer,
                learning_rate=given.learning_rate,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                bf16=False,  # weights are in it; no autocast
                use_cpu=given.cpu,
            ),
            train_dataset=Dataset.from_list([{"input_ids": row.tolist()}] * given.steps),
            processing_class=tokenizer(),
            callbacks=[clock],
            **own,
        )
        with sdpa_kernel(SDPBackend.MATH) if given.run == "stock-math" else nullcontext():
            trainer.train()
    log = trainer.state.log_history
    return {
        "trainer": given.run,
        "tokens": given.tokens,
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
        "seconds": clock.seconds,
        **observed.memory(device),
        "device": "CPU" if given.cpu else torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "trl": trl.__version__},
    }


def show(run: dict[str, Any]) -> None:
    memory = f"{run['torch_peak_bytes'] / GIB:.1f} GiB of torch"
    if run["trainer"] == "ours":
        memory += (
            f", pages {run['page_bytes'] / GIB:.2f} GiB, {run['host_bytes'] / GIB:.2f} on the host"
        )
    print(
        f"{run['trainer']:11s} {run['tokens']:>8,} tokens on {run['device']}: "
        f"losses {', '.join(f'{x:.5f}' for x in run['losses'])}; "
        f"norms {', '.join(f'{x:.4f}' for x in run['grad_norms'])}; "
        f"seconds {', '.join(f'{x:.2f}' for x in run['seconds'])}; {memory}",
        flush=True,
    )


if __name__ == "__main__":
    main()
