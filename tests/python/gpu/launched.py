"""A short run of ``oomb.hf.Trainer`` in as many processes as a launcher has started.

Writes losses and gradient norms of its steps to the file that is given.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from accelerate.parallelism_config import ParallelismConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.models import make
from oomb.hf import Trainer
from trainer.runs import CONFIG, arguments, logged, masked


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--groups", type=int, help="of processes, with a sequence each")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    settings = {}
    if options.groups:
        size = options.processes // options.groups
        layout = ParallelismConfig(dp_shard_size=options.groups, cp_size=size)
        settings = {"parallelism_config": layout}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            make("llama", torch.float32, num_key_value_heads=4, num_attention_heads=4),
            arguments(
                Path(folder),
                per_device_train_batch_size=1,
                gradient_accumulation_steps=4 // (options.groups or 1),
                use_cpu=options.device == "cpu",
                **settings,
            ),
            train_dataset=masked(24),
            oomb_config=CONFIG,
        )
        trainer.train()
    if trainer.is_world_process_zero():
        found = {name: logged(trainer, name) for name in ("loss", "grad_norm")}
        options.results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
