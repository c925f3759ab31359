"""Trainers of TRL beside ours, in fp64: data, models, and the comparison of their steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, Qwen3ForSequenceClassification, TrainerCallback
from trl.trainer import utils as trl_utils

from engine.models import keep_norms_in_float64, make, spread_weights
from engine.reference import EXACT

from .runs import CONFIG, prompts, tokenizer


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    """fp64 on the CPU; a step is two micro-batches."""
    return {
        "output_dir": str(folder),
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        **others,
    }


@pytest.fixture(autouse=True)
def plain_log_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    write_log_softmax_out(monkeypatch)


def write_log_softmax_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own head computes in fp32 whatever the model is in; here it is written out in fp64."""

    class Plain:
        @staticmethod
        def apply(
            hidden: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            labels: torch.Tensor,
            temperature: float,
            *_: Any,
        ) -> tuple[torch.Tensor, ...]:
            assert hidden.dtype == torch.float64
            logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
            logp = logits.log_softmax(-1)
            at_label = logp.gather(1, labels[:, None])[:, 0]
            entropy = -(logp.exp() * logp).sum(-1)
            constants = (2 * logp).logsumexp(-1), logits.mean(-1)
            top = logits.argmax(-1) == labels
            return (at_label, entropy, *(x.detach() for x in constants), top)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Plain)


def preferences(number: int = 8) -> Dataset:
    rows = prompts(number)
    other = rows["completion"][1:] + rows["completion"][:1]
    return Dataset.from_dict(
        {"prompt": rows["prompt"], "chosen": rows["completion"], "rejected": other}
    )


def judged(number: int = 8) -> Dataset:
    rows = prompts(number)
    labels = [index % 3 != 1 for index in range(number)]
    return Dataset.from_dict(
        {"prompt": rows["prompt"], "completion": rows["completion"], "label": labels}
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    """Of a completion's place: no two in a group have the same."""
    return [float(index * index % 7) for index in range(len(completions))]


def written(trainer: Any, prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
    """Completions that depend on their place among those of all processes, not on the weights."""
    first = trainer.accelerator.process_index * len(prompt_ids)
    words, found = len(trainer.processing_class), []
    for index, ids in enumerate(prompt_ids):
        key = (first + index, trainer.state.global_step, trainer.model.training, *ids)
        drawn = random.Random(repr(key))
        number = drawn.randint(2, 9)
        found.append([drawn.randrange(1, words) for _ in range(number)])
    return found


def model(adapted: bool, name: str = "qwen3") -> Any:
    torch.manual_seed(0)
    model = make(name)
    if not adapted:
        return model
    of_lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, of_lora).double()


def reference() -> PreTrainedModel:
    """Of a model that trains whole."""
    torch.manual_seed(9)
    return make("qwen3", num_hidden_layers=2)


class Gradients(TrainerCallback):
    """As they are before each step of the optimizer."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        named = model.named_parameters()
        self.steps.append({n: p.grad.clone() for n, p in named if p.grad is not None})


def classifier(adapted: bool) -> Any:
    torch.manual_seed(0)
    settings = make("qwen3").config
    settings.num_labels = 1
    model = Qwen3ForSequenceClassification(settings).double()
    spread_weights(model)
    keep_norms_in_float64(model)
    if not adapted:
        return model
    of_lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS", init_lora_weights=False
    )
    return peft.get_peft_model(model, of_lora).double()


def trained(
    kind: type, adapted: bool, args: Any, data: Dataset, **others: Any
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, float]]]:
    """Gradients of each step, and what was logged."""
    if others.pop("with_reference", False):
        others["ref_model"] = reference()
    seen = Gradients()
    others |= {"callbacks": [seen], "processing_class": tokenizer()}
    make_model = others.pop("make_model", model)
    trainer = kind(model=make_model(adapted), args=args, train_dataset=data, **others)
    trainer.train()
    return seen.steps, trainer.state.log_history


def compare(
    stock: type,
    ours: type,
    args: Callable[[], Any],
    data: Dataset,
    adapted: bool,
    steps: int = 2,
    **others: Any,
) -> None:
    """Gradients and metrics of two steps, the second with what the first has changed."""
    expected, log = trained(stock, adapted, args(), data, **others)
    found, own = trained(ours, adapted, args(), data, oomb_config=CONFIG, **others)
    assert len(found) == len(expected) == steps
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert set(mine) == set(theirs)
        largest = max(float(grad.norm()) for grad in theirs.values())
        assert largest > 1e-4
        for name, grad in theirs.items():
            error = float((mine[name] - grad).norm())
            assert error <= EXACT * (1 + 9 * step) * max(float(grad.norm()), 1e-3 * largest), name
    for mine, theirs in zip(own, log, strict=True):
        assert set(theirs) <= set(mine)
        for name, value in theirs.items():
            if not name.endswith(("runtime", "per_second", "time")) and "profiling" not in name:
                assert mine[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
