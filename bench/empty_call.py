"""A call of the engine on pages that hold nothing: Qwen2.5-7B's, chunks of 4096, fp32 dKV."""

from __future__ import annotations

import torch

from oomb.config import Config, TopKPages
from oomb.core.layout import Chunks
from oomb.core.tiers import Caps, PageLayout
from oomb.model.causal import LayerShape
from oomb.plan import dry_run
from oomb.plan.choices import Choices
from oomb.plan.pages import PageCall

GIB = 2**30
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 28, 28, 4, 128

dry_run._PAGE_VISITS = dry_run._VISITS = 10**12  # every page of every layer


def empty_call(
    tokens: int, rule: TopKPages | None, device_gib: int, host_gib: int
) -> tuple[PageCall, Caps]:
    """One sequence of which every chunk is swept, and the tiers it is given."""
    chunks = Chunks(tokens - 1, Config().chunk_size, Config().page_size)
    layout = PageLayout.of(KV_HEADS, HEAD_DIM, chunks.page_size, torch.bfloat16, "float32")
    call = PageCall(
        chunks=chunks,
        swept=tuple(range(chunks.number)),
        shapes=(LayerShape(HEADS, KV_HEADS, HEAD_DIM, 0),) * LAYERS,
        layout=layout,
        batch=1,
        device_type="cuda",
        selection=rule,
        choices=Choices(),
    )
    slot = layout.slot_bytes
    return call, Caps(device_gib * GIB // slot, 1, host_gib * GIB // slot)
