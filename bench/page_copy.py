"""Copies of pages between pinned host memory and the GPU, beside plain alternatives, one process.

    python bench/page_copy.py                   # everything; results of docs/performance.md
    python bench/page_copy.py --pin-gib 32      # size of the pinned-memory part
    python bench/page_copy.py --only runs       # places on the host that are neighbours
    python bench/page_copy.py --json result.json

Pages are scattered at random in both tiers unless said. GB/s count bytes once per direction;
"both" adds the two. The yardstick is cudaMemcpyAsync of one large block. "beside" runs attention
(SDPA, bf16) on the compute stream for the whole time: what both keep of their speed alone is given.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.record import write_record
from torch.nn.functional import scaled_dot_product_attention

from oomb import _C

GIB = 2**30
POOL = 4 * GIB  # of each tier
BATCH = 256 * 2**20  # bytes per batch of copies
ROUNDS = 3


class Copies:
    """Batches of page copies over a pool of each tier.

    ``run``: so many pages in a row are neighbours on the host; 1: scattered.
    """

    def __init__(self, page_bytes: int, run: int = 1, **options: Any) -> None:
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
        device = rng.permutation(slots).astype(np.int32)
        # Half of the pages go to the host, the other half to the device.
        run = min(run, slots // 2)
        begins = rng.permutation(slots // run) if run < slots // 2 else np.arange(2)
        host = (begins[:, None] * run + np.arange(run)).astype(np.int32)
        self.pages = {
            "h": (device[::2], host[::2].ravel()),
            "d": (device[1::2], host[1::2].ravel()),
        }
        self.per_batch = max(1, BATCH // page_bytes)

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


def runs() -> list[dict[str, Any]]:
    """256 KiB pages whose places on the host are neighbours, so many in a row."""
    attention = Attention()
    rows = []
    for run in (1, 2, 4, 8, 32, POOL // 2**18):
        copies = Copies(256 * 1024, run=run)
        for directions, name in (("h", "D2H"), ("hd", "both")):
            row: dict[str, Any] = {"host_slots_in_row": run, "direction": name}
            rows.append(row | beside_attention(copies, attention, directions, window=0.15))
            print(rows[-1], flush=True)
    return rows


def pinned(gib: int) -> list[dict[str, Any]]:
    """Seconds and GB/s of getting pinned memory, next to cudaHostAlloc; HBM that it costs."""
    rows = []
    torch.cuda.synchronize()
    touched, held = first_touch(gib)
    rows.append(touched)
    new = []  # held, as what was touched, so that the next is new to the machine as well
    for name, piece, huge, one_by_one in (
        ("cold, 1 GiB pieces", GIB, True, False),
        ("cold, 128 MiB pieces, one by one", GIB // 8, True, True),
        ("warm, 1 GiB pieces", GIB, True, False),
        ("warm, 128 MiB pieces", GIB // 8, True, False),
        ("warm, 128 MiB pieces, one by one", GIB // 8, True, True),
        ("warm, 1 GiB pieces, 4 KiB pages", GIB, False, False),
    ):
        if name.startswith("warm"):
            new.clear()
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
        for wanted in range(piece, size * GIB, piece) if one_by_one else ():
            copier.commit_host(wanted)  # as a call does that has overtaken its growth
        copier.commit_host()
        seconds = time.perf_counter() - start
        row = {
            "how": name,
            "gib": size,
            "seconds": seconds,
            "gb_per_s": size * GIB / seconds / 1e9,
            "hbm_mib_per_gib": (free - torch.cuda.mem_get_info()[0]) / 2**20 / size,
        }
        if name.startswith("cold"):
            new.append(copier)
        else:
            start = time.perf_counter()
            copier.release_host()
            row["release_seconds"] = time.perf_counter() - start
        rows.append(row)
        print(row, flush=True)
    del held
    start = time.perf_counter()
    block = torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - start
    rows.append({"how": "cudaHostAlloc", "gib": 4, "gb_per_s": block.nbytes / seconds / 1e9})
    print(rows[-1], flush=True)
    return rows


def first_touch(gib: int) -> tuple[dict[str, Any], mmap.mmap]:
    """How fast the machine gives new memory, with nothing else done to it; and that memory."""
    block = mmap.mmap(-1, gib * GIB)
    block.madvise(mmap.MADV_HUGEPAGE)
    part = gib * GIB // (threads := min(16, os.cpu_count() or 1))
    memory = np.frombuffer(block, dtype=np.uint8)
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for begin in range(0, gib * GIB, part):
            pool.submit(memory[begin : begin + part : 4096].fill, 1)
    seconds = time.perf_counter() - start
    row = {"how": "cold, touched only", "gib": gib, "gb_per_s": gib * GIB / seconds / 1e9}
    print(row, flush=True)
    return row, block


def growth_beside_kernels(gib: int) -> list[dict[str, Any]]:
    """What growing the host tier in the background costs a queue of kernels, and their launches."""
    attention = Attention()
    x = torch.zeros(1024, device="cuda")

    def launches() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2000):
            x.add_(1)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def alone() -> tuple[float, float]:
        seconds = [(attention.milliseconds(20), launches()) for _ in range(20)]
        return statistics.mean(s[0] for s in seconds), statistics.mean(s[1] for s in seconds)

    alone()
    rows: list[dict[str, Any]] = []
    for name in ("cold", "warm"):
        copiers = []  # cold memory is new to the machine in both rows
        for hurry in (False, True):
            copier = _C.PageCopier(
                device=0,
                slot_bytes=2**18,
                device_slots=1,
                host_slots=gib * GIB // 2**18,
                piece_bytes=GIB // 8,
            )
            copiers.append(copier)
            before = alone()
            kernels, small = [], []
            start = time.perf_counter()
            copier.prepare_host()
            if hurry:  # as after a call that has overtaken it
                copier.commit_host(1)
            while copier.ready_host_bytes() < gib * GIB:
                kernels.append(attention.milliseconds(20))
                small.append(launches())
            seconds = time.perf_counter() - start
            after = alone()
            rows.append(
                {
                    "how": f"{name}, {'in a hurry' if hurry else 'ahead'}",
                    "gb_per_s": gib * GIB / seconds / 1e9,
                    "attention_times": 2 * statistics.mean(kernels) / (before[0] + after[0]),
                    "launches_times": 2 * statistics.mean(small) / (before[1] + after[1]),
                    "longest_2000_launches_times": 2 * max(small) / (before[1] + after[1]),
                }
            )
            print(rows[-1], flush=True)
        for copier in copiers:
            copier.release_host()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pin-gib", type=int, default=32)
    parser.add_argument("--page-kib", type=int, nargs="*", default=[64, 128, 256, 512])
    parser.add_argument("--only", choices=["pinned", "growth", "pages", "runs"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts = {
        "pinned": lambda: pinned(arguments.pin_gib),
        "growth": lambda: growth_beside_kernels(arguments.pin_gib // 2),
        "pages": lambda: pages(arguments.page_kib),
        "runs": runs,
    }
    result: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name, part in parts.items():
        if arguments.only in (None, name):
            result[name] = part()
    if arguments.json:
        write_record(arguments.json, result)


if __name__ == "__main__":
    main()
