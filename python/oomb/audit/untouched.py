"""A model that is looked at, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode and has no gradients; afterwards all is as before.

    Without dropout nothing is drawn at random, and two runs differ by what is audited alone.
    """
    training = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in training:
            module.training = mode
