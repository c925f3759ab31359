"""A model of a few thousand parameters over bytes, a text, settings that train it in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner, Result

from oomb.cli import app
from oomb.cli.demo_tokenizer import byte_tokenizer

TEXT = "".join(f"{n} squared is {n * n}, and cubed it is {n**3}.\n" for n in range(200))


def tiny_model(**changes: Any) -> PreTrainedModel:
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**settings | changes))


def save_model(folder: Path, **changes: Any) -> None:
    tiny_model(**changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def settings_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run with the model in ``folder/model`` and the text in ``folder/text.txt``."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": {"name": str(folder / "model")},
        "data": {
            "train": str(folder / "text.txt"),
            "eval_fraction": 0.2,
            "add_eos": False,
            "num_proc": 1,
            "cache_dir": str(folder / "cache"),
        },
        "context": 256,
        "engine": {"chunk_size": 64, "page_size": 16},
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"name": "constant"},
        "training": {"steps": 4},
    }
    for section, values in changes.items():
        old = settings.get(section)
        settings[section] = old | values if isinstance(old, dict) else values
    return settings


def prepare(folder: Path, **changes: Any) -> Path:
    """Model, text and YAML file in a folder; the file's path."""
    save_model(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(settings_of(folder, **changes)))
    return file


def run(file: Path, *arguments: str) -> Result:
    """``oomb train`` in this process."""
    return CliRunner().invoke(app, ["train", str(file), *arguments])
