"""Pages of the chunk that is being run: written in the fill, ended in its sweep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from oomb import _C
from oomb.core.call_pages import CallPages


def write_own(pages: CallPages, layer: int, chunk: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write a chunk's keys and values [B, Hkv, C, D] into new pages, and their mean keys."""
    begin, end = pages.chunks.span(chunk)
    first = pages.chunks.first_page(chunk)
    last = first + -(-(end - begin) // pages.layout.page_size)
    num_rows = None
    if pages.num_keys is not None:
        num_rows = (pages.num_keys - begin).clamp(0, end - begin).to(torch.int32)
    summary = None if pages.choice is None else pages.choice.summaries(layer)
    stream = pages.stream
    for page, stop in _steps(first, last, pages.manager.max_create(layer)):
        pages.growing(partial(pages.manager.create, layer, page, stop, stream))
        _C.page_write(
            k=k,
            v=v,
            kv_pool=pages.manager.pool_address(),
            kv_slot_bytes=pages.layout.slot_bytes,
            kv_num_slots=pages.manager.device_slots,
            slots=pages.tables[layer][:, first:last],
            page_begin=page - first,
            page_end=stop - first,
            page_size=pages.layout.page_size,
            num_rows=num_rows,
            summary=None if summary is None else summary[:, first:last],
            stream=stream,
        )
        pages.manager.commit(layer, page, stop, stream)


def extend_gradients(pages: CallPages, layer: int, chunk: int) -> None:
    """Gradient pages of the chunk that this one is the first to reach, where there is one."""
    added = pages.reach.added(chunk)
    if added is not None:
        first, last = pages.chunks.first_page(added), pages.chunks.first_page(added + 1)
        pages.manager.create_gradients(layer, first, last)


def end_own(pages: CallPages, layer: int, chunk: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Add what later chunks left on a chunk's own keys and values; then its pages are dead.

    So are the keys and values of the chunks down to the next one to be swept: nobody reads them
    again.
    """
    chunks, manager, stream = pages.chunks, pages.manager, pages.stream
    first, last = chunks.first_page(chunk), chunks.first_page(chunk + 1)
    if chunk != pages.swept[-1]:
        arguments = gradient_arguments(pages, layer)
        arguments["dkv_table"] = arguments["dkv_table"][:, first:last]
        for page, stop in _steps(first, last, manager.max_gradients(layer)):
            pages.growing(partial(manager.acquire_gradients, layer, page, stop, stream))
            _C.page_gradient_read(
                dk=dk,
                dv=dv,
                **arguments,
                page_begin=page - first,
                page_end=stop - first,
                page_size=pages.layout.page_size,
                scale=pages.dkv_factor,
                stream=stream,
            )
            manager.drop(layer, page, stop, kv=False, grads=True, stream=stream)
    earlier = [swept for swept in pages.swept if swept < chunk]
    dead_from = chunks.first_page(earlier[-1]) if earlier else 0
    manager.drop(layer, dead_from, first, kv=True, grads=False, stream=stream)


def gradient_arguments(pages: CallPages, layer: int) -> dict[str, Any]:
    """Where kernels find the gradient pages of a layer."""
    return {
        "dkv_pool": pages.manager.pool_address(),
        "dkv_unit_bytes": pages.layout.slot_bytes // 2,
        "dkv_num_units": 2 * pages.manager.device_slots,
        "dkv_table": pages.gradient_tables[layer],
        "dkv_dtype": str(pages.layout.grad_dtype).removeprefix("torch."),
    }


def _steps(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Pages [first, last) in ranges of at most ``step``."""
    for page in range(first, last, step):
        yield page, min(page + step, last)
