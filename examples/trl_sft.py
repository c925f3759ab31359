"""TRL's SFTTrainer: packed documents, adapters, long sequences; only the import changes.

python examples/trl_sft.py [--model FOLDER] [--texts FOLDER] [--tokens N] [--steps N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import oomb  # isort: skip  (before torch: its waiting threads then sleep)
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from oomb.hf import SFTTrainer  # instead of: from trl import SFTTrainer

# Of names that TRL and peft still use.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="oomb-demo/model")
    parser.add_argument("--texts", type=Path, default=Path(argparse.__file__).parent)
    parser.add_argument("--tokens", type=int, default=8192, help="per packed sequence")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", default="oomb-demo/sft")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if tokenizer.eos_token is None:
        # The demo's tokenizer has a token per byte and no other; this byte occurs in no UTF-8 text.
        tokenizer.eos_token = tokenizer.pad_token = "\xff"
    files = sorted(options.texts.glob("*.py"))[:16]
    documents = Dataset.from_dict({"text": [file.read_text()[: options.tokens] for file in files]})
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(options.model),
        args=SFTConfig(
            output_dir=options.out,
            max_length=options.tokens,
            packing=True,  # attention stays inside each document
            max_steps=options.steps,
            per_device_train_batch_size=1,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            bf16=False,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        ),
        train_dataset=documents,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
        oomb_config=oomb.Config(chunk_size=1024),
    )
    trainer.train()
    for log in trainer.state.log_history:
        if "loss" in log:
            print(f"step {log['step']}: loss {log['loss']:.4f}")
    trainer.save_model(f"{options.out}/adapter")
    print(f"adapter: {options.out}/adapter")


if __name__ == "__main__":
    main()
