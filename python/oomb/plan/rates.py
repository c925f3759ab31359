"""How fast a device does each kind of work: measured in about a second, or from a datasheet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from oomb.config import PageRule
from oomb.core.tiers import PageLayout, free_memory
from oomb.model import products
from oomb.model.layer_shape import LayerShape
from oomb.ops import paged_attention
from oomb.plan.gpus import Gpu
from oomb.plan.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed of a device.

    Attributes:
        matrix: FLOP/s of matrix products.
        traffic: bytes/s that elementwise operations read and write.
        past_forward, past_backward: FLOP/s of attention's kernels over pages, where a (query, key)
            pair of a head costs 4 * head_dim forward and 10 * head_dim backward.
        own_forward, own_backward: likewise over the chunk itself, half of which is masked.
        widest_cost: times that a (query, key) pair of heads of 512 takes so long on a GPU.
        fresh: bytes/s at which memory is first touched that the process did not have before; what
            a chunk keeps goes back to the system after it. Infinite on a GPU, where torch keeps it.
        link: bytes/s between the tiers, each way.
        latency: seconds that attention waits for copies at least, where some are under way.
        operation: seconds that starting an operation takes, Python's part included.
        basis: ``"measured"`` on this device; ``"datasheet"``, or ``"given"`` by the caller.
    """

    matrix: float
    traffic: float
    past_forward: float
    past_backward: float
    own_forward: float
    own_backward: float
    widest_cost: float
    fresh: float
    link: float
    latency: float
    operation: float
    basis: str


# Shares of the datasheet's figures that training kernels reach, measured on an H200.
_SHARE_MATRIX, _SHARE_TRAFFIC, _SHARE_LINK = 0.72, 0.75, 0.85
_DENSE = {"past_forward": 0.63, "past_backward": 0.52}
_SPARSE = {"past_forward": 0.54, "past_backward": 0.45}
_OWN = {"own_forward": 0.30, "own_backward": 0.25}
_NARROW = 0.69  # with heads of 64 and less
_WIDE_FORWARD = 1.2  # dense, with heads of 256 on Hopper
# Heads of 256 on other GPUs, whose kernels reach that share of what they do with heads of 128, on
# an H200 (bench/results/attention-*-sm80-h200-*.json and -wide-sm80-*).
_OTHER_WIDE = {"forward": 0.62, "backward": 0.42}
WIDEST = 512  # head dim
# A pair of heads of 512 takes that many times as long as its products say, forward and backward
# together (bench/results/attention-*-wide-512-h200-2026-11-25.json).
_WIDEST_COST = 4.2
# Attention over pages, forward and backward, by rows of a chunk in all sequences; 1: with 4,096
# (bench/results/attention-*-grid-h200-2026-11-21.json, behind 131,072 tokens).
_ROWS = (2048, 4096, 8192, 16384)
_DENSE_BY_ROWS = {"past_forward": (0.96, 1.0, 1.01, 0.97), "past_backward": (0.99, 1.0, 0.99, 0.87)}
_SPARSE_BY_ROWS = {
    "past_forward": (0.78, 1.0, 1.02, 1.06),
    "past_backward": (0.83, 1.0, 1.11, 1.01),
}
_CUDA_OPERATION, _CUDA_LATENCY = 3e-5, 1.2e-4
_PAST = 16  # chunks of past that a GPU attends to while it is measured
_QUEUED = 8  # runs between two waits for a GPU


def datasheet_rates(gpu: Gpu, shape: LayerShape, selection: PageRule | None, rows: int) -> Rates:
    """Rates of a GPU that is not here: the shares of its figures that an H200 reaches.

    Args:
        rows: of a chunk, in all sequences.
    """
    shares = (_DENSE if selection is None else _SPARSE) | _OWN
    by_rows = _DENSE_BY_ROWS if selection is None else _SPARSE_BY_ROWS
    for name, factors in by_rows.items():  # between those measured, and flat beyond them
        shares[name] *= float(np.interp(math.log2(rows), np.log2(_ROWS), factors))
    if shape.head_dim == 256 and gpu.capability // 10 != 9:
        for name in shares:
            shares[name] *= _OTHER_WIDE[name.split("_")[1]]
    elif selection is None and shape.head_dim == 256:
        shares["past_forward"] *= _WIDE_FORWARD
    flops = gpu.flops * (_NARROW if shape.head_dim <= 64 else 1.0)
    return Rates(
        matrix=_SHARE_MATRIX * gpu.flops,
        traffic=_SHARE_TRAFFIC * gpu.bytes_per_second,
        **{name: share * flops for name, share in shares.items()},
        widest_cost=_WIDEST_COST,
        fresh=math.inf,
        link=_SHARE_LINK * gpu.link_bytes_per_second,
        latency=_CUDA_LATENCY,
        operation=_CUDA_OPERATION,
        basis=gpu.basis,
    )


_measured: dict[object, Rates] = {}
clock: Callable[[], float] = (
    time.perf_counter
)  # benches on a busy CPU count one thread's time instead


def measured_rates(
    machine: Machine,
    *,
    shape: LayerShape,
    layout: PageLayout,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    chunk: int,
    batch: int,
    selection: PageRule | None,
) -> Rates:
    """Rates of this machine's device for a model's shapes; measured once per process.

    Args:
        hidden, inner: sizes of the largest matrix product of a layer.
        chunk: tokens of a chunk; on a CPU fewer are run.
        batch: sequences; small ones leave parts of a GPU idle.
    """
    key = (clock, machine.device_type, shape, layout, hidden, inner, dtype, chunk, batch, selection)
    if key not in _measured:
        device = torch.device(machine.device_type)
        on_gpu = device.type == "cuda"
        rows = chunk if on_gpu else min(chunk, 512)
        # What does not fit is planned too: its rates are then those of a part.
        room = free_memory(device) // 8
        token = 2 * shape.kv_heads * shape.head_dim
        token *= layout.dtype.itemsize + layout.grad_dtype.itemsize
        sequences = max(1, min(batch if on_gpu else 1, room // (_PAST * token * rows)))
        rows = min(rows, max(layout.page_size, room // (_PAST * token)))
        hidden, inner = product_within(room // dtype.itemsize, sequences * rows, hidden, inner)
        with torch.random.fork_rng(devices=[device] if on_gpu else []), torch.enable_grad():
            _measured[key] = Rates(
                matrix=_matrix_rate(device, sequences * rows, hidden, inner, dtype),
                traffic=_traffic_rate(device, sequences * rows, inner, dtype),
                **_attention_rates(device, shape, layout, rows, sequences, selection),
                widest_cost=_WIDEST_COST if on_gpu and shape.head_dim < WIDEST else 1.0,
                fresh=math.inf if on_gpu else _fresh_rate(),
                link=_link_rate(device),
                latency=_CUDA_LATENCY if on_gpu else 0.0,
                operation=_CUDA_OPERATION if on_gpu else _operation_seconds(),
                basis="measured",
            )
    return _measured[key]


def _seconds(device: torch.device, work: Callable[[], object], budget: float = 0.15) -> float:
    """Of one run, after one to warm up, within about ``budget`` seconds.

    On a GPU the mean, which has its clock under load, of runs that queue up as in a step; on a CPU,
    where others compute too, the best.
    """
    on_gpu = device.type == "cuda"
    together = _QUEUED if on_gpu else 1

    def run() -> None:
        for _ in range(together):
            work()
        if on_gpu:
            torch.cuda.synchronize(device)

    work()
    runs: list[float] = []
    start = now = clock()
    while now < start + budget:
        run()
        runs.append(clock() - now)
        now += runs[-1]
    return (sum(runs) / len(runs) if on_gpu else min(runs)) / together


def product_within(numbers: int, rows: int, hidden: int, inner: int) -> tuple[int, int]:
    """A product's sizes, the larger one halved until its matrices have at most so many numbers."""
    while rows * (hidden + inner) + hidden * inner > numbers and max(hidden, inner) > 64:
        hidden, inner = (hidden // 2, inner) if hidden > inner else (hidden, inner // 2)
    return hidden, inner


def _matrix_rate(
    device: torch.device, rows: int, hidden: int, inner: int, dtype: torch.dtype
) -> float:
    x = torch.randn(rows, hidden, dtype=dtype, device=device)  # constants would run cooler
    weight = torch.randn(inner, hidden, dtype=dtype, device=device)
    wide = torch.randn(rows, inner, dtype=dtype, device=device)

    def step() -> None:  # forward, and both products of backward
        products.linear(x, weight)
        products.input_gradient(wide, weight)
        products.linear(wide.t(), x.t())

    with torch.no_grad():
        return 3 * 2 * rows * hidden * inner / _seconds(device, step, 0.3)


def _traffic_rate(device: torch.device, rows: int, inner: int, dtype: torch.dtype) -> float:
    gate = torch.ones(rows, inner, dtype=dtype, device=device)
    up, out = torch.ones_like(gate), torch.ones_like(gate)

    def elementwise() -> None:
        torch.sigmoid(gate, out=out)
        torch.mul(out, up, out=out)

    return 5 * gate.numel() * gate.element_size() / _seconds(device, elementwise)


def _fresh_rate() -> float:
    """Bytes/s of first touches, beyond what writing takes anyway."""
    size = 2**26  # beyond what an allocator keeps

    def fresh() -> None:
        torch.empty(size, dtype=torch.uint8).fill_(1)

    kept = torch.ones(size, dtype=torch.uint8)
    first = _seconds(torch.device("cpu"), fresh, 0.1)
    again = _seconds(torch.device("cpu"), lambda: kept.fill_(1), 0.05)
    return size / max(first - again, 1e-9)


def _link_rate(device: torch.device) -> float:
    size = 2**28 if device.type == "cuda" else 2**24
    source = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / _seconds(device, lambda: target.copy_(source, non_blocking=True), 0.05)


def _operation_seconds() -> float:
    x = torch.ones(8)
    many = 200

    def small() -> None:
        for _ in range(many):
            x.add(1.0)

    return 3 * _seconds(torch.device("cpu"), small, 0.02) / many


def _attention_rates(
    device: torch.device,
    shape: LayerShape,
    layout: PageLayout,
    rows: int,
    batch: int,
    selection: PageRule | None,
) -> dict[str, float]:
    """FLOP/s on the chunk alone, and on what a past long beside it adds."""
    page = layout.page_size
    past = _PAST * rows if device.type == "cuda" else 4 * max(rows, page)
    pages = -(-past // page)
    heads, kv_heads, dim = shape.query_heads, shape.kv_heads, shape.head_dim
    blocks, seen = -(-rows // page), pages

    def values(*size: int, dtype: torch.dtype = layout.dtype) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    q = values(batch, heads, rows, dim).requires_grad_()
    k, v = (values(batch, kv_heads, rows, dim).requires_grad_() for _ in range(2))
    kv_pages = values(batch * pages, 2, kv_heads, page, dim)
    dkv_pages = values(batch * pages, 2, kv_heads, page, dim, dtype=layout.grad_dtype)
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    lists = None
    if selection is not None and selection.max_pages < pages:
        seen = selection.max_pages
        listed = 1 if selection.share == "all_heads" else kv_heads
        rank = torch.rand(batch, blocks, listed, pages, device=device)
        lists = rank.topk(seen, dim=-1)[1].sort(dim=-1)[0].to(torch.int32)

    def seconds(past_pages: int) -> tuple[float, float]:
        """Of a forward and a backward."""
        own_lists = lists if past_pages else None

        def forward() -> torch.Tensor:
            tables = (kv_pages, dkv_pages, table[:, :past_pages].contiguous())
            return paged_attention(q, k, v, *tables, selection=own_lists, check=False)[0]

        o = forward()
        gradient = torch.ones_like(o)

        def backward() -> None:
            torch.autograd.grad(o, (q, k, v), gradient, retain_graph=True)

        with torch.no_grad():
            taken = _seconds(device, forward)
        return taken, _seconds(device, backward, 0.2)

    own, whole = seconds(0), seconds(pages)
    own_pairs = batch * heads * rows * (rows + 1) / 2
    past_pairs = batch * heads * rows * seen * page
    rates = {}
    for name, cost, alone, both in zip(("forward", "backward"), (4, 10), own, whole, strict=True):
        rates[f"own_{name}"] = cost * dim * own_pairs / alone
        rates[f"past_{name}"] = cost * dim * past_pairs / max(both - alone, 0.1 * both)
    return rates
