"""Between two passes a backward must not reach the model: nobody meant to run it whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from oomb.errors import Error
from oomb.model.causal import CausalModel


class Watch:
    """While it is on, a backward that reaches a parameter of the model raises an Error.

    Args:
        head: also one of the model's own head; a loss of hidden states may use it.
    """

    def __init__(self, model: CausalModel, *, head: bool) -> None:
        self._model, self._head = model, head
        self._hooks: list[Any] = []

    def on(self) -> None:
        self.off()
        causal, apart = self._model.causal, set()
        if not self._head:
            head = causal.get_output_embeddings()
            apart = {id(p) for p in self._model.head.own_weights()}
            apart |= {id(p) for p in head.parameters()} if head is not None else set()
        for name, parameter in causal.named_parameters():
            if parameter.requires_grad and id(parameter) not in apart:
                self._hooks.append(parameter.register_hook(partial(_refuse, name)))

    def off(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _refuse(name: str, _: torch.Tensor) -> None:
    raise Error(
        f"two_pass: expected a loss of the call's values alone, got one that reaches {name} past "
        "them; call backward() on such a term outside the with block"
    )
