"""Heads that kernels get with zeros behind them give what the model's own give, in fp64.

On a GPU pages have the next head dim for which there are fast kernels. Here every head is padded,
by as much as each case says.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import oomb
from oomb.model.interface import AttentionCall
from oomb.model.layer_shape import kernel_head_dim

from .latent_models import IDS, make_latent
from .latent_models import config as config_of_latents
from .models import make
from .recurrent_models import nothing_rounds_to_float32
from .reference import assert_equal, chunked, ordinary, random_ids
from .test_documents import document_ids, one_by_one

CONFIG = {"chunk_size": 16, "page_size": 8}
USERS = ("oomb.model.probe", "oomb.core.layer_attention", "oomb.trace.stand_ins")


@pytest.fixture(autouse=True)
def all_in_float64() -> Iterator[None]:
    with nothing_rounds_to_float32():
        yield


@pytest.fixture(params=[1, 8, 13])
def padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Zeros behind each head."""
    more: int = request.param

    def wider(call: AttentionCall, capability: int | None) -> int:
        return kernel_head_dim(call, capability) + more

    for user in USERS:
        monkeypatch.setattr(f"{user}.kernel_head_dim", wider)
    return more


def pages_of(model: torch.nn.Module) -> list[int]:
    with oomb.Engine(model, oomb.Config(**CONFIG)) as engine:  # type: ignore[arg-type]
        return [shape.head_dim for shape in engine._shapes]


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("kept", ["none", "all"])
def test_equals_one_backward(padded: int, recompute: str, kept: str) -> None:
    model, ids = make("llama"), random_ids(2, 67)
    assert set(pages_of(model)) == {model.config.head_dim + padded}
    settings = oomb.Config(**CONFIG, recompute=recompute, keep_outputs=kept)  # type: ignore[arg-type]
    assert_equal(chunked(model, settings, ids, ids), ordinary(model, ids, ids))


@pytest.mark.parametrize("name", ["small", "minicpm3"])
def test_latents(padded: int, name: str) -> None:
    model = make_latent(name)
    assert_equal(chunked(model, config_of_latents(), IDS, IDS), ordinary(model, IDS, IDS))


def test_documents(padded: int) -> None:
    lengths = (13, 30, 21)
    model, ids = make("llama"), random_ids(1, sum(lengths))
    found = chunked(model, oomb.Config(**CONFIG), ids, ids, document_ids=document_ids(lengths))  # type: ignore[arg-type]
    assert_equal(found, one_by_one(model, ids, lengths))


@pytest.mark.parametrize(
    "rule", [oomb.TopKPages(budget=2), oomb.TopKPages(budget=3, summary="bounds")]
)
def test_the_same_pages_are_chosen(padded: int, rule: oomb.TopKPages) -> None:
    model, ids = make("llama"), random_ids(2, 99)
    found = chunked(model, oomb.Config(**CONFIG, attention=rule, record_selection=True), ids, ids)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        for user in USERS:
            patch.setattr(f"{user}.kernel_head_dim", kernel_head_dim)
        own = chunked(model, oomb.Config(**CONFIG, attention=rule, record_selection=True), ids, ids)  # type: ignore[arg-type]
    assert found.step is not None and own.step is not None
    for ours, theirs in zip(found.step.selection, own.step.selection, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or a.equal(b)
    assert_equal(found, own)


@pytest.mark.parametrize(
    ("width", "capability", "expected"),
    [
        *((192, None, 192), (192, 90, 256), (192, 89, 256)),
        *((96, 90, 96), (512, 90, 512), (320, 80, 512), (320, 89, 320)),
    ],
)
def test_what_kernels_are_given(width: int, capability: int | None, expected: int) -> None:
    assert kernel_head_dim(call(width), capability) == expected


def test_no_kernel_is_fast_in_fp64() -> None:
    assert kernel_head_dim(call(192, dtype=torch.float64), 90) == 192


def test_caps_have_fast_kernels() -> None:
    assert kernel_head_dim(call(192, softcap=50.0), 90) == 256


def call(width: int, dtype: torch.dtype = torch.bfloat16, softcap: float = 0.0) -> AttentionCall:
    q = torch.zeros(1, 2, 3, width, dtype=dtype)
    v = q[..., : max(1, width - 64)]
    return AttentionCall(torch.nn.Module(), q, q, v, 1.0, 0, softcap, None, None)
