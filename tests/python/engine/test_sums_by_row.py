"""Sums of gradients that are taken row by row, and in place of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

import oomb
from oomb.core.loss import ChunkLoss
from oomb.core.main_grad import MainGrads
from oomb.model.embedding import sum_by_row

from .models import make
from .reference import assert_equal, chunked, ordinary, random_ids, relative_error

IDS = random_ids(2, 75)
CONFIG = oomb.Config(chunk_size=16, page_size=8)


# The embedding ------------------------------------------------------------------------------------


def test_equal_rows_are_added_up() -> None:
    rows, values = torch.randint(20, (50,)), torch.randn(50, 7, dtype=torch.float64)
    expected = torch.zeros(20, 7, dtype=torch.float64).index_add_(0, rows, values)
    distinct, sums = sum_by_row(rows, values)
    assert (
        relative_error(torch.zeros_like(expected).index_add_(0, distinct, sums), expected) < 1e-15
    )
    number = int((sums != 0).any(dim=1).sum())
    assert number == rows.unique().numel()
    assert distinct[:number].unique().numel() == number
    assert bool((distinct[number:] == 0).all() and (sums[number:] == 0).all())


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[nn.Parameter]:
    """Parameters that a method of the sums is called for."""
    taken: list[nn.Parameter] = []
    plain = getattr(MainGrads, name)

    def counted(self: MainGrads, parameter: nn.Parameter, *others: torch.Tensor) -> None:
        taken.append(parameter)
        plain(self, parameter, *others)

    monkeypatch.setattr(MainGrads, name, counted)
    return taken


@pytest.mark.parametrize("name", ["llama", "llama-tied", "granite"])
@pytest.mark.parametrize("padding", [None, 5])
def test_embedding(name: str, padding: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come several times; the row of padding gets no gradient."""
    model = make(name)
    model.get_input_embeddings().padding_idx = padding
    assert bool((IDS == 5).any())
    taken = calls_of(monkeypatch, "add_rows")
    assert_equal(chunked(model, CONFIG, IDS, IDS), ordinary(model, IDS, IDS))
    weight = model.get_input_embeddings().weight
    assert len(taken) == 5 and all(parameter is weight for parameter in taken)


def test_many_equal_tokens_are_added_up_in_fp32() -> None:
    """Autograd's own sum over a chunk is rounded to bf16 before it reaches the other chunks'."""
    ids = torch.full((1, 200), 3)
    exact = ordinary(make("llama"), ids, ids)
    model = make("llama", torch.bfloat16)
    found = chunked(model, CONFIG, ids, ids)
    usual = ordinary(model, ids, ids)
    name = "model.embed_tokens.weight"
    error = relative_error(found.gradients[name], exact.gradients[name])
    assert error <= relative_error(usual.gradients[name], exact.gradients[name])


def test_a_hook_on_the_embeddings_weight_sees_its_gradient() -> None:
    model = make("llama")
    expected = ordinary(model, IDS, IDS)
    name = "model.embed_tokens.weight"
    handle = model.get_parameter(name).register_hook(lambda grad: 2 * grad)
    result = chunked(model, CONFIG, IDS, IDS)
    handle.remove()
    assert relative_error(result.gradients[name], 2 * expected.gradients[name]) < 1e-12


# The head -----------------------------------------------------------------------------------------


def gradient_in_place(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
    """What the kernel does, on a CPU."""
    terms = F.cross_entropy(logits.float(), targets, reduction="none")
    gradient = logits.float().softmax(-1) - F.one_hot(targets, logits.shape[1])
    logits.copy_(scale * gradient)
    return terms


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The fused loss on a CPU; rows of each slice."""
    rows: list[int] = []

    def recorded(_: Any, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        rows.append(logits.shape[0])
        return gradient_in_place(logits, targets, scale)

    monkeypatch.setattr(ChunkLoss, "_has_kernel", lambda _: True)
    monkeypatch.setattr(ChunkLoss, "_softmax_gradient", recorded)
    return rows


def close(model: PreTrainedModel, labels: torch.Tensor, **arguments: Any) -> None:
    """Loss and gradients are those of an ordinary step, in fp32."""
    expected = ordinary(model, IDS, labels, **arguments)
    result = chunked(model, CONFIG, IDS, labels, **arguments)
    assert relative_error(result.loss, expected.loss) < 1e-5
    assert result.gradients.keys() == expected.gradients.keys()
    for name, value in expected.gradients.items():
        assert relative_error(result.gradients[name], value) < 1e-4, name


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "phi3"])
def test_fused_loss(name: str, fused: list[int]) -> None:
    """Some labels do not count, in one chunk none; a divisor that is not their number."""
    labels = IDS.clone()
    labels[0, 10:40] = -100
    labels[:, 33:50] = -100
    close(make(name, torch.float32), labels, num_items_in_batch=61.0)
    assert sum(fused) == int((labels[:, 1:] != -100).sum())


def test_fused_loss_under_sampling(fused: list[int]) -> None:
    """A kept chunk's loss counts 1 / keep times."""

    class Some(oomb.SampledChunks):
        def draw(self, num_chunks: int, step: int) -> list[int]:
            return [1, 3]

    model = make("llama", torch.float32)
    config = oomb.Config(chunk_size=16, page_size=8, backward=Some(keep=0.5))
    result = chunked(model, config, IDS, IDS)
    assert fused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkLoss, "_has_kernel", lambda _: False)
        plain = chunked(model, config, IDS, IDS)
    assert relative_error(result.loss, plain.loss) < 1e-5
    for name, value in plain.gradients.items():
        assert relative_error(result.gradients[name], value) < 1e-4, name


def test_a_frozen_head_gets_no_gradient(fused: list[int]) -> None:
    model = make("llama", torch.float32)
    model.lm_head.weight.requires_grad_(False)
    close(model, IDS)
    assert fused


@pytest.mark.parametrize("name", ["granite", "cohere", "gpt-oss"])
def test_other_heads_go_their_own_way(name: str, fused: list[int]) -> None:
    """They scale their logits, or are not known."""
    close(make(name, torch.float32), IDS)
    assert not fused


def test_what_needs_single_terms_goes_its_own_way(fused: list[int]) -> None:
    model = make("llama", torch.float32)
    close(model, IDS, loss_weights=torch.rand(2, 75))
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    close(model, IDS)
    handle.remove()
    handle = model.lm_head.weight.register_hook(lambda grad: grad)
    close(model, IDS)
    handle.remove()
    assert not fused
