"""An error of the model's own forward is told as such; one of the machine goes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oomb

from .models import make

CONFIG = oomb.Config(chunk_size=16, page_size=8)


def fails_at(tokens: int, error: Exception) -> nn.Module:
    """A layer that raises when it sees so many tokens: 32 in the model's own forward, 2 where the
    shapes of attention are asked for, 16 in each of two chunks."""
    model = make("llama")

    def check(_: nn.Module, arguments: tuple[torch.Tensor, ...], __: dict[str, Any]) -> None:
        if arguments[0].shape[1] == tokens:
            raise error

    model.model.layers[0].register_forward_pre_hook(check, with_kwargs=True)
    return model


PROBES = {
    2: "^LlamaModel: fails where attention is the engine's: ",
    32: "^LlamaForCausalLM: its own forward fails on 32 tokens: ",
    16: "^LlamaForCausalLM: fails when it is run in chunks: ",
}


@pytest.mark.parametrize(("tokens", "text"), PROBES.items())
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, IndexError, NotImplementedError])
def test_an_error_of_the_models_own(tokens: int, text: str, kind: type[Exception]) -> None:
    error = kind("sizes differ")
    where = r"sizes differ \(in (model\.)?layers\.0, LlamaDecoderLayer\)$"
    with pytest.raises(oomb.UnsupportedModelError, match=text + where) as refused:
        oomb.Engine(fails_at(tokens, error), CONFIG)
    assert refused.value.__cause__ is error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "index 1 is out of bounds for dimension 2 with size 1",
            "it reads past the end of a tensor",
        ),
        ("list index out of range", "it reads past the end of a tensor or list"),
        ("Dimension out of range (expected to be in range of [-1, 0], but got 1)", "Dimension out"),
    ],
)
def test_an_index_past_an_end_is_said_in_words(text: str, said: str) -> None:
    with pytest.raises(oomb.UnsupportedModelError, match=rf"{said}.* \(in layers\.0, "):
        oomb.Engine(fails_at(2, IndexError(text)), CONFIG)


@pytest.mark.parametrize("tokens", PROBES)
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["cuda", "cudnn", "host-memory", "device-memory"],
)
def test_an_error_of_the_machine_is_not_the_models(tokens: int, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        oomb.Engine(fails_at(tokens, error), CONFIG)
    assert not isinstance(raised.value, oomb.UnsupportedModelError)
    assert raised.value is error or raised.value.__cause__ is error
