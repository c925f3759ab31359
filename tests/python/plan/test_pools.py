"""Peaks of the page pools, and copies between them, are those that calls report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import oomb
from engine.layer_classes import CLASSES
from engine.layer_classes import make as make_classes
from engine.models import make
from oomb.plan import Machine, Planner


@dataclass(frozen=True)
class Case:
    name: str
    model: str = "llama"
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    tokens: int = 1200
    layers: int = 3
    sizes: dict[str, Any] = field(default_factory=dict)


SAMPLED = {"backward": oomb.SampledChunks(keep=0.4)}
TRUNCATED = {"backward": oomb.TruncatedChunks(window=2)}
SPARSE = {"attention": oomb.TopKPages(budget=4)}
CASES = (
    Case("all-on-device"),
    Case("bf16", dtype=torch.bfloat16),
    Case("bf16-gradients", dtype=torch.bfloat16, settings={"kv_grad_dtype": "bfloat16"}),
    Case("batch", batch=2),
    Case("windows", model="mistral", batch=2),
    Case("windows-of-chunks", model="mistral", settings=TRUNCATED, sizes={"sliding_window": 190}),
    Case("sampled", settings=SAMPLED),
    Case("sparse", settings=SPARSE, batch=2),
    Case("two-tiers", settings={"device_memory": "512KiB"}),
    Case("two-tiers-batch", dtype=torch.bfloat16, settings={"device_memory": "300KiB"}, batch=2),
    Case("two-tiers-windows", model="mistral", settings={"device_memory": "300KiB"}),
    Case(
        "two-tiers-windows-and-whole",
        model="gpt-oss",
        settings={"device_memory": "100KiB"},
        sizes={"sliding_window": 9},
        tokens=500,
        batch=2,
    ),
    Case("two-tiers-sampled", settings={**SAMPLED, "device_memory": "200KiB"}),
    Case("two-tiers-smallest", settings={"device_memory": "20KiB"}, tokens=400),
    Case("truncated", settings=TRUNCATED, batch=2),
    Case("truncated-one-layer", settings={"backward": oomb.TruncatedChunks(window=5)}, layers=1),
    Case("two-tiers-truncated", settings={**TRUNCATED, "device_memory": "200KiB"}),
    Case("one-chunk", tokens=50),
    Case("classes", model="gemma4-31b", batch=2, tokens=400),
    Case("shared-truncated", model="gemma4-e2b", settings=TRUNCATED, tokens=500),
    Case("two-tiers-classes", model="gemma4-31b", settings={"device_memory": "40KiB"}, tokens=400),
    Case(
        "two-tiers-shared",
        model="gemma4-e2b",
        settings={"keep_outputs": 0.6, "device_memory": "40KiB"},
        tokens=400,
    ),
    Case("kept", settings={"keep_outputs": "all"}, batch=2),
    Case("kept-two-tiers", settings={"keep_outputs": 0.6, "device_memory": "300KiB"}, batch=2),
    Case(
        "kept-two-tiers-windows",
        model="mistral",
        settings={**SAMPLED, "keep_outputs": "all", "device_memory": "300KiB"},
    ),
    Case("kept-smallest", settings={"keep_outputs": "auto", "device_memory": "20KiB"}, tokens=400),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sampled(13)
def test_pools(case: Case) -> None:
    host = {"host_memory": "1GiB"} if "device_memory" in case.settings else {}
    config = oomb.Config(chunk_size=80, page_size=8, **host, **case.settings)
    sizes = {"num_hidden_layers": case.layers, "max_position_embeddings": 2048, **case.sizes}
    if case.model in CLASSES:
        model = make_classes(case.model, case.dtype)
    else:
        model = make(case.model, case.dtype, **sizes)
    predicted = Planner(model, Machine.here("cpu")).predict(
        case.tokens, config, batch_size=case.batch, optimizer=None, timed=False, step=0
    )
    ids = torch.randint(97, (case.batch, case.tokens))
    with oomb.Engine(model, config) as engine:
        stats = engine.forward_backward(ids, ids).stats
    assert predicted.device_pool_bytes == stats.device_peak_bytes
    assert predicted.host_pool_bytes == stats.host_peak_bytes
    assert predicted.kept_output_bytes == stats.kept_output_bytes
    assert predicted.kept_output_share == stats.kept_output_share
    assert (predicted.h2d_bytes, predicted.d2h_bytes) == (stats.h2d_bytes, stats.d2h_bytes)


@pytest.mark.parametrize(
    ("window", "page_visits", "harm"),
    [(None, 40_000, 0.05), (257, 40_000, 0.05), (258, 4_000, 0.1)],
    ids=["no window", "windows of 8 pages, 4 as one", "windows of 9 pages, 32 as one"],
)
def test_dry_runs_of_long_calls_are_shortened_without_harm(
    window: int | None, page_visits: int, harm: float
) -> None:
    """Fewer layers and coarser pages give what the whole gives, within a few percent."""
    from oomb.plan import dry_run

    tiers = {"device_memory": "64MiB", "host_memory": "4GiB"}
    config = oomb.Config(chunk_size=1024, page_size=32, keep_outputs="none", **tiers)
    planner = Planner("qwen2.5-0.5b", Machine.here("cpu"))
    if window is not None:  # in half of the layers
        planner.shapes = [
            replace(shape, window=window * (layer % 2))
            for layer, shape in enumerate(planner.shapes)
        ]
    whole = planner.predict(40_000, config, optimizer=None, timed=False)
    before = dry_run._PAGE_VISITS, dry_run._VISITS
    dry_run._PAGE_VISITS, dry_run._VISITS = page_visits, 500
    try:
        short = planner.predict(40_000, config, optimizer=None, timed=False)
    finally:
        dry_run._PAGE_VISITS, dry_run._VISITS = before
    assert short.h2d_bytes != whole.h2d_bytes
    for name in ("host_pool_bytes", "h2d_bytes", "d2h_bytes"):
        assert getattr(short, name) == pytest.approx(getattr(whole, name), rel=harm)
