"""Copies of pages between pinned host memory and the GPU, beside plain alternatives, one process.

    python bench/page_copy.py                   # everything; results of docs/performance.md
    python bench/page_copy.py --pin-gib 32      # size of the pinned-memory part
    python bench/page_copy.py --only streams    # batches spread over 1, 2, 3 streams
    python bench/page_copy.py --json result.json

Pages are scattered at random in both tiers. GB/s count bytes once per direction; "both" adds the
two. The yardstick is cudaMemcpyAsync of one large block. "beside" runs attention (SDPA, bf16) on
the compute stream for the whole time: what both keep of their speed alone is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from oomb import _C

GIB = 2**30
POOL = 4 * GIB  # of each tier
BATCH = 256 * 2**20  # bytes per batch of copies
ROUNDS = 3


class Copies:
    """Batches of page copies over a pool of each tier."""

    def __init__(self, page_bytes: int, **options: Any) -> None:
        slots = POOL // page_bytes
        self.copier = _C.PageCopier(
            device=0,
            slot_bytes=page_bytes,
            device_slots=slots,
            host_slots=slots,
            **options,
        )
        self.copier.commit_host()
        rng = np.random.default_rng(0)
        device, host = (rng.permutation(slots).astype(np.int32) for _ in range(2))
        # Half of the pages go to the host, the other half to the device.
        self.pages = {"h": (device[::2], host[::2]), "d": (device[1::2], host[1::2])}
        self.page_bytes = page_bytes
        self.set_batch(BATCH)

    def set_batch(self, batch_bytes: int) -> None:
        self.per_batch = max(1, batch_bytes // self.page_bytes)

    def issue(self, directions: str) -> int:
        """Queue one pass over the pages of each direction; the bytes it moves."""
        for begin in range(0, len(self.pages["h"][0]), self.per_batch):
            part = slice(begin, begin + self.per_batch)
            for direction in directions:
                device, host = self.pages[direction]
                self.copier.copy(direction == "h", device[part], host[part])
        return POOL // 2 * len(directions)

    def gigabytes_per_second(self, directions: str) -> float:
        self.issue(directions)
        self.copier.drain()
        rates = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            moved = sum(self.issue(directions) for _ in range(2))
            self.copier.drain()
            rates.append(moved / (time.perf_counter() - start) / 1e9)
        return statistics.median(rates)


class Attention:
    """Work that fills the GPU."""

    def __init__(self) -> None:
        self.q, self.k, self.v = (
            torch.randn(1, 28, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )

    def run(self, times: int) -> None:
        for _ in range(times):
            scaled_dot_product_attention(self.q, self.k, self.v)

    def milliseconds(self, times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.run(times)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / times


def beside_attention(
    copies: Copies, attention: Attention, directions: str, window: float = 0.5
) -> dict[str, float]:
    """GB/s alone and beside attention, each over about ``window`` seconds, and what both keep."""
    alone = copies.gigabytes_per_second(directions)
    seconds = POOL / 2 * len(directions) / alone / 1e9
    passes = max(1, round(window / seconds))
    attention.run(50)
    launches = max(20, int(seconds * passes * 0.9 / attention.milliseconds(50) * 1e3))
    keeps, rates = [], []
    for _ in range(ROUNDS):
        # The clock of a busy GPU drifts: attention alone is measured right before and after.
        before = attention.milliseconds(launches)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        attention.run(launches)
        end.record()
        start = time.perf_counter()
        moved = sum(copies.issue(directions) for _ in range(passes))
        copies.copier.drain()
        rates.append(moved / (time.perf_counter() - start) / 1e9)
        end.synchronize()
        beside = float(begin.elapsed_time(end)) / launches
        keeps.append((before + attention.milliseconds(launches)) / 2 / beside)
    rate = statistics.median(rates)
    return {
        "alone": alone,
        "beside": rate,
        "copies_keep": rate / alone,
        "attention_keeps": statistics.median(keeps),
    }


def pages(sizes: list[int]) -> list[dict[str, Any]]:
    attention = Attention()
    rows: list[dict[str, Any]] = []
    block = Copies(POOL // 2, batched=False)  # one large cudaMemcpyAsync: what the machine can do
    for directions, name in (("d", "H2D"), ("h", "D2H"), ("hd", "both")):
        row = {"page": "one block", "direction": name}
        rows.append(row | beside_attention(block, attention, directions))
        print(rows[-1], flush=True)
    for kib in sizes:
        copies = Copies(kib * 1024)
        loop = Copies(kib * 1024, batched=False)
        unhinted = Copies(kib * 1024, overlap_hint=False)
        for directions, name in (("d", "H2D"), ("h", "D2H"), ("hd", "both")):
            row: dict[str, Any] = {"page": f"{kib} KiB", "direction": name}
            row |= beside_attention(copies, attention, directions)
            row["loop"] = loop.gigabytes_per_second(directions)
            row["without_hint"] = beside_attention(unhinted, attention, directions)
            rows.append(row)
            print(row, flush=True)
    return rows


def streams() -> list[dict[str, Any]]:
    """256 KiB pages in batches of several sizes, each spread over several streams."""
    attention = Attention()
    rows = []
    for name, directions, counts, batches in (
        ("D2H", "h", ((1, 1), (2, 1)), (64, 256)),
        ("H2D", "d", ((1, 1), (1, 2)), (64,)),
        ("both", "hd", ((1, 1), (2, 1), (1, 2), (2, 2)), (64,)),
    ):
        for stores, loads in counts:
            over = {"store_streams": stores, "load_streams": loads}
            copies = Copies(256 * 1024, **over)
            for batch_mib in batches:
                copies.set_batch(batch_mib * 2**20)
                row = {"direction": name, "batch_mib": batch_mib, **over}
                row |= beside_attention(copies, attention, directions, window=0.15)
                rows.append(row)
                print(row, flush=True)
    return rows


def pinned(gib: int) -> list[dict[str, Any]]:
    """Seconds and GB/s of getting pinned memory, next to cudaHostAlloc; HBM that it costs."""
    rows = []
    torch.cuda.synchronize()
    for name, piece, huge in (
        ("cold, 1 GiB pieces", GIB, True),
        ("warm, 1 GiB pieces", GIB, True),
        ("warm, 128 MiB pieces", GIB // 8, True),
        ("warm, 1 GiB pieces, 4 KiB pages", GIB, False),
    ):
        size = gib if huge else gib // 4
        copier = _C.PageCopier(
            device=0,
            slot_bytes=2**18,
            device_slots=1,
            host_slots=size * GIB // 2**18,
            piece_bytes=piece,
            huge_pages=huge,
        )
        free = torch.cuda.mem_get_info()[0]
        start = time.perf_counter()
        copier.commit_host()
        seconds = time.perf_counter() - start
        charged = (free - torch.cuda.mem_get_info()[0]) / 2**20 / size
        start = time.perf_counter()
        copier.release_host()
        row = {
            "how": name,
            "gib": size,
            "seconds": seconds,
            "gb_per_s": size * GIB / seconds / 1e9,
            "hbm_mib_per_gib": charged,
            "release_seconds": time.perf_counter() - start,
        }
        rows.append(row)
        print(row, flush=True)
    start = time.perf_counter()
    block = torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - start
    rows.append({"how": "cudaHostAlloc", "gib": 4, "gb_per_s": block.nbytes / seconds / 1e9})
    print(rows[-1], flush=True)
    return rows


def growth_beside_kernels(gib: int) -> dict[str, float]:
    """What growing the host tier in the background costs a queue of kernels."""
    attention = Attention()
    attention.run(50)
    alone = attention.milliseconds(1000)

    x = torch.zeros(1024, device="cuda")

    def launches() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2000):
            x.add_(1)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    launches()
    small_alone = min(launches() for _ in range(5))
    results = {"attention_alone_ms": alone}
    for piece_mib in (64, 128):
        copier = _C.PageCopier(
            device=0,
            slot_bytes=2**18,
            device_slots=1,
            host_slots=gib * GIB // 2**18,
            piece_bytes=piece_mib * 2**20,
        )
        copier.prepare_host()
        beside, small = [], []
        while copier.ready_host_bytes() < gib * GIB:
            beside.append(attention.milliseconds(50))
            small.append(launches())
        results[f"attention_slower_{piece_mib}_mib"] = sum(beside) / len(beside) / alone - 1
        results[f"small_launches_slower_{piece_mib}_mib"] = (
            sum(small) / len(small) / small_alone - 1
        )
        copier.release_host()
    print(results, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pin-gib", type=int, default=32)
    parser.add_argument("--page-kib", type=int, nargs="*", default=[64, 128, 256, 512])
    parser.add_argument("--only", choices=["pinned", "growth", "pages", "streams"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts = {
        "pinned": lambda: pinned(arguments.pin_gib),
        "growth": lambda: growth_beside_kernels(arguments.pin_gib // 2),
        "pages": lambda: pages(arguments.page_kib),
        "streams": streams,
    }
    result: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name, part in parts.items():
        if arguments.only in (None, name):
            result[name] = part()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
