"""Buckets of tensors that are summed over ranks: even, in place where they can be, in order."""

from __future__ import annotations

import pytest
import torch

from oomb.parallel import buckets
from oomb.parallel.buckets import add_up_in_buckets, bucket_bytes

SIZES = [[4096], [1], [24, 7, 5000], [0, 3], [300, 300, 300, 300], [1025], []]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_is_added_up_once_in_even_parts(
    sizes: list[int], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_BUCKET_BYTES", 4096)
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
    tensors = [torch.arange(n, dtype=torch.float64).to(dtypes[i % 4]) for i, n in enumerate(sizes)]
    before = [x.clone() for x in tensors]
    places = [x.data_ptr() for x in tensors]
    given: list[int] = []

    def add_up(flat: torch.Tensor) -> None:
        assert flat.ndim == 1
        assert flat.is_contiguous()
        assert flat.nbytes % (16 * ranks) == 0
        assert flat.nbytes <= bucket_bytes(ranks) <= 4096
        assert flat.data_ptr() % 16 == 0
        given.append(flat.numel())
        flat.add_(1)

    add_up_in_buckets(tensors, ranks, add_up)
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x, y + 1)
    assert [x.data_ptr() for x in tensors] == places


def test_a_large_tensor_is_added_up_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_BUCKET_BYTES", 4096)
    large, seen = torch.zeros(64, 64), []
    add_up_in_buckets([large], 2, lambda flat: seen.append((flat.data_ptr(), flat.numel())))
    assert seen == [(large.data_ptr() + 4096 * i, 1024) for i in range(4)]


def test_what_begins_between_words_is_added_up_elsewhere() -> None:
    whole = torch.arange(67.0)
    view = whole[3:]

    def add_up(flat: torch.Tensor) -> None:
        assert flat.data_ptr() % 16 == 0
        flat.add_(1)

    add_up_in_buckets([view], 2, add_up)
    assert torch.equal(whole, torch.arange(67.0) + (torch.arange(67) >= 3))
