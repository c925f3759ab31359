"""Runs of a tiny model that the stock trainers and ours can both do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainingArguments

import oomb
from engine.models import VOCABULARY, make

CONFIG = oomb.Config(chunk_size=32, page_size=16)
Example = dict[str, list[int]]


def model(**settings: Any) -> PreTrainedModel:
    return make("llama", torch.float32, **settings)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    """Two sequences a micro-batch, three micro-batches a step, each step logged."""
    return TrainingArguments(**{**_settings(folder), **settings})


def sft_arguments(folder: Path, **settings: Any) -> Any:
    from trl import SFTConfig

    return SFTConfig(**{**_settings(folder), "bf16": False, **settings})


def _settings(folder: Path) -> dict[str, Any]:
    return dict(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=6,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


def packed(number: int = 13, tokens: int = 70, seed: int = 3) -> list[Example]:
    """Two documents a sequence, told apart by positions; their first tokens and a prompt masked."""
    return [
        {
            "input_ids": ids,
            "labels": [-100] * prompt + ids[prompt:border] + [-100] + ids[border + 1 :],
            "position_ids": [*range(border), *range(len(ids) - border)],
        }
        for ids, prompt, border in _drawn(number, tokens, seed)
    ]


def masked(number: int = 13, tokens: int = 70, seed: int = 3) -> list[Example]:
    """One document a sequence, of its own length: right padding, a prompt masked."""
    return [
        {
            "input_ids": [*ids[: len(ids) - border], *[0] * border],
            "labels": [-100] * prompt + ids[prompt : len(ids) - border] + [-100] * border,
            "attention_mask": [1] * (len(ids) - border) + [0] * border,
        }
        for ids, prompt, border in _drawn(number, tokens, seed)
    ]


def _drawn(number: int, tokens: int, seed: int) -> list[tuple[list[int], int, int]]:
    """Token ids, a prompt's length, and a border behind the prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int = 1) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    return [(draw(3, VOCABULARY, tokens), *draw(0, 18), *draw(20, 40)) for _ in range(number)]


def prompts(number: int = 23) -> Any:
    """Prompts and completions as TRL takes them."""
    from datasets import Dataset  # not on every machine with a GPU, where the rest of this runs

    return Dataset.from_list(prompt_rows(number))


def prompt_rows(number: int) -> list[dict[str, str]]:
    """A prompt and its completion, in words."""
    words = [" ".join(f"w{token}" for token in ids) for ids, _, _ in _drawn(number, 50, 5)]
    cuts = [(prompt, border) for _, prompt, border in _drawn(number, 50, 5)]
    return [
        {
            "prompt": " ".join(text.split()[: prompt + 1]) + " ",
            "completion": " ".join(text.split()[prompt + 1 : border + 5]),
        }
        for text, (prompt, border) in zip(words, cuts, strict=True)
    ]


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token, made here: nothing is downloaded."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    of_words = Tokenizer(models.WordLevel(words, unk_token="w3"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=of_words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def logged(trainer: transformers.Trainer, name: str) -> list[float]:
    """A logged value, in order."""
    return [log[name] for log in trainer.state.log_history if name in log]
