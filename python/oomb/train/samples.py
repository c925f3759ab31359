"""What the model writes after some prompts, at each evaluation."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from oomb.hf.random_state import random_state, restore_random_state
from oomb.train.chat import ChatTemplate
from oomb.train.errors import BadInput
from oomb.train.settings import GenerationSettings

SAMPLES_FILE = "samples.jsonl"


def prompts_as_tokens(
    settings: GenerationSettings,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatTemplate | None,
    positions: int | None,
) -> list[list[int]]:
    """Token ids of each prompt.

    Raises:
        BadInput: there is no chat template where one is asked for, a prompt has no token, or it
            and what follows exceed the model's ``positions``.
    """
    field = "evaluation.generate"
    if settings.chat and chat is None:
        raise BadInput(f"{field}.chat: expected a tokenizer with a chat template, got one without")
    found = []
    for prompt in settings.prompts:
        if settings.chat:
            assert chat is not None
            turn = {"role": "user", "content": prompt}
            text, _ = chat.text([turn], add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        if not ids:
            raise BadInput(f"{field}.prompts: expected text of a token at least, got {prompt!r}")
        needed = len(ids) + settings.max_new_tokens
        if positions is not None and needed > positions:
            raise BadInput(
                f"{field}: expected prompt and max_new_tokens within the model's {positions:,} "
                f"positions, got {needed:,}"
            )
        found.append(list(ids))
    return found


class Samples(TrainerCallback):
    """Writes a line per prompt and evaluation to ``samples.jsonl``, and to the console.

    Generation is the model's own, with its own attention and cache. It draws from no generator
    that training draws from, so a run with samples is the run without them.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        prompts: list[list[int]],
        tokenizer: PreTrainedTokenizerBase,
        run: Path,
        console: Console,
    ) -> None:
        self._settings, self._prompts, self._tokenizer = settings, prompts, tokenizer
        self._file, self._console = run / SAMPLES_FILE, console

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        model: PreTrainedModel = given["model"]
        lines, told = [], []
        for prompt, ids in zip(self._settings.prompts, self._prompts, strict=True):
            text = self._continuation(model, ids)
            record = {"step": state.global_step, "prompt": prompt, "text": text}
            lines.append(json.dumps(record, ensure_ascii=False))
            told.append(f"step {state.global_step}: {prompt!r} → {text!r}")
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write("".join(line + "\n" for line in lines))
        except OSError as error:  # a full disk ends no training
            told.append(f"samples are not kept: {error.strerror}")
        with suppress(OSError, UnicodeError):  # nor does an output that takes no more, or no arrow
            for line in told:
                self._say(line)

    def _continuation(self, model: PreTrainedModel, ids: list[int]) -> str:
        device = next(model.parameters()).device
        before, training = random_state(device), model.training
        tokens = torch.tensor([ids], device=device)
        model.eval()
        try:
            torch.manual_seed(0)
            whole: Any = model.generate(  # type: ignore[operator]
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=self._generation(model),
            )
        finally:
            model.train(training)
            restore_random_state(before, device)
        return str(self._tokenizer.decode(whole[0, len(ids) :], skip_special_tokens=True))

    def _generation(self, model: PreTrainedModel) -> GenerationConfig:
        ends = getattr(model.generation_config, "eos_token_id", None)
        if ends is None:
            ends = self._tokenizer.eos_token_id
        first = ends[0] if isinstance(ends, list) else ends
        temperature = self._settings.temperature
        drawn: dict[str, Any] = {"temperature": temperature, "top_k": 0} if temperature else {}
        return GenerationConfig(
            max_new_tokens=self._settings.max_new_tokens,
            do_sample=temperature > 0,
            eos_token_id=ends,
            pad_token_id=first if first is not None else 0,
            **drawn,
        )

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
