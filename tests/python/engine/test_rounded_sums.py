"""Sums of gradients in bf16 with stochastic rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import oomb
from oomb.core import rounded_sums
from oomb.core.main_grad import MainGrads
from oomb.core.rounded_sums import (
    add_rounded,
    add_rows_rounded,
    seed_of_addition,
    sum_dtype,
)

from .models import make
from .reference import chunked, random_ids, relative_error

IDS = random_ids(2, 75)
SETTINGS: dict[str, Any] = {"chunk_size": 16, "page_size": 8, "main_grad_dtype": "bfloat16"}


@pytest.fixture
def inside_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Weights' sums are taken in their products, in pieces of few rows, as on a GPU."""
    pieces: list[tuple[int, int]] = []
    plain = rounded_sums.pieces_of

    def seen(total: torch.Tensor) -> list[tuple[int, int]]:
        pieces.extend(plain(total))
        return list(plain(total))

    monkeypatch.setattr(rounded_sums, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(rounded_sums, "_PIECE_ROWS", 8)
    monkeypatch.setattr("oomb.core.main_grad.pieces_of", seen)
    monkeypatch.setattr(MainGrads, "takes", lambda *_: True)
    return pieces


def gradients(model: PreTrainedModel, **changed: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    return chunked(model, oomb.Config(**{**SETTINGS, **changed}), IDS, IDS).gradients


# One addition -------------------------------------------------------------------------------------


def test_rows_that_come_several_times_are_added_once() -> None:
    """Small integers are exact in bf16, so nothing is rounded."""
    generator = torch.Generator().manual_seed(1)
    for rows in (torch.randint(20, (50,)), torch.tensor([0, 3, 0]), torch.tensor([7, 7, 3, 7])):
        values = torch.randint(-3, 4, (len(rows), 6), generator=generator).bfloat16()
        total = torch.arange(120).view(20, 6).remainder(50).bfloat16()
        expected = total.double().index_add_(0, rows, values.double())
        add_rows_rounded(total, rows, values, 5)
        assert torch.equal(total.double(), expected)


def test_every_addition_and_parameter_has_noise_of_its_own() -> None:
    seeds = {
        seed_of_addition(rounded_sums.seed_of_parameter(call, place), addition)
        for call in range(3)
        for place in range(40)
        for addition in range(40)
    }
    assert len(seeds) == 3 * 40 * 40
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("shape", [(18944, 3584), (3584, 18944), (152064, 3584), (1000, 7), (1, 5)])
def test_pieces_begin_at_aligned_rows(shape: tuple[int, int]) -> None:
    """Whatever the shape, pieces cover it once, alike in size and within a quarter of the bound."""
    pieces = list(rounded_sums.pieces_of(torch.empty(shape, device="meta")))
    assert [begin for begin, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
    assert (pieces[0][0], pieces[-1][1]) == (0, shape[0])
    assert all(begin % 8 == 0 for begin, _ in pieces)  # 16 bytes of a row of bf16
    assert all(4 * (end - begin) * shape[1] <= 1.25 * 2**28 for begin, end in pieces)
    assert len(pieces) <= 4 * shape[0] * shape[1] // 2**28 + 1


@pytest.mark.parametrize("additions", [64, 256, 1024])
def test_many_small_additions_count(additions: int) -> None:
    """To nearest, sums stand still where an addend is below half a step; the true one goes on."""
    addends = torch.rand(4096, generator=torch.Generator().manual_seed(0)) / 512
    exact = 1 + additions * addends.double()
    rounded, nearest = torch.ones(4096).bfloat16(), torch.ones(4096).bfloat16()
    for addition in range(additions):
        add_rounded(rounded, addends, seed_of_addition(3, addition))
        nearest += addends
    # The mean of 4,096 elements, each a walk of steps of at most 2^-6 below 4.
    deviation = 2**-6 * additions**0.5 / 4096**0.5 / 2
    assert abs(float((rounded.double() - exact).mean())) < 5 * deviation
    assert float((nearest.double() - exact).mean()) < -0.9 * float((exact - 1).mean())


# A call -------------------------------------------------------------------------------------------


def unrounded(model: PreTrainedModel, fused: bool) -> dict[str, torch.Tensor]:
    """Sums in fp32; inside products what is added has not been rounded to bf16 before."""

    def wide(
        self: MainGrads,
        parameter: nn.Parameter,
        left: torch.Tensor,
        right: torch.Tensor,
        _: int = 0,
    ) -> None:
        self._sum_of(parameter).add_(rounded_sums.product(left, right))

    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(MainGrads, "add_product", wide)
        settings = {**SETTINGS, "main_grad_dtype": "float32", "keep_main_grad": True}
        with oomb.Engine(model, oomb.Config(**settings)) as engine:
            engine.forward_backward(IDS, IDS)
            return {n: engine.main_grad(p).double() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "fused"), [("llama", False), ("llama-tied", True)])
def test_gradients_are_right_on_average(
    name: str, fused: bool, request: pytest.FixtureRequest
) -> None:
    """The mean over calls comes as much nearer to the sums in fp32 as independent errors do."""
    model, calls = make(name, torch.bfloat16), 16
    sums: dict[str, torch.Tensor] = {}
    single: dict[str, float] = {}
    pieces = request.getfixturevalue("inside_products") if fused else []
    exact = unrounded(model, fused)
    with oomb.Engine(model, oomb.Config(**SETTINGS)) as engine:
        for _ in range(calls):
            model.zero_grad(set_to_none=True)
            engine.forward_backward(IDS, IDS)
            for key, parameter in model.named_parameters():
                assert parameter.grad is not None
                found = parameter.grad.double()
                sums[key] = sums.get(key, 0) + found
                single[key] = relative_error(found, exact[key])
    assert bool(pieces) == fused
    for key, total in sums.items():
        assert single[key] < 2**-7, key
        assert relative_error(total / calls, exact[key]) < 2 * single[key] / calls**0.5, key


def test_bits_depend_on_the_call_alone() -> None:
    """Not on tiers or on recompute; another call of the engine draws other noise."""
    model = make("llama", torch.bfloat16)
    expected = gradients(model)
    slot = 2 * 2 * 8 * 16 * 2
    for changed in (
        {"recompute": "layer"},
        {"device_memory": 24 * 3 * slot, "host_memory": "64MiB"},
        {},
    ):
        found = gradients(model, **changed)
        assert all(torch.equal(found[n], value) for n, value in expected.items()), changed
    with oomb.Engine(model, oomb.Config(**SETTINGS)) as engine:
        engine.load_state_dict({"step": 1, "sampling_seed": None})
        model.zero_grad(set_to_none=True)
        engine.forward_backward(IDS, IDS)
    other = {n: p.grad for n, p in model.named_parameters()}
    assert not all(torch.equal(other[n], value) for n, value in expected.items())


def test_gradients_of_several_calls_add_up() -> None:
    model = make("llama", torch.bfloat16)
    with oomb.Engine(model, oomb.Config(**SETTINGS, keep_main_grad=True)) as engine:
        engine.forward_backward(IDS, IDS)
        first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        for name, parameter in model.named_parameters():
            kept = engine.main_grad(parameter)
            assert kept.dtype == torch.bfloat16 and torch.equal(kept, first[name])
            assert parameter.grad is not None
            assert kept.data_ptr() != parameter.grad.data_ptr()
        engine.forward_backward(IDS, IDS)
        for name, parameter in model.named_parameters():
            expected = first[name] + engine.main_grad(parameter)
            assert parameter.grad is not None and torch.equal(parameter.grad, expected)


def test_a_sum_becomes_the_gradient_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", torch.bfloat16)
    sums: dict[nn.Parameter, int] = {}
    commit = MainGrads.commit

    def seen(self: MainGrads, *arguments: Any, **named: Any) -> None:
        sums.update({p: total.data_ptr() for p, total in self._sums.items()})
        commit(self, *arguments, **named)

    monkeypatch.setattr(MainGrads, "commit", seen)
    with oomb.Engine(model, oomb.Config(**SETTINGS)) as engine:
        engine.forward_backward(IDS, IDS)
    assert sums and all(p.grad is not None and p.grad.data_ptr() == at for p, at in sums.items())


# Other dtypes -------------------------------------------------------------------------------------


def test_other_parameters_keep_wide_sums() -> None:
    for own, expected in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        assert sum_dtype(torch.zeros(1, dtype=own), "bfloat16") == expected
    assert sum_dtype(torch.zeros(1, dtype=torch.bfloat16), "float32") == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_without_bf16_parameters_are_refused(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"main_grad_dtype: expected 'float32' .*{name}"):
        oomb.Engine(make("llama", dtype), oomb.Config(**SETTINGS))


# Memory -------------------------------------------------------------------------------------------


def test_plans_count_the_sums_as_they_are() -> None:
    model = make("llama", torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    device = []
    for dtype in ("float32", "bfloat16"):
        with oomb.Engine(model, oomb.Config(**{**SETTINGS, "main_grad_dtype": dtype})) as engine:
            device.append(engine.plan(76).device_bytes)
    assert device[0] - device[1] == pytest.approx(2 * parameters, rel=0.05)
