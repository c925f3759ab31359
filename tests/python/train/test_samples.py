"""What a model writes at evaluations: the likeliest tokens, and nothing else changes by it."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_instructions import PLAIN, chat_tokenizer
from test_run import losses
from tiny_runs import prepare, run, tiny_model
from transformers import AutoModelForCausalLM, TrainerState

from oomb.cli.demo_tokenizer import byte_tokenizer
from oomb.train.reading import read_settings
from oomb.train.samples import Samples

PROMPTS = ["12 squared is ", "7"]


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def likeliest(model: torch.nn.Module, prompt: bytes, number: int) -> str:
    """One token at a time, each from a forward over everything before it."""
    ids = list(prompt)
    for _ in range(number):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return bytes(ids[len(prompt) :]).decode(errors="replace")


def test_samples_are_of_the_model_as_it_is(tmp_path: Path) -> None:
    generate = {"prompts": PROMPTS, "max_new_tokens": 5}
    changes: dict[str, Any] = {"every_steps": 3, "at_start": True, "generate": generate}
    file = prepare(tmp_path, evaluation=changes, training={"steps": 3})
    result = run(file)
    assert result.exit_code == 0, result.output
    found = samples(tmp_path / "run")
    assert [record["step"] for record in found] == [0, 0, 3, 3]
    assert [record["prompt"] for record in found] == PROMPTS * 2
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    texts = [likeliest(model, p.encode(), 5) for model in (tiny_model(), trained) for p in PROMPTS]
    assert [record["text"] for record in found] == texts
    assert all(f"{text!r}" in result.output for text in texts)


@pytest.mark.parametrize("takes", ["no arrow", "nothing"])
def test_what_is_said_of_samples_ends_no_training(takes: str, tmp_path: Path) -> None:
    file = prepare(tmp_path, evaluation={"every_steps": 1, "generate": {"prompts": "7"}})
    settings = read_settings(file, ["training.steps=1"])
    with ExitStack() as stack:
        if takes == "nothing":
            stream = open("/dev/full", "w", buffering=1)  # noqa: SIM115 (closing it fails too)
        else:
            stream = stack.enter_context(open(tmp_path / "said", "w", encoding="ascii"))
        generate = settings.evaluation.generate
        assert generate is not None
        (tmp_path / "run").mkdir()
        told = Samples(generate, [[55]], byte_tokenizer(), tmp_path / "run", Console(file=stream))
        state = TrainerState(global_step=1)
        told.on_evaluate(None, state, None, model=tiny_model())  # type: ignore[arg-type]
        with suppress(OSError):
            stream.close()
    assert [record["step"] for record in samples(tmp_path / "run")] == [1]


def test_a_run_with_samples_is_the_run_without(tmp_path: Path) -> None:
    generate = {"prompts": "a", "max_new_tokens": 9, "temperature": 1.5}
    file = prepare(tmp_path, evaluation={"every_steps": 1}, training={"steps": 3})
    lora = ["lora.r=2", "lora.dropout=0.5", "lora.target_modules=[q_proj]"]
    results = [
        run(file, *lora, f"output_dir={tmp_path / 'without'}"),
        run(file, *lora, f"evaluation.generate={json.dumps(generate)}"),
    ]
    assert [result.exit_code for result in results] == [0, 0], results[1].output
    assert losses(tmp_path / "run") == losses(tmp_path / "without")
    assert len(samples(tmp_path / "run")) == 3


def test_prompts_as_turns(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(PLAIN)
    generate = {"prompts": ["a"], "max_new_tokens": 3, "chat": True}
    file = prepare(tmp_path, evaluation={"generate": generate}, training={"steps": 1})
    message = "evaluation.generate.chat: expected a tokenizer with a chat template"
    assert message in run(file, "--dry-run").output
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    result = run(file)
    assert result.exit_code == 0, result.output
    assert [record["prompt"] for record in samples(tmp_path / "run")] == ["a"]


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        ({"prompts": [""]}, "evaluation.generate.prompts: expected text of a token at least"),
        ({"prompts": ["a"], "max_new_tokens": 5000}, "expected prompt and max_new_tokens within"),
    ],
)
def test_prompts_that_cannot_be(tmp_path: Path, generate: dict[str, Any], message: str) -> None:
    result = run(prepare(tmp_path, evaluation={"generate": generate}))
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "run").exists()
