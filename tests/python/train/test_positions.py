"""Skipped positions: the distances of a long text, the text and its targets as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_sequences import tokens_of

import oomb
from engine.dense_mask import Visible, dense_attention
from engine.models import make
from engine.reference import assert_equal, chunked, ordinary
from oomb.train.errors import BadInput
from oomb.train.positions import SkippedPositions
from oomb.train.reading import read_settings
from oomb.train.sequences import SequenceDataset, collate

DOCUMENTS = [list(range(1, 41)), list(range(50, 61)), [7, 8], list(range(2, 52))]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 100, 999, 1000, 1500])
@pytest.mark.parametrize("pieces", [2, 8, 400])
def test_pieces_stay_whole_within_the_span(num_tokens: int, pieces: int) -> None:
    skipped = SkippedPositions(span=1000, pieces=pieces, seed=3)
    positions = skipped.of(17, num_tokens)
    steps = positions.diff()
    assert positions.dtype == torch.int64 and len(positions) == num_tokens
    assert positions[0] == 0 and positions[-1] < max(1000, num_tokens)
    assert (steps >= 1).all() and int((steps > 1).sum()) <= pieces - 1
    if 7 <= num_tokens < 999:
        assert int((steps > 1).sum()) >= 1
    assert torch.equal(positions, skipped.of(17, num_tokens))


def test_skips_reach_all_of_the_span_and_differ() -> None:
    last = {
        int(SkippedPositions(1000, 8, seed).of(b, 100)[-1]) for seed in (0, 1) for b in range(50)
    }
    assert len(last) > 60 and min(last) >= 99 and 900 < max(last) < 1000
    gaps = {
        int(SkippedPositions(1000, 2, 0).of(begin, 100).diff().argmax()) for begin in range(300)
    }
    assert min(gaps) < 5 and max(gaps) > 93  # borders are everywhere


def dataset(skipped: SkippedPositions | None) -> SequenceDataset:
    tokens = tokens_of(DOCUMENTS, segment=16)
    first, second, third, fourth = tokens.documents
    data = SequenceDataset(tokens, [[first, second, third], [fourth]])
    return data if skipped is None else data.spread(skipped)


def test_only_positions_change() -> None:
    plain, spread = dataset(None), dataset(SkippedPositions(span=300, pieces=4, seed=0))
    for before, after in zip(plain, spread, strict=False):
        assert torch.equal(before["input_ids"], after["input_ids"])
        assert torch.equal(before["labels"], after["labels"])
    assert spread[0]["document_ids"].unique(return_counts=True)[1].tolist() == [40, 11, 2]
    assert not torch.equal(spread[1]["position_ids"], plain[1]["position_ids"])
    assert (plain.longest_document, spread.longest_document) == (50, 300)
    assert spread.subset([1])[0].keys() == spread[1].keys()
    identities = {plain.identity(), spread.identity()}
    identities.add(dataset(SkippedPositions(span=300, pieces=4, seed=1)).identity())
    assert len(identities) == 3


def test_training_is_ordinary_training_at_those_positions() -> None:
    """A batch with padding, in which a document goes on where its positions skip."""
    model = make("llama")
    batch = collate([dataset(SkippedPositions(300, 4, 0))[index] for index in range(2)])
    ids, labels = batch["input_ids"] % 97, batch["labels"].where(batch["labels"] < 0, 1)
    labels = torch.where(labels < 0, labels, ids)
    documents = batch["document_ids"]
    config = oomb.Config(chunk_size=16, page_size=4)
    arguments = {"position_ids": batch["position_ids"], "document_ids": documents}
    found = chunked(model, config, ids, labels, **arguments)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    begins = torch.where(starts, torch.arange(ids.shape[1]), 0).cummax(dim=1).values
    visible = Visible(2, ids.shape[1], 16, 4, [], document_start=begins)
    with dense_attention(model, visible):
        expected = ordinary(model, ids, labels, starts=starts, position_ids=batch["position_ids"])
    assert_equal(found, expected)


def test_positions_that_fall_inside_a_document_are_refused() -> None:
    model, ids = make("llama"), torch.arange(1, 9)[None]
    falling = torch.tensor([[0, 1, 2, 5, 4, 5, 6, 7]])
    documents = torch.zeros_like(ids)
    with (
        oomb.Engine(model, oomb.Config(chunk_size=4, page_size=4)) as engine,
        pytest.raises(ValueError, match="document_ids: expected documents that start where"),
    ):
        engine.evaluate(ids, ids, position_ids=falling, document_ids=documents)


def test_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("{output_dir: r, model: {name: m}, data: {train: a.txt}, context: 64}")
    data = read_settings(file, ["data.simulated_context=1K"]).data
    assert (data.simulated_context, data.simulated_pieces) == (1024, 8)
    with pytest.raises(BadInput, match=r"data\.simulated_context: expected more than context 64"):
        read_settings(file, ["data.simulated_context=64"])
