"""SpaCO: sampled chunks estimate loss and gradient without bias."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

import oomb

from .models import make
from .reference import (
    EXACT,
    Result,
    assert_equal,
    assert_identical,
    chunked,
    ordinary,
    random_ids,
    relative_error,
)

CHUNKS, KEEP = 5, 0.3


@dataclass(frozen=True, kw_only=True)
class Fixed(oomb.SampledChunks):
    """Sweeps the given chunks."""

    chunks: tuple[int, ...] = ()

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return list(self.chunks)


def config(rule: oomb.SampledChunks, **settings: object) -> oomb.Config:
    return oomb.Config(chunk_size=16, page_size=8, backward=rule, **settings)  # type: ignore[arg-type]


def mean_over_all_draws(
    name: str, cap: float | None = None, **arguments: torch.Tensor
) -> tuple[Result, Result]:
    """The probability-weighted mean over all 2^5 subsets, and ordinary training."""
    model = make(name)
    ids = random_ids(1, 75)
    expected = ordinary(model, ids, ids, **arguments)
    mean = Result(torch.zeros((), dtype=torch.float64), {})
    for number in range(CHUNKS + 1):
        weight = KEEP**number * (1 - KEEP) ** (CHUNKS - number)
        for drawn in itertools.combinations(range(CHUNKS), number):
            rule = Fixed(keep=KEEP, chunks=drawn, cap=cap)
            one = chunked(model, config(rule), ids, ids, **arguments)
            assert set(one.gradients) == set(expected.gradients)
            mean.loss += weight * one.loss
            for key, gradient in one.gradients.items():
                mean.gradients[key] = mean.gradients.get(key, 0) + weight * gradient
    return mean, expected


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_mean_over_all_draws_is_exact(name: str) -> None:
    mean, expected = mean_over_all_draws(name)
    assert_equal(mean, expected)


def test_a_cap_below_one_over_keep_biases() -> None:
    """The loss stays exact: the cap bounds the factor on the keys' and values' gradient."""
    mean, expected = mean_over_all_draws("llama", cap=2.0)
    assert relative_error(mean.loss, expected.loss) <= EXACT
    errors = [relative_error(mean.gradients[k], g) for k, g in expected.gradients.items()]
    assert max(errors) > 1e-3


def test_factors() -> None:
    assert oomb.SampledChunks(keep=0.25).dkv_factor == 4
    assert oomb.SampledChunks(keep=0.25, cap=2).dkv_factor == 2
    assert oomb.SampledChunks(keep=0.25, cap=5).dkv_factor == 4
    assert oomb.SampledChunks(keep=0.25, cap=2).loss_factor == 4


def test_a_high_cap_changes_no_bit() -> None:
    model, ids = make("llama"), random_ids(1, 75)
    free = chunked(model, config(Fixed(keep=KEEP, chunks=(1, 3, 4))), ids, ids)
    capped = chunked(model, config(Fixed(keep=KEEP, chunks=(1, 3, 4), cap=100.0)), ids, ids)
    assert_identical(capped, free)


def test_all_chunks_with_certainty_are_the_exact_gradient() -> None:
    model, ids = make("llama"), random_ids(2, 75)
    exact = chunked(model, oomb.Config(chunk_size=16, page_size=8), ids, ids)
    assert_identical(chunked(model, config(oomb.SampledChunks(keep=1.0)), ids, ids), exact)


def test_chunks_after_the_last_kept_are_not_filled() -> None:
    seen: list[tuple[str, int]] = []
    ids = random_ids(1, 75)
    rule = Fixed(keep=KEEP, chunks=(0, 2))
    chunked(
        make("llama"),
        config(rule),
        ids,
        ids,
        on_progress=lambda progress: seen.append((progress.phase, progress.chunk)),
    )
    assert seen == [("fill", 0), ("fill", 1), ("sweep", 2), ("sweep", 0)]


def test_an_empty_draw_adds_zero() -> None:
    model, ids = make("llama"), random_ids(1, 75)
    with oomb.Engine(model, config(Fixed(keep=KEEP))) as engine:
        step = engine.forward_backward(ids, ids)
        assert float(step.loss) == 0
        assert step.num_valid_tokens == 74
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        engine.forward_backward(ids, ids)
        assert all(bool((p.grad == 1).all()) for p in model.parameters())
        assert engine.state_dict()["step"] == 2


def test_draws_are_independent_and_as_likely_as_said() -> None:
    rule = oomb.SampledChunks(keep=KEEP, seed=11)
    draws = torch.zeros(4000, 6)
    for step in range(4000):
        chunks = rule.draw(6, step)
        assert chunks == sorted(set(chunks))
        draws[step, chunks] = 1
    # Five standard deviations of a mean of 4,000 draws.
    assert (draws.mean(0) - KEEP).abs().max() < 5 * (KEEP * (1 - KEEP) / 4000) ** 0.5
    correlation = torch.corrcoef(draws.T) - torch.eye(6)
    assert correlation.abs().max() < 5 / 4000**0.5
    assert rule.draw(6, 7) == oomb.SampledChunks(keep=KEEP, seed=11).draw(6, 7)
    assert any(
        rule.draw(6, step) != oomb.SampledChunks(keep=KEEP, seed=12).draw(6, step)
        for step in range(20)
    )


def swept_chunks(engine: oomb.Engine, ids: torch.Tensor) -> list[int]:
    seen: list[int] = []

    def report(progress: oomb.Progress) -> None:
        if progress.phase == "sweep":
            seen.append(progress.chunk)

    engine.forward_backward(ids, ids, on_progress=report)
    return seen[::-1]


def test_a_resumed_engine_draws_what_the_first_would_have() -> None:
    model, ids = make("llama"), random_ids(1, 75)
    rule = oomb.SampledChunks(keep=0.5, seed=3)
    with oomb.Engine(model, config(rule)) as engine:
        for _ in range(3):
            swept_chunks(engine, ids)
        state = engine.state_dict()
        expected = [swept_chunks(engine, ids) for _ in range(6)]
    assert len({tuple(chunks) for chunks in expected}) > 1
    assert expected == [rule.draw(5, step) for step in range(3, 9)]
    with oomb.Engine(model, config(rule)) as engine:
        engine.load_state_dict(state)
        assert [swept_chunks(engine, ids) for _ in range(6)] == expected


def test_evaluate_draws_nothing() -> None:
    model, ids = make("llama"), random_ids(1, 75)
    expected = ordinary(model, ids, ids)
    with oomb.Engine(model, config(oomb.SampledChunks(keep=0.1))) as engine:
        assert relative_error(engine.evaluate(ids, ids).loss, expected.loss) <= EXACT
        assert engine.state_dict()["step"] == 0


@pytest.mark.parametrize("drawn", [[3, 1], [1, 1], [5], [-1, 2]], ids=str)
def test_a_wrong_draw_is_refused(drawn: list[int]) -> None:
    ids = random_ids(1, 75)
    rule = Fixed(keep=KEEP, chunks=tuple(drawn))
    with pytest.raises(ValueError, match=r"draw: expected ascending chunks below 5"):
        chunked(make("llama"), config(rule), ids, ids)
