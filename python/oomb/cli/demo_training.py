"""The same short training run twice: ordinary, and chunked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from oomb.cli.demo_model import ordinary_loss, small_model
from oomb.cli.demo_text import Text, python_source
from oomb.cli.demo_tokenizer import byte_tokenizer
from oomb.config import Config
from oomb.engine.engine import Engine

LEARNING_RATE, WARMUP_STEPS = 1e-3, 5

OfBatch = Callable[[torch.Tensor], float]  # input_ids -> loss


@dataclass(frozen=True)
class TrainingSize:
    """Tokens are those of one step, and of the held-out text."""

    num_steps: int
    num_tokens: int
    held_out_tokens: int
    evaluate_every: int


@dataclass(frozen=True)
class TrainingRun:
    """Held-out loss in nats per byte, after each number of optimizer steps."""

    steps: list[int]
    losses: list[float]


def task(
    *,
    on_share: Callable[[float], None],
    method: Literal["ordinary", "oomb"],
    size: dict[str, int],
    chunk_size: int,
    page_size: int,
    save_to: str | None = None,
) -> dict[str, Any]:
    """For :mod:`oomb.cli.demo_process`.

    Args:
        save_to: folder for the trained model and its tokenizer.
    """
    model, text = small_model(), python_source()
    if method == "oomb":
        config = Config(chunk_size=chunk_size, page_size=page_size)
        run = _train_chunked(model, config, text, TrainingSize(**size), on_share)
    else:
        run = _train_ordinary(model, text, TrainingSize(**size), on_share)
    if save_to is not None:
        model.save_pretrained(save_to)
        byte_tokenizer().save_pretrained(save_to)
    return asdict(run)


def _train_ordinary(
    model: PreTrainedModel, text: Text, size: TrainingSize, on_share: Callable[[float], None]
) -> TrainingRun:
    def step(input_ids: torch.Tensor) -> float:
        loss = ordinary_loss(model, input_ids)
        loss.backward()
        return float(loss)

    def evaluate(input_ids: torch.Tensor) -> float:
        with torch.no_grad():
            return float(ordinary_loss(model, input_ids))

    return _train(model, step, evaluate, text, size, on_share)


def _train_chunked(
    model: PreTrainedModel,
    config: Config,
    text: Text,
    size: TrainingSize,
    on_share: Callable[[float], None],
) -> TrainingRun:
    with Engine(model, config) as engine:
        return _train(
            model,
            lambda input_ids: float(engine.forward_backward(input_ids, input_ids).loss),
            lambda input_ids: float(engine.evaluate(input_ids, input_ids).loss),
            text,
            size,
            on_share,
        )


def _train(
    model: PreTrainedModel,
    step: OfBatch,
    evaluate: OfBatch,
    text: Text,
    size: TrainingSize,
    on_share: Callable[[float], None],
) -> TrainingRun:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    warmup = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS
    )
    held_out = text.held_out_batch(size.held_out_tokens)
    steps, losses = [0], [evaluate(held_out)]
    for done in range(1, size.num_steps + 1):
        step(text.batch((done - 1) * size.num_tokens, size.num_tokens))
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        if done % size.evaluate_every == 0:
            steps.append(done)
            losses.append(evaluate(held_out))
        on_share(done / size.num_steps)
    return TrainingRun(steps, losses)
