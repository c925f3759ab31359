"""Which pages each query block read, condensed to a map of bounded size per layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oomb.monitor.observer import Record
from oomb.results import Selection

BINS = 96  # of a map's side; in longer sequences several blocks share a bin


def selection_maps(
    selection: Selection, chunk_size: int, page_size: int, bins: int = BINS
) -> Iterator[Record]:
    """One record per layer that chose pages, of the batch's first sequence.

    ``read[i][j]`` is the percentage of the causal (query block, page) pairs of bin (i, j) that were
    read, any head counting; rows end at the diagonal. A chunk reads all of its own pages, unless it
    was not run.
    """
    per_chunk = chunk_size // page_size
    for layer, chunks in enumerate(selection):
        lists = [None if pages is None else pages[0].cpu() for pages in chunks]
        budget = max((pages.shape[-1] for pages in lists if pages is not None), default=0)
        if budget == 0:
            continue
        tail = per_chunk if lists[-1] is None else len(lists[-1])
        blocks = (len(lists) - 1) * per_chunk + tail
        per_bin = -(-blocks // bins)
        size = -(-blocks // per_bin)
        sums = torch.zeros(size, size)
        for chunk, pages in enumerate(lists):
            first = chunk * per_chunk
            if pages is None and first > budget:  # not run: sampled chunks end at the last one kept
                continue
            read = _read_by_chunk(pages, first, min(per_chunk, blocks - first))
            _add_to_bins(sums, read, first, per_bin)
        percent = (100 * sums / _causal_pairs(blocks, per_bin, size)).round().int().tolist()
        yield {
            "layer": layer,
            "page_size": page_size,
            "blocks": blocks,
            "blocks_per_bin": per_bin,
            "read": [row[: number + 1] for number, row in enumerate(percent)],
        }


def _read_by_chunk(lists: torch.Tensor | None, first: int, blocks: int) -> torch.Tensor:
    """[blocks, first + blocks] bool: pages that each block of a chunk read.

    Args:
        lists: [blocks, heads, budget]; None: the whole past.
        first: page that the chunk starts with.
    """
    read = torch.ones(blocks, first + blocks, dtype=torch.bool).tril(first)
    if lists is not None:
        read[:, :first] = False
        row, head, place = (lists >= 0).nonzero(as_tuple=True)
        read[row, lists[row, head, place].long()] = True
    return read


def _add_to_bins(sums: torch.Tensor, read: torch.Tensor, first: int, per_bin: int) -> None:
    of_page = torch.arange(read.shape[1]) // per_bin
    of_row = torch.arange(first, first + read.shape[0]) // per_bin
    columns = torch.zeros(read.shape[0], sums.shape[1]).index_add_(1, of_page, read.float())
    sums.index_add_(0, of_row, columns)


def _causal_pairs(blocks: int, per_bin: int, size: int) -> torch.Tensor:
    """[size, size]: pairs of a bin whose page does not lie behind the block; at least 1."""
    pairs = torch.zeros(size, size)
    for row in range(blocks):
        seen = (row + 1 - per_bin * torch.arange(size)).clamp(0, per_bin)
        pairs[row // per_bin] += seen
    return pairs.clamp(min=1)
