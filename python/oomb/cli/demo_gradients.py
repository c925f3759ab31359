"""How far chunked gradients are from those of ordinary training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from oomb.cli.demo_model import ordinary_loss, small_model
from oomb.cli.demo_text import python_source
from oomb.config import Config
from oomb.engine.engine import Engine

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class GradientDifference:
    """Largest ‖a - b‖ / ‖b‖ over the parameters.

    Attributes:
        float64: chunked against ordinary, both in fp64.
        float32: the same in fp32.
        chunked_error, ordinary_error: each in fp32 against ordinary training in fp64.
    """

    float64: float
    float32: float
    chunked_error: float
    ordinary_error: float


def task(
    *, on_share: Callable[[float], None], num_tokens: int, chunk_size: int, page_size: int
) -> dict[str, Any]:
    """For :mod:`oomb.cli.demo_process`."""
    input_ids = python_source().batch(0, num_tokens)
    config = Config(chunk_size=chunk_size, page_size=page_size)
    return asdict(compare_gradients(input_ids, config, on_share))


def compare_gradients(
    input_ids: torch.Tensor, config: Config, on_share: Callable[[float], None]
) -> GradientDifference:
    """One step of both kinds on the same text, in fp32 and in fp64."""
    gradients = {}
    for index, dtype in enumerate((torch.float32, torch.float64)):
        model = small_model(dtype)
        gradients["ordinary", dtype] = _ordinary(model, input_ids)
        on_share(index / 2 + 0.25)
        gradients["chunked", dtype] = _chunked(model, input_ids, config)
        on_share(index / 2 + 0.5)
    exact = gradients["ordinary", torch.float64]
    single = gradients["ordinary", torch.float32]
    return GradientDifference(
        float64=largest_difference(gradients["chunked", torch.float64], exact),
        float32=largest_difference(gradients["chunked", torch.float32], single),
        chunked_error=largest_difference(gradients["chunked", torch.float32], exact),
        ordinary_error=largest_difference(single, exact),
    )


def largest_difference(ours: Gradients, reference: Gradients) -> float:
    """Largest ‖ours - reference‖ / ‖reference‖ over the parameters."""
    return max(
        float((ours[name].double() - b.double()).norm() / b.double().norm())
        for name, b in reference.items()
    )


def _ordinary(model: PreTrainedModel, input_ids: torch.Tensor) -> Gradients:
    ordinary_loss(model, input_ids).backward()
    return _taken(model)


def _chunked(model: PreTrainedModel, input_ids: torch.Tensor, config: Config) -> Gradients:
    with Engine(model, config) as engine:
        engine.forward_backward(input_ids, input_ids)
    return _taken(model)


def _taken(model: PreTrainedModel) -> Gradients:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients
