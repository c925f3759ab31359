"""The transformers Trainer on long sequences: one import and oomb_config= are what changes.

python examples/trainer.py [--model FOLDER] [--text FILE] [--tokens N] [--steps N] [--out FOLDER]

Run it again with --resume after Ctrl-C: it goes on from the last finished step.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import oomb  # isort: skip  (before torch: its waiting threads then sleep)
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from oomb.hf import Trainer  # instead of: from transformers import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="oomb-demo/model")
    parser.add_argument("--tokenizer", help="its folder or name; default: the model's own")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--tokens", type=int, default=8192, help="per sequence")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", default="oomb-demo/trainer")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model)
    text = options.text.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows = [{"input_ids": window, "labels": window} for window in ids.split(options.tokens)]
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=1e-4,
            logging_steps=1,
            save_steps=2,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=options.steps,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=windows[1:],
        eval_dataset=windows[:1],
        oomb_config=oomb.Config(chunk_size=1024),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    for log in trainer.state.log_history:
        for name in ("loss", "eval_loss"):
            if name in log:
                print(f"step {log['step']}: {name} {log[name]:.4f}")
    trainer.save_model(f"{options.out}/model")
    print(f"model: {options.out}/model")


if __name__ == "__main__":
    main()
