"""The page lists of a call, as the page manager is told of them."""

from __future__ import annotations

import pytest
import torch

from oomb.config import TopKPages
from oomb.core.layout import Chunks
from oomb.core.page_lists import ListSizes, PageLists
from oomb.model.layer_shape import LayerShape

PAGE, CHUNK, PAGES = 4, 16, 24  # of the longest sequence
BUDGET = 5


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("share", ["kv_head", "all_heads"])
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_the_distinct_ones_of_all_lists(batch: int, share: str, seed: int) -> None:
    rule = TopKPages(budget=BUDGET, share=share)  # type: ignore[arg-type]
    shapes = [LayerShape(4, 2, 8, 0)]
    sizes = ListSizes.of(rule, Chunks(PAGES * PAGE, CHUNK, PAGE), shapes, batch)
    lists = PageLists(sizes, [0], PAGES, torch.device("cpu"), keeps=True)
    chunk = sizes.first_chunk
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-1, PAGES, sizes.of_layer(chunk), generator=generator, dtype=torch.int32)
    drawn[0, 0, 0, :2] = torch.tensor([0, PAGES - 1])  # both ends
    drawn[-1, -1] = -1  # a block that sees nothing

    lists.start(chunk)
    lists.keep(0, chunk, drawn)

    expected = {
        sequence * PAGES + page
        for sequence in range(batch)
        for page in drawn[sequence].flatten().tolist()
        if page >= 0
    }
    pages = lists.pages(0, chunk)
    assert pages.dtype == "int64"
    assert pages.tolist() == sorted(expected)
