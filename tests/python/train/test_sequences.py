"""Windows and packs: every token once, documents whole where they fit, batches that mean it too."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oomb
from oomb.cli.demo_model import small_model
from oomb.train.sequences import IGNORED, SequenceDataset, Tokens, collate, packed, windows


def tokens_of(documents: list[list[int]], segment: int) -> Tokens:
    """Tokens on "disk", their documents in rows of ``segment`` tokens."""
    rows: dict[str, list[object]] = {"document": [], "input_ids": []}
    for number, ids in enumerate(documents):
        for begin in range(0, len(ids), segment):
            rows["document"].append(number)
            rows["input_ids"].append(ids[begin : begin + segment])
    features = datasets.Features(
        document=datasets.Value("int64"), input_ids=datasets.List(datasets.Value("int32"))
    )
    return Tokens(datasets.Dataset.from_dict(rows, features=features))


def borders(lengths: list[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(lengths))
    return [(end - length, end) for length, end in zip(lengths, ends, strict=True)]


lengths_of_documents = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def test_any_stretch_of_tokens_can_be_read() -> None:
    documents = [[10 * n + i for i in range(length)] for n, length in enumerate((7, 1, 12, 5))]
    flat = [token for ids in documents for token in ids]
    tokens = tokens_of(documents, segment=4)
    assert len(tokens) == 25
    assert tokens.documents == borders([7, 1, 12, 5])
    for begin in range(25):
        for end in range(begin + 1, 26):
            assert tokens[begin:end].tolist() == flat[begin:end]


@given(lengths_of_documents, st.integers(2, 30))
def test_windows_are_the_documents_in_order(lengths: list[int], context: int) -> None:
    documents = borders(lengths)
    found = windows(documents, context)
    for begin, end in documents:
        pieces = [piece for [piece] in found if begin <= piece[0] < end]
        alone = (end - begin) % context == 1  # a single token at the end predicts nothing
        expected = list(range(begin, end - alone))
        assert [i for first, last in pieces for i in range(first, last)] == expected
        assert all(last - first == context for first, last in pieces[:-1])


@given(lengths_of_documents, st.integers(2, 30))
def test_packs_hold_every_window_once(lengths: list[int], context: int) -> None:
    documents = borders(lengths)
    sequences = packed(documents, context)
    pieces = sorted(piece for sequence in sequences for piece in sequence)
    assert pieces == sorted(piece for [piece] in windows(documents, context))
    assert all(sum(last - first for first, last in s) <= context for s in sequences)


@given(lengths_of_documents, st.integers(2, 30))
def test_packs_leave_no_room_for_another(lengths: list[int], context: int) -> None:
    totals = [sum(e - b for b, e in s) for s in packed(borders(lengths), context)]
    # Best fit: two sequences never could have been one.
    assert all(a + b > context for a, b in itertools.combinations(sorted(totals)[:2], 2))


def test_packing_many_documents_is_quick_enough_to_finish() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(2, 5000) for _ in range(100_000)]
    sequences = packed(borders(lengths), 8192)
    assert len(sequences) * 8192 < 1.01 * sum(lengths)


def test_items_mark_documents_and_first_tokens() -> None:
    tokens = tokens_of([[1, 2, 3], [4, 5], [6, 7, 8, 9]], segment=2)
    [item] = SequenceDataset(tokens, [[(5, 9), (0, 3)]])
    assert item["input_ids"].tolist() == [6, 7, 8, 9, 1, 2, 3]
    assert item["labels"].tolist() == [IGNORED, 7, 8, 9, IGNORED, 2, 3]
    assert item["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert {column.dtype for column in item.values()} == {torch.int64}


def test_lengths_told() -> None:
    data = SequenceDataset(tokens_of([list(range(9))], 4), [[(0, 4), (4, 6)], [(6, 9)]])
    assert (data.num_tokens, data.longest, data.longest_document) == (9, 6, 4)
    assert len(data.subset([1])) == 1 and data.subset([1]).num_tokens == 3


def test_batches_mean_the_same_as_their_items() -> None:
    """Packed documents and padding: the loss is that of each document by itself."""
    model = small_model(dtype=torch.float64)
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 256, size).tolist() for size in (70, 33, 5, 64, 10)]
    tokens = tokens_of(documents, segment=16)
    data = SequenceDataset(tokens, packed(tokens.documents, 100))
    batch = collate([data[index] for index in range(len(data))])
    assert batch["input_ids"].shape == (2, 64 + 33)  # and 70 + 10 + 5, padded by 12
    losses, counted = 0.0, 0
    with oomb.Engine(model, oomb.Config(chunk_size=32, page_size=16)) as engine:
        together = engine.evaluate(**batch)
        for ids in documents:
            alone = torch.tensor([ids])
            step = engine.evaluate(alone, alone)
            losses += float(step.loss) * step.num_valid_tokens
            counted += step.num_valid_tokens
    assert together.num_valid_tokens == counted == sum(map(len, documents)) - len(documents)
    assert float(together.loss) == pytest.approx(losses / counted, rel=1e-12)


def test_a_dataset_from_disk_reads_the_same(tmp_path: Path) -> None:
    rows = {"document": [0, 0, 5], "input_ids": [[1, 2], [3], [4, 5, 6]]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "d"))
    tokens = Tokens(datasets.load_from_disk(str(tmp_path / "d")))
    assert tokens[0:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens.documents == [(0, 3), (3, 6)]
