"""Rows that begin alike, run as a tree: the rows' own values and gradients, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import oomb
from oomb.core.tree import Stretch, shared_stretches
from oomb.engine.two_pass import TwoPass

from .models import make
from .recurrent_models import make_recurrent
from .reference import EXACT, Gradients, random_ids, take_gradients
from .tiers import slot_bytes
from .two_pass_losses import Values, assert_close, ordinary_values, values_of

SETTINGS: dict[str, Any] = {"chunk_size": 16, "page_size": 8}


def _tokens(seed: int, tokens: int) -> torch.Tensor:
    return random_ids(1, tokens, seed)[0]


def _group(prompt: int, *completions: int) -> list[torch.Tensor]:
    """Rows of one prompt and completions of so many tokens."""
    first = _tokens(1, prompt)
    return [torch.cat([first, _tokens(10 + i, n)]) for i, n in enumerate(completions)]


def _turns() -> list[torch.Tensor]:
    """Two turns that branch, a row that ends where others branch, twins, one of its own."""
    prompt, answer = _tokens(1, 20), _tokens(2, 13)
    nested = torch.cat([prompt, answer])
    return [
        torch.cat([nested, _tokens(3, 5)]),
        _tokens(6, 40),
        torch.cat([nested, _tokens(4, 37)]),
        nested,
        torch.cat([prompt, _tokens(5, 9)]),
        torch.cat([nested, _tokens(4, 37)]),
    ]


GROUPS = {
    **{f"prompt of {n}": _group(n, 5, 20, 1, 41) for n in (1, 7, 15, 16, 17, 31, 32, 33, 40)},
    "completions up to borders": _group(24, 7, 8, 9, 16, 17),
    "nested": _turns(),
    "nothing in common": [_tokens(i, 20 + i) for i in range(3)],
}


class Batch:
    """Rows padded on the right; their own weights of every value, and the loss they make."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        places = torch.arange(self.ids.shape[1])
        self.mask = (places < torch.tensor([len(row) for row in rows])[:, None]).long()
        self.labels = self.ids.masked_fill(self.mask == 0, -100)
        self.labels[0, : len(rows[0]) // 2] = -100  # what others of the group predict all the same
        self.labels[-1, 3] = -100

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids, "labels": self.labels, "attention_mask": self.mask}

    def loss(self, values: Values) -> torch.Tensor:
        """Couples all tokens of all rows."""
        random = torch.Generator().manual_seed(3)
        total = torch.zeros((), dtype=torch.float64)
        for value in values.values():
            weight = torch.randn(value.shape, generator=random, dtype=torch.float64)
            mask = self.mask[..., None] if value.ndim == 3 else self.mask
            rows = (value * weight * mask).flatten(1).sum(1)
            total = total - F.logsigmoid(rows / 20).sum() + rows.exp().log1p().mean()
        return total


def tree(
    model: Any, config: oomb.Config, batch: Batch, **arguments: Any
) -> tuple[Values, Gradients, oomb.Stats]:
    with oomb.Engine(model, config) as engine:
        arguments = {"entropies": True, "share_prefixes": True, **arguments}
        with engine.two_pass(**batch.arguments, **arguments) as call:  # type: ignore[arg-type]
            values = values_of(call)
            batch.loss(values).backward()
            stats = call.sweep()
    return {n: v.detach() for n, v in values.items()}, take_gradients(model), stats


def ordinary(model: Any, batch: Batch, *names: str) -> tuple[Values, Gradients]:
    arguments = {"input_ids": batch.ids, "attention_mask": batch.mask, "labels": batch.labels}
    found = ordinary_values(model, 1.0, **arguments)
    values = {name: found[name] for name in ("logprobs", "entropies", *names)}
    batch.loss(values).backward()
    return {n: v.detach() for n, v in values.items()}, take_gradients(model)


def one_by_one(model: Any, config: oomb.Config, batch: Batch) -> tuple[Values, Gradients]:
    """Each row in a call of its own."""
    names, lengths = ("logprobs", "entropies"), batch.mask.sum(1).tolist()
    values = {name: torch.zeros(batch.ids.shape, dtype=torch.float64) for name in names}
    with oomb.Engine(model, config) as engine:
        for sweeps in (False, True):
            if sweeps:
                leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
                batch.loss(leaves).backward()
            for row, length in enumerate(lengths):
                span = slice(row, row + 1), slice(0, length)
                arguments = batch.ids[span], batch.labels[span]
                with engine.two_pass(*arguments, entropies=True) as call:
                    found = values_of(call)
                    if not sweeps:
                        for name in names:
                            values[name][span] = found[name].detach()
                        continue
                    given = [leaves[name].grad[span] for name in names]  # type: ignore[index]
                    torch.autograd.backward([found[name] for name in names], given)
                    call.sweep()
    return values, take_gradients(model)


def assert_same(
    found: tuple[Values, Gradients], expected: tuple[Values, Gradients], tolerance: float = EXACT
) -> None:
    assert_close(found[0], expected[0], tolerance)
    assert_close(found[1], expected[1], tolerance)


@pytest.mark.parametrize("group", ["prompt of 33", "nested"])
def test_plain_cross_entropy_is_that_of_the_rows_in_one_call(group: str) -> None:
    batch, model, config = Batch(GROUPS[group]), make("qwen3"), oomb.Config(**SETTINGS)
    with oomb.Engine(model, config) as engine:
        step = engine.forward_backward(**batch.arguments)
        expected = take_gradients(model)
        with engine.two_pass(**batch.arguments, share_prefixes=True) as call:
            loss = -call.logprobs.sum() / call.num_valid_tokens
            loss.backward()
            call.sweep()
    assert_close({"loss": loss.detach()}, {"loss": step.loss})
    assert_close(take_gradients(model), expected)


@pytest.mark.parametrize("group", GROUPS)
def test_dense_equals_one_backward(group: str) -> None:
    """Windows hide pages across branches (mistral's is 20 tokens)."""
    model, batch = make("mistral" if "3" in group else "qwen3"), Batch(GROUPS[group])
    found = tree(model, oomb.Config(**SETTINGS), batch)
    assert_same(found[:2], ordinary(model, batch))


@pytest.mark.parametrize("name", ["gpt-oss", "qwen2-tied"])
def test_other_settings(name: str) -> None:
    """Sinks and windows; recomputed layers, kept outputs, chunks longer than any row."""
    model, batch = make(name), Batch(GROUPS["nested"])
    expected = ordinary(model, batch)
    for settings in (
        {"recompute": "layer"},
        {"keep_outputs": "all"},
        {"chunk_size": 80},
        {"chunk_size": 8},
    ):
        found = tree(model, oomb.Config(**{**SETTINGS, **settings}), batch)
        assert_same(found[:2], expected)


def test_hidden_states() -> None:
    model, batch = make("llama"), Batch(GROUPS["nested"])
    config = oomb.Config(**SETTINGS)
    values, gradients, _ = tree(model, config, batch, hidden=True, statistics=("mean_logits",))
    expected = ordinary(model, batch, "hidden")
    expected[0]["hidden"] = expected[0]["hidden"] * batch.mask[..., None]
    assert_same((values, gradients), expected)


RULES = {
    "all heads": oomb.TopKPages(budget=3),
    "each head, forced pages": oomb.TopKPages(
        budget=4, share="kv_head", sink_pages=1, recent_pages=1
    ),
    "of a chunk": oomb.TopKPages(budget=2, chunk_budget=3, score="token_softmax"),
}


@pytest.mark.parametrize("rule", RULES)
def test_sparse_equals_rows_one_by_one(rule: str) -> None:
    """Both choose from the same past, since a branch begins at a border of its row's chunks."""
    model = make("llama")
    config = oomb.Config(**SETTINGS, attention=RULES[rule])
    for group in ("nested", "prompt of 33"):
        batch = Batch([torch.cat([_tokens(9, 32), row]) for row in GROUPS[group]])
        assert_same(tree(model, config, batch)[:2], one_by_one(model, config, batch))


@pytest.mark.parametrize("attention", [oomb.Dense(), RULES["all heads"]])
def test_tiers_change_no_bit(attention: Any) -> None:
    """Pages of a prompt that travel between branches; and again, bit by bit."""
    model = make("llama")
    batch = Batch([torch.cat([_tokens(9, 48), row]) for row in GROUPS["nested"]])
    settings: dict[str, Any] = {**SETTINGS, "attention": attention}
    expected = tree(model, oomb.Config(**settings), batch)
    assert expected[2].host_peak_bytes == 0
    for slots in (None, 8, 21):
        config = oomb.Config(**settings)
        if slots is not None:
            settings["device_memory"] = slots * slot_bytes(model, config)
            config = oomb.Config(**settings, host_memory="64MiB")
        found = tree(model, config, batch)
        assert (found[2].host_peak_bytes > 0) == (slots is not None)
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_prompt_takes_its_tokens_once() -> None:
    """What is run, and what has pages: no leaf's last chunk does."""
    model, batch = make("llama"), Batch(_group(65, 9, 9, 9, 9))
    seen: list[oomb.Progress] = []
    config = oomb.Config(**SETTINGS)
    tree(model, config, batch, on_progress=seen.append)
    fill = [progress.tokens_done for progress in seen if progress.phase == "fill"]
    assert fill[-1] == 64 + 4 * 9  # 65 + 9 tokens each, of which the last predicts nothing
    pages, gradients = 8, 8
    most = (pages + gradients) * 3 * slot_bytes(model, config)
    assert max(progress.device_bytes for progress in seen) == most


def test_another_call_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwoPass, "_said", True)
    model, batch = make("llama"), Batch(GROUPS["nested"])
    expected = tree(model, oomb.Config(**SETTINGS), batch)
    with oomb.Engine(model, oomb.Config(**SETTINGS)) as engine:
        given: dict[str, Any] = {**batch.arguments, "entropies": True, "share_prefixes": True}
        with engine.two_pass(**given) as call:
            engine.evaluate(**batch.arguments)
            batch.loss(values_of(call)).backward()
            call.sweep()
        found = take_gradients(model)
        with torch.no_grad(), engine.two_pass(**given) as call:
            values = values_of(call)
    assert_same((values, found), expected[:2], 0.0)


def test_auto_shares_where_that_runs_fewer_tokens() -> None:
    with oomb.Engine(make("llama"), oomb.Config(**SETTINGS)) as engine:
        alike, unlike = GROUPS["nested"], [_tokens(i, 20) for i in range(3)]
        for rows, shares in ((alike, True), (unlike, False), ([*unlike, _tokens(9, 60)], True)):
            given: dict[str, Any] = {**Batch(rows).arguments, "share_prefixes": "auto"}
            assert (engine.two_pass(**given)._tree is not None) == shares


def test_stretches_of_random_rows() -> None:
    """Each row is found again, parts where it must, and nothing shared stands twice."""
    random = np.random.default_rng(0)
    for _ in range(300):
        unit, rows = int(random.integers(1, 5)), int(random.integers(1, 7))
        tokens = random.integers(0, 2, (rows, 14))
        copied = random.integers(0, rows, rows)
        for row, cut in zip(range(rows), random.integers(0, 15, rows), strict=True):
            tokens[row, :cut] = tokens[copied[row], :cut]
        targets = np.where(random.random((rows, 14)) < 0.5, np.roll(tokens, -1, 1), -100)
        positions = np.broadcast_to(np.arange(14), (rows, 14))
        lengths = random.integers(0, 15, rows).tolist()
        found = shared_stretches(tokens, positions, targets, lengths, unit)
        for row, length in enumerate(lengths):
            end, before = 0, -1
            for number, one in enumerate(found):
                if row in one.rows:
                    assert (one.parent, one.begin) == (before, end) and one.end > end
                    span, end, before = slice(one.begin, one.end), one.end, number
                    assert (tokens[row, span] == tokens[one.rows[0], span]).all()
                    own = targets[row, span]
                    assert ((own == one.targets) | (own == -100)).all()
            assert end == length
        for number, one in enumerate(found):
            assert len(one.rows) == 1 or (one.end - one.begin) % unit == 0
            _assert_siblings_differ(found[:number], one, tokens, targets, unit)


def _assert_siblings_differ(
    earlier: list[Stretch], one: Stretch, tokens: Any, targets: Any, unit: int
) -> None:
    for other in earlier:
        span = slice(one.begin, one.begin + unit)
        whole = min(one.end, other.end) >= one.begin + unit
        if other.parent == one.parent and whole:
            same = (tokens[other.rows[0], span] == tokens[one.rows[0], span]).all()
            left, right = targets[other.rows[0], span], one.targets[:unit]
            assert not (same and (left == right).all())


def test_refused() -> None:
    batch = Batch(GROUPS["nested"])
    ids = batch.ids
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"share_prefixes": 1}, "share_prefixes: expected True, False or 'auto', got 1"),
        (
            {"backward": oomb.TruncatedChunks(window=2)},
            {},
            r"share_prefixes: expected backward=oomb.AllChunks\(\) beside it, got Truncated",
        ),
        (
            {},
            {"document_ids": (torch.arange(ids.shape[1]) > 9).long()[None]},
            "share_prefixes: expected rows of one document each, got packed documents",
        ),
    ]
    for settings, arguments, text in cases:
        with oomb.Engine(make("llama"), oomb.Config(**SETTINGS, **settings)) as engine:
            with pytest.raises(ValueError, match=text):
                engine.two_pass(**{**batch.arguments, "share_prefixes": True, **arguments})
            with engine.two_pass(**{**batch.arguments, "share_prefixes": "auto"}) as call:
                assert (call._tree is None) == bool(settings)
    text = "tokens meet in attention alone, got layers.0.conv"
    engine = oomb.Engine(make_recurrent("lfm2"), oomb.Config(**SETTINGS))
    with engine, pytest.raises(ValueError, match=text):
        engine.two_pass(**batch.arguments, share_prefixes=True)
