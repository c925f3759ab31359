"""Rows of every kind, a tokenizer for them, and a naive reading of what is predicted."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors
from tokenizers_for_tests import KINDS
from transformers import PreTrainedTokenizerFast

from oomb.train.data import Data, find_data, prepare_data, tokenising_rule
from oomb.train.reading import read_settings

IGNORED = -100
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As templates of models that think: what an earlier turn thought is left out.
FORGETFUL = PLAIN.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>",
)
WORDS = ["The", "quick", "brown", "fox", "—", "naïve", "coöperation,", "3.14159;", "it's"]
WORDS += ["they've", "日本語", "🙂", "\n", "\t", "", ""]


def chat_tokenizer(template: str | None = PLAIN, kind: str = "qwen") -> PreTrainedTokenizerFast:
    backend = KINDS[kind]()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def conversations(number: int, seed: int = 0) -> list[list[dict[str, str]]]:
    draw, found = random.Random(seed), []
    for _ in range(number):
        turns = [{"role": "system", "content": sentence(draw, 5)}] * draw.randint(0, 1)
        for _ in range(draw.randint(1, 3)):
            turns.append({"role": "user", "content": sentence(draw, draw.randint(1, 30))})
            turns.append({"role": "assistant", "content": sentence(draw, draw.randint(1, 30))})
        found.append(turns)
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def data_of(
    folder: Path, tokenizer: PreTrainedTokenizerFast, file: Path | str, *overrides: str
) -> Data:
    settings_file = folder / "settings.yaml"
    settings_file.write_text(
        f"output_dir: {folder}/run\nmodel: {{name: m}}\ncontext: 4096\n"
        f"data: {{train: {file}, num_proc: 1, cache_dir: {folder}/cache}}\n"
    )
    settings = read_settings(settings_file, overrides)
    rule = tokenising_rule(settings.data, tokenizer, len(tokenizer))
    return prepare_data(settings, find_data(settings.data), rule)


def items(data: Data) -> list[tuple[list[int], list[int]]]:
    every = [data.train[index] for index in range(len(data.train))]
    return [(item["input_ids"].tolist(), item["labels"].tolist()) for item in every]


# A turn ends at <|im_end|> by its marks, and with the line by what it adds to the text.
def expected(
    tokenizer: PreTrainedTokenizerFast, turns: list[dict[str, str]], template: str
) -> tuple[list[int], list[int]]:
    """By the tokens alone: from behind an assistant's header until its end."""
    text = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.Sequence([])  # which may trim offsets
    encoded = backend.encode(text, add_special_tokens=False)
    ids, offsets = encoded.ids, encoded.offsets
    counts, place = [False] * len(text), 0
    for turn in turns:
        header, rest = f"<|im_start|>{turn['role']}\n", f"{turn['content']}<|im_end|>"
        place += len(header)
        if turn["role"] == "assistant":
            behind = place + len(rest) + (template != MARKED)
            counts[place:behind] = [True] * (behind - place)
        place += len(rest) + 1
    labels = [
        token if any(counts[begin:end]) else IGNORED
        for token, (begin, end) in zip(ids, offsets, strict=True)
    ]
    return ids, [IGNORED, *labels[1:]]


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
