"""A short run of a trainer of ``oomb.hf`` after TRL's, in as many processes as a launcher started.

Writes what its steps log to the file that is given. All processes share each sequence. The model
writes completions itself, drawn from a seed; rewards go by a completion's place.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import load_dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import oomb.hf
from trainer.runs import CONFIG, logged, prompt_rows, tokenizer
from trainer.two_pass_runs import classifier, model, reward, settings

GENERATION = {
    "num_generations": 4,
    "max_completion_length": 9,
    "num_iterations": 2,
    "beta": 0.0,  # TRL would load a reference by name
    "max_steps": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "GRPO": {**GENERATION, "loss_type": "dapo"},
    "RLOO": {**GENERATION, "learning_rate": 1e-3},
    "Reward": {"center_rewards_coefficient": 0.1, "max_length": 64},
}
LOGGED = ("loss", "grad_norm", "reward", "completions/mean_length", "entropy", "margin")


def data(folder: Path, scores: bool) -> Any:
    """From a file: to pickle a table in memory, as its fingerprint takes, has failed on a GPU's
    machine."""
    rows = prompt_rows(8 if scores else 6)
    others = [row["completion"] for row in rows[1:] + rows[:1]]
    kept = [
        {
            "prompt": row["prompt"],
            **({"chosen": row["completion"], "rejected": other} if scores else {}),
        }
        for row, other in zip(rows, others, strict=True)
    ]
    file = folder / "rows.json"
    file.write_text("\n".join(map(json.dumps, kept)))
    return load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="GRPO")
    parser.add_argument("--weights", default="", help="zero1, zero2 or zero3; '': whole")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    config, others = CONFIG, dict[str, Any]()
    if options.weights:
        config = replace(config, sharded_weights=options.weights)
        others["shard_weights"] = True
    scores = options.kind == "Reward"
    if not scores:
        others["reward_funcs"] = reward
    with tempfile.TemporaryDirectory() as folder:
        own = {"per_device_train_batch_size": 2, **KINDS[options.kind]}
        args = settings(Path(folder), use_cpu=options.device == "cpu", **own)
        trainer = getattr(oomb.hf, f"{options.kind}Trainer")(
            model=(classifier(False) if scores else model(False)).to(torch.float32),
            args=getattr(trl, f"{options.kind}Config")(**args),
            train_dataset=data(Path(folder), scores),
            processing_class=tokenizer(),
            oomb_config=config,
            **others,
        )
        trainer.train()
    if trainer.is_world_process_zero():
        found = {name: logged(trainer, name) for name in LOGGED}
        options.results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
