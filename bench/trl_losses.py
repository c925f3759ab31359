"""A preference pair, or completions of one prompt, in TRL's trainers: the stock ones and ours.

    python bench/trl_losses.py dpo --tokens 128K --stock 128K 96K 64K     # Qwen2.5-7B with LoRA
    python bench/trl_losses.py grpo --prompt 100K --completion 4K --completions 8 --stock-rows 2
    python bench/trl_losses.py dpo --model qwen2.5-0.5b --layers 2 --cpu --tokens 300 --stock 300

dpo: one step on a pair of rows of so many tokens, whose first half is the prompt. The stock trainer
tries the lengths of ``--stock`` in their order; at the first where it does not run out of memory
both are measured, and ours at ``--tokens`` too. grpo: one step on given completions (generation
is not measured); the stock trainer takes one row at a time, ``--stock-rows`` of them, and its
seconds are multiplied to as many as there are. Weights are random, gradient checkpointing is on in
the stock trainer (TRL's default), and TRL's own fused head computes its losses. Each run has a
process of its own, whose first step is short and not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from support.record import write_record
from support.trl_trainers import WORDS, Clock, Observed, in_own_process, tokenizer

from oomb.lengths import parse_length
from oomb.trace.shapes import SHAPES, random_model

GIB = 2**30
SHORT = 512  # tokens of the step that is not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["dpo", "grpo"])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--tokens", default="128K", help="dpo: of each row, ours")
    parser.add_argument("--stock", nargs="*", default=["64K"], help="dpo: lengths, longest first")
    parser.add_argument("--prompt", default="100K", help="grpo: tokens")
    parser.add_argument("--completion", default="4K", help="grpo: tokens of each")
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--stock-rows", type=int, default=2, help="grpo: 0: no stock trainer")
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", choices=["stock", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        given.json.write_text(json.dumps(one_run(given)))
        return
    runs = dpo(given) if given.task == "dpo" else grpo(given)
    if given.json is not None:
        write_record(given.json, {"task": given.task, "model": given.model, "runs": runs})


def dpo(given: argparse.Namespace) -> list[dict[str, Any]]:
    runs = []
    for length in given.stock:
        try:
            runs.append(measured("stock", "--tokens", length))
        except subprocess.CalledProcessError:
            print(f"stock: no step of two rows of {length}", flush=True)
            continue
        runs.append(measured("ours", "--tokens", length))
        break
    if not runs or runs[0]["tokens"] != parse_length("--tokens", given.tokens):
        runs.append(measured("ours", "--tokens", given.tokens))
    if len(runs) > 1:
        ratio = runs[0]["seconds"] / runs[1]["seconds"]
        print(f"stock over ours at {runs[0]['tokens']:,} tokens a row: {ratio:.2f} in seconds")
    return runs


def grpo(given: argparse.Namespace) -> list[dict[str, Any]]:
    runs = [measured("ours", "--rows", str(given.completions))]
    if given.stock_rows:
        runs.append(measured("stock", "--rows", str(given.stock_rows)))
        seconds = runs[1]["seconds"] * given.completions / given.stock_rows
        print(
            f"stock, {given.completions} rows from {given.stock_rows}: {seconds:.1f} s, "
            f"{seconds / runs[0]['seconds']:.2f} times ours"
        )
    return runs


def measured(trainer: str, *arguments: str) -> dict[str, Any]:
    run = in_own_process("--run", trainer, *arguments)
    print(
        f"{trainer:6s} {run['rows']} rows of {run['tokens']:,} tokens on {run['device']}: "
        f"{run['seconds']:.2f} s, gradient {run['grad_norm']:.5g}, "
        f"torch {run['torch_peak_bytes'] / GIB:.1f} GiB, pages {run['page_bytes'] / GIB:.1f} "
        f"and {run['host_bytes'] / GIB:.1f} GiB on the host",
        flush=True,
    )
    return run


def one_run(given: argparse.Namespace) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    device = "cpu" if given.cpu else "cuda"
    prompt = parse_length("--prompt", given.prompt)
    completion = parse_length("--completion", given.completion)
    pair = given.task == "dpo"
    tokens = parse_length("--tokens", given.tokens) if pair else prompt + completion
    torch.manual_seed(0)
    base = random_model(
        SHAPES[given.model],
        device=device,
        dtype=torch.float32 if given.cpu else torch.bfloat16,
        positions=max(tokens, 2**15),
        layers=given.layers,
    )
    adapted: Any = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))
    observed, clock = Observed(), Clock(device)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "max_steps": 2,
            "lr_scheduler_type": "constant",
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "bf16": False,  # weights are in it; no autocast
            "use_cpu": given.cpu,
        }
        if pair:
            trainer = preference(given, adapted, settings, tokens, clock, observed)
        else:
            trainer = policy(given, adapted, settings, prompt, completion, clock, observed)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "trainer": given.run,
        "rows": 2 if pair else given.rows,
        "tokens": tokens,
        "seconds": clock.seconds[-1],
        "grad_norm": logged[-1]["grad_norm"],
        "loss": logged[-1]["loss"],
        **observed.memory(device),
        "device": "CPU" if given.cpu else torch.cuda.get_device_name(),
    }


def own(given: argparse.Namespace, observed: Observed) -> dict[str, Any]:
    import oomb

    if given.run == "stock":
        return {}
    return {"observer": observed, "oomb_config": oomb.Config(chunk_size=given.chunk_size)}


def random_ids(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(3, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def preference(
    given: argparse.Namespace,
    model: Any,
    settings: dict[str, Any],
    tokens: int,
    clock: Clock,
    observed: Observed,
) -> Any:
    import trl
    from datasets import Dataset

    import oomb.hf

    def example(tokens: int, seed: int) -> dict[str, str]:
        half = tokens // 2
        parts = {"prompt": half, "chosen": tokens - half - 1, "rejected": tokens - half - 1}
        texts = {}
        for name, number in parts.items():
            seed += 1
            words = " ".join(f"w{i}" for i in random_ids(number, seed=seed).tolist())
            texts[name] = words if name == "prompt" else " " + words  # TRL adds the last token
        return texts

    kind = trl.DPOTrainer if given.run == "stock" else oomb.hf.DPOTrainer
    args = trl.DPOConfig(
        **settings,
        per_device_train_batch_size=1,
        max_length=tokens,
        train_sampling_strategy="sequential",
    )
    return kind(
        model,
        args=args,
        train_dataset=Dataset.from_list([example(min(tokens, SHORT), 0), example(tokens, 10)]),
        processing_class=tokenizer(),
        callbacks=[clock],
        **own(given, observed),
    )


def policy(
    given: argparse.Namespace,
    model: Any,
    settings: dict[str, Any],
    prompt: int,
    completion: int,
    clock: Clock,
    observed: Observed,
) -> Any:
    import trl
    from datasets import Dataset

    import oomb.hf

    stock = trl.GRPOTrainer if given.run == "stock" else oomb.hf.GRPOTrainer
    rows = given.rows

    class Given(stock):  # type: ignore[misc, valid-type]
        """Completions are there; no one generates them."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            first = not clock.seconds
            before, after = (
                (min(prompt, SHORT), min(completion, SHORT))
                if first
                else (
                    prompt,
                    completion,
                )
            )
            device = self.accelerator.device
            prompts = random_ids(1, before, seed=1).expand(rows, -1).to(device)
            completions = random_ids(rows, after, seed=2).to(device)
            return {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": completions,
                "completion_mask": torch.ones_like(completions),
                "advantages": torch.linspace(-1, 1, rows, device=device),
                "num_items_in_batch": torch.tensor(float(rows * after), device=device),
            }

    at_once = 1 if given.run == "stock" else rows
    args = trl.GRPOConfig(
        **settings,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once,
        num_generations=rows,
        max_completion_length=completion,
    )
    return Given(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * (2 * rows)),
        processing_class=tokenizer(),
        callbacks=[clock],
        **own(given, observed),
    )


if __name__ == "__main__":
    main()
