"""An exchange among GPUs of one host: copies into each other's memory beside NCCL's all-to-all.

    torchrun --nproc-per-node 2 bench/peer_copies.py [--json peers.json]

Both carry the same messages in one process, in turn: bytes, and heads with what puts them into
messages and takes them out. The seconds of an exchange are those of the slowest rank, medians; the
host's are what its thread takes to start one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from support.record import write_record

from oomb.parallel.exchange import _to_heads, _to_tokens
from oomb.parallel.group import Ranks
from oomb.parallel.heads import HeadShares
from oomb.parallel.job import is_first, ranks_of_job
from oomb.parallel.slices import TokenSlices

MESSAGES = (2**12, 2**16, 2**20, 9 * 2**21, 2**25)  # bytes
CHUNK, QUERIES, KEYS, HEAD_DIM = 8192, 28, 4, 128  # of Qwen2.5-7B
HIDDEN, WIDE = 3584, 18944
WARM, TIMES = 5, 40


def measure(ranks: Ranks, exchange: Callable[[], object]) -> tuple[float, float]:
    """Seconds of an exchange on the GPU, and of the host: of the slowest rank."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]
    for _ in range(WARM):
        exchange()
    torch.cuda.synchronize()
    ranks.collect(lambda: None)
    events[0].record()
    began = time.perf_counter()
    for event in events[1:]:
        exchange()
        event.record()
    host = (time.perf_counter() - began) / TIMES
    torch.cuda.synchronize()
    each = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    of_ranks = ranks.collect(lambda: (statistics.median(each), host))
    return max(seconds for seconds, _ in of_ranks), max(host for _, host in of_ranks)


def exchanges(ranks: Ranks) -> Iterator[tuple[str, Callable[[], object]]]:
    """Messages of bytes; then what comes before and after attention of a chunk, in bf16."""
    device = torch.device("cuda", torch.cuda.current_device())
    for num_bytes in MESSAGES:
        send = torch.randint(-100, 100, (ranks.size * num_bytes,), dtype=torch.int8, device=device)
        sizes = [num_bytes] * ranks.size
        yield (
            f"{num_bytes} bytes",
            lambda send=send, sizes=sizes: ranks.all_to_all(send, sizes, sizes, sizes[0]),
        )
    slices = TokenSlices(0, CHUNK, ranks.size, ranks.rank)
    shares = HeadShares(QUERIES, KEYS, ranks.size)
    own = slices.sizes[ranks.rank]
    q, k, v = (
        torch.randn(1, own, heads, HEAD_DIM, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for heads in (QUERIES, KEYS, KEYS)
    )
    yield "q, k, v to heads", lambda: _to_heads(ranks, slices, shares, (q, k, v))
    o, dk, dv = (
        torch.randn(1, CHUNK, heads, HEAD_DIM, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for heads in (shares.queries, shares.keys, shares.keys)
    )
    yield "o to tokens", lambda: _to_tokens(ranks, slices, shares, (o,))
    yield "dq, dk, dv to tokens", lambda: _to_tokens(ranks, slices, shares, (o, dk, dv))
    d_y, x = (
        torch.randn(own, width, device=device, dtype=torch.bfloat16) for width in (WIDE, HIDDEN)
    )
    product = torch.empty(WIDE, HIDDEN, device=device)

    def add() -> None:
        torch.ops.aten.addmm.dtype_out(product, d_y.t(), x, torch.float32, out=product)

    def beside(*, aside: bool) -> None:
        ranks.meanwhile = add
        _to_tokens(ranks, slices, shares, (o, dk, dv), aside=aside)
        if not aside:
            add()

    yield "a product of up_proj", add
    yield "dq, dk, dv, then the product", lambda: beside(aside=False)
    yield "dq, dk, dv beside it", lambda: beside(aside=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with ranks_of_job("cuda") as mesh:
        assert mesh is not None
        members = list(range(mesh.size()))
        ours, nccl = (Ranks(members, torch.device("cuda")) for _ in range(2))
        assert nccl.peers is not None
        nccl.peers._refused = True
        rows: list[dict[str, Any]] = []
        for (name, mine), (_, theirs) in zip(exchanges(ours), exchanges(nccl), strict=True):
            (gpu, host), (gpu_nccl, host_nccl) = measure(ours, mine), measure(nccl, theirs)
            rows.append(
                {
                    "ranks": len(members),
                    "what": name,
                    "seconds": gpu,
                    "host_seconds": host,
                    "nccl_seconds": gpu_nccl,
                    "nccl_host_seconds": host_nccl,
                }
            )
            if is_first():
                print(
                    f"{name:28} {1e6 * gpu:7.1f} us, host {1e6 * host:6.1f}; "
                    f"NCCL {1e6 * gpu_nccl:7.1f} us, host {1e6 * host_nccl:6.1f}: "
                    f"{gpu_nccl / gpu:.2f} times as fast",
                    flush=True,
                )
        assert ours.peers is not None and ours.peers._exchange is not None
        ours.close()
        nccl.close()
    if arguments.json is not None and is_first():
        name = torch.cuda.get_device_name()
        write_record(arguments.json, {"device": name, "rows": rows})


if __name__ == "__main__":
    main()
