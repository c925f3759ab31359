"""Audits of sampled and truncated chunks and rounded pages against runs of their own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

import oomb
from engine.dense_mask import Visible, dense_attention
from engine.models import make
from engine.reference import chunked, ordinary, random_ids
from oomb.audit import audit

from .likeness import CHUNK, CLOSE, CONFIG, PAGE, TOKENS, assert_close, likeness


@dataclass(frozen=True, kw_only=True)
class Fixed(oomb.SampledChunks):
    chunks: tuple[int, ...] = ()

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return list(self.chunks)


def vectors(
    model: PreTrainedModel,
    ids: torch.Tensor,
    rule: oomb.SampledChunks,
    subsets: list[tuple[int, ...]],
) -> torch.Tensor:
    """[subsets, parameters]: the gradient that each subset gives."""
    fixed = [Fixed(keep=rule.keep, cap=rule.cap, chunks=chunks) for chunks in subsets]
    return torch.stack([gradients(model, ids, each) for each in fixed])


def gradients(
    model: PreTrainedModel, ids: torch.Tensor, backward: oomb.SampledChunks
) -> torch.Tensor:
    """[parameters]"""
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, backward=backward)
    found = chunked(model, config, ids, ids).gradients
    return torch.cat([found[n].flatten() for n in sorted(n for n, _ in model.named_parameters())])


def exact_vector(model: PreTrainedModel, ids: torch.Tensor, part: str = "") -> torch.Tensor:
    gradients = ordinary(model, ids, ids).gradients
    return torch.cat([gradients[n].flatten() for n in sorted(gradients) if part in n])


@dataclass(frozen=True, kw_only=True)
class Alternate(oomb.SampledChunks):
    """Every other chunk, in turns, with a factor of its own."""

    keep: float = 0.5

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return list(range(step % 2, num_chunks, 2))

    @property
    def loss_factor(self) -> float:
        return 1.5


@dataclass(frozen=True, kw_only=True)
class OfAlternate(Alternate):
    chunks: tuple[int, ...] = ()

    def draw(self, num_chunks: int, step: int) -> list[int]:
        return list(self.chunks)


def test_a_rule_that_draws_its_own_way_is_audited_by_what_it_draws() -> None:
    model, ids = make("llama"), random_ids(1, 60)
    (found,) = audit(model, ids, ids, config=CONFIG, backward=[Alternate()], draws=16).sampled
    assert not found.exhaustive and found.weights == [0.5, 0.5]
    assert isinstance(found.rule, Alternate)
    rows = [gradients(model, ids, OfAlternate(chunks=chunks)) for chunks in ((0, 2), (1, 3))]
    exact = exact_vector(model, ids)
    bias = (torch.stack(rows).mean(0) - exact).norm() / exact.norm()
    assert abs(found.gradient.bias - float(bias)) < CLOSE


@pytest.mark.parametrize("cap", [None, 1.0, 2.0])
def test_spread_is_that_over_all_subsets(cap: float | None) -> None:
    model, ids = make("llama"), random_ids(1, 60)
    rule = oomb.SampledChunks(keep=0.3, cap=cap)
    (found,) = audit(model, ids, ids, config=CONFIG, backward=[rule], draws=16).sampled
    assert found.exhaustive and found.draws == 16
    subsets = [c for n in range(5) for c in itertools.combinations(range(4), n)]
    powers = [0.3 ** len(c) * 0.7 ** (4 - len(c)) for c in subsets]
    weights = torch.tensor(powers, dtype=torch.float64)
    estimates, exact = vectors(model, ids, rule, subsets), exact_vector(model, ids)
    mean = (weights[:, None] * estimates).sum(0)
    spread = (weights * (estimates - mean).square().sum(1)).sum().sqrt() / exact.norm()
    error = (weights * (estimates - exact).square().sum(1)).sum().sqrt() / exact.norm()
    assert abs(found.gradient.spread - float(spread)) < CLOSE
    assert abs(found.gradient.error - float(error)) < CLOSE
    assert abs(found.gradient.bias - float((mean - exact).norm() / exact.norm())) < CLOSE
    assert (found.gradient.bias < 1e-12) == (cap is None)
    single = (estimates - exact).norm(dim=1) / exact.norm()
    assert sorted(found.errors) == pytest.approx(sorted(single.tolist()), rel=1e-9)
    assert sum(w * loss for w, loss in zip(found.weights, found.losses, strict=True)) == (
        pytest.approx(float(ordinary(model, ids, ids).loss), rel=1e-12)
    )


def test_layers_spread_by_their_own_parameters() -> None:
    model, ids = make("llama"), random_ids(1, 40)
    rule = oomb.SampledChunks(keep=0.5)
    (found,) = audit(model, ids, ids, config=CONFIG, backward=[rule], draws=8).sampled
    subsets = [c for n in range(4) for c in itertools.combinations(range(3), n)]
    names = sorted(n for n, _ in model.named_parameters())
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    estimates = vectors(model, ids, rule, subsets)
    for index, layer in enumerate(found.layers):
        own = torch.cat([torch.full((sizes[n],), f"layers.{index}." in n) for n in names])
        exact = exact_vector(model, ids, f"layers.{index}.")
        distances = (estimates[:, own] - exact).square().sum(1).mean()
        assert layer is not None
        assert abs(layer.error - float(distances.sqrt() / exact.norm())) < CLOSE


def test_random_draws_are_those_of_the_rule() -> None:
    model, ids = make("llama"), random_ids(1, TOKENS)
    rule = oomb.SampledChunks(keep=0.5, seed=3)
    (found,) = audit(model, ids, ids, config=CONFIG, backward=[rule], draws=6).sampled
    assert not found.exhaustive and found.draws == 6
    drawn = [tuple(rule.draw(5, step)) for step in range(6)]
    estimates, exact = vectors(model, ids, rule, drawn), exact_vector(model, ids)
    mean = estimates.mean(0)
    variance = (estimates - mean).square().sum(1).sum() / 5  # of a sample of 6
    assert abs(found.gradient.spread - float(variance.sqrt() / exact.norm())) < CLOSE
    assert abs(found.gradient.bias - float((mean - exact).norm() / exact.norm())) < CLOSE


@pytest.mark.parametrize("window", [0, 1, 3])
def test_truncated_chunks_are_compared_as_they_are(window: int) -> None:
    """With an ordinary backward in which farther keys and values are constants."""
    model, ids = make("llama"), random_ids(1, TOKENS)
    rule = oomb.TruncatedChunks(window=window)
    (found,) = audit(model, ids, ids, config=CONFIG, backward=[rule]).truncated
    visible = Visible(1, TOKENS, CHUNK, PAGE, [], window=window)
    with dense_attention(model, visible):
        gradients = ordinary(model, ids, ids).gradients
    whole = torch.cat([gradients[n].flatten() for n in sorted(gradients)])
    assert_close(found.gradient, likeness(whole, exact_vector(model, ids)))
    for index, layer in enumerate(found.layers):
        part = f"layers.{index}."
        own = torch.cat([gradients[n].flatten() for n in sorted(gradients) if part in n])
        assert_close(layer, likeness(own, exact_vector(model, ids, part)))


def sums(
    model: PreTrainedModel, ids: torch.Tensor, part: str = "", **settings: str
) -> torch.Tensor:
    """An engine's gradient as one vector, in fp32."""
    config = oomb.Config(chunk_size=CHUNK, page_size=PAGE, keep_main_grad=True, **settings)
    with oomb.Engine(model, config) as engine:
        engine.forward_backward(ids, ids)
        found = {n: engine.main_grad(p) for n, p in model.named_parameters()}
    model.zero_grad()
    return torch.cat([found[n].flatten().double() for n in sorted(found) if part in n])


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_gradient_pages_in_bf16_are_compared_with_pages_in_fp32(own: str) -> None:
    """Whatever pages the config asks for."""
    model, ids = make("llama", torch.bfloat16), random_ids(1, TOKENS)
    config = replace(CONFIG, kv_grad_dtype=own)
    rounded = audit(model, ids, ids, config=config, kv_grad_dtype="bfloat16").rounded
    assert rounded is not None and rounded.kv_grad_dtype == "bfloat16"
    expected = likeness(sums(model, ids, kv_grad_dtype="bfloat16"), sums(model, ids))
    assert 0 < expected.error < 0.05
    assert rounded.gradient.error == pytest.approx(expected.error, rel=1e-6)
    for index, layer in enumerate(rounded.layers):
        part = f"layers.{index}."
        found = sums(model, ids, part, kv_grad_dtype="bfloat16")
        assert layer is not None
        assert layer.error == pytest.approx(likeness(found, sums(model, ids, part)).error, rel=1e-6)


def test_pages_of_wide_keys_are_not_rounded() -> None:
    ids = random_ids(1, TOKENS)
    found = audit(make("llama", torch.float32), ids, ids, config=CONFIG, kv_grad_dtype="bfloat16")
    assert found.rounded is not None and found.rounded.gradient.error == 0
    assert found.advice == ["Gradient pages are not in bfloat16 here: keys are in a wider dtype."]


def test_pages_of_keys_under_autocast_are_rounded() -> None:
    model, ids = make("llama", torch.float32), random_ids(1, TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        found = audit(model, ids, ids, config=CONFIG, kv_grad_dtype="bfloat16")
    assert found.rounded is not None and 0 < found.rounded.gradient.error < 0.05
    (sentence,) = found.advice
    assert "within 10%" in sentence and "without bias" in sentence
