"""Attention's output of a chunk: kept in pages in the fill, taken back in the sweep."""

from __future__ import annotations

from functools import partial

import torch

from oomb.core.call_pages import CallPages


def keep_output(
    pages: CallPages, layer: int, chunk: int, o: torch.Tensor, lse: torch.Tensor
) -> None:
    """Copy o and lse, each dense in memory, into pages that the sweep will read."""
    manager, outputs = pages.manager, pages.outputs
    assert (o.nbytes, lse.nbytes) == (outputs.o_bytes[layer], outputs.lse_bytes[layer])
    for tensor, (first, last) in zip((o, lse), outputs.parts(chunk, layer), strict=True):
        step = manager.max_outputs()
        for begin in range(first, last, step):
            end = min(begin + step, last)
            address, num_bytes = _piece(pages, tensor, first, begin, end)
            pages.growing(
                partial(
                    manager.write_output,
                    layer=layer,
                    begin=begin,
                    end=end,
                    source=address,
                    num_bytes=num_bytes,
                    stream=pages.stream,
                )
            )


def take_output(
    pages: CallPages, layer: int, chunk: int, o: torch.Tensor, lse: torch.Tensor
) -> None:
    """Fill o and lse, each dense in memory, with what was kept; its pages are dead then."""
    manager = pages.manager
    visit = int(pages.order.read[chunk, layer])
    waves = manager.waves(visit)
    for tensor, (first, last) in zip((o, lse), pages.outputs.parts(chunk, layer), strict=True):
        for wave_begin, wave_end in waves:
            begin, end = max(first, wave_begin), min(last, wave_end)
            if begin >= end:
                continue
            address, num_bytes = _piece(pages, tensor, first, begin, end)
            pages.growing(
                partial(
                    manager.read_output,
                    visit=visit,
                    begin=begin,
                    end=end,
                    target=address,
                    num_bytes=num_bytes,
                    stream=pages.stream,
                )
            )


def _piece(
    pages: CallPages, tensor: torch.Tensor, first: int, begin: int, end: int
) -> tuple[int, int]:
    """Address and bytes of a tensor's pieces [begin, end), where its first piece is ``first``."""
    slot = pages.layout.slot_bytes
    offset = (begin - first) * slot
    return tensor.data_ptr() + offset, min(tensor.nbytes - offset, (end - begin) * slot)
