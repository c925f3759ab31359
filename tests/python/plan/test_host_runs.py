"""Pages that are stored together lie together in host memory, and go on doing so."""

from __future__ import annotations

import torch

from oomb.config import TopKPages
from oomb.core.layout import Chunks, GradientReach
from oomb.core.page_demand import Choices
from oomb.core.tiers import Caps, PageLayout
from oomb.model.layer_shape import LayerShape
from oomb.plan.dry_run import DryRun
from oomb.plan.pages import PageCall


def test_stored_pages_are_neighbours_on_the_host() -> None:
    """A sparse call whose gradient pages are stored again and again, in ever other company."""
    chunks = Chunks(65_535, 4096, 128)
    call = PageCall(
        chunks=chunks,
        reach=GradientReach(tuple(range(chunks.number)), None),
        shapes=(LayerShape(28, 4, 128, 0),) * 28,
        layout=PageLayout.of(4, 128, 128, torch.bfloat16, "float32"),
        batch=1,
        device_type="cuda",
        selection=TopKPages(),
        choices=Choices(),
    )
    run = DryRun(call, Caps(device_slots=8192, host_slots=1, host_capacity=2**18))
    stored = run.run().d2h_bytes / call.layout.slot_bytes
    # 25; where pages keep their place for good: 5.
    assert stored / run._pages.manager.stats().stored_runs > 15
