"""Page operations of one layer after a long past: milliseconds and GB/s.

    python bench/page_operations.py              # 4M tokens past, chunk 4096; docs/performance.md
    python bench/page_operations.py --past 1M --chunk 8192 --page-size 64
    python bench/page_operations.py --json -     # bench/results/page-operations-….json

"page write" puts the chunk's keys and values into pages, with the mean key of each; "scores" rate
every past page for every block of queries (shared by all heads), by mean keys or by bounds of keys;
"selection" chooses. GB/s count what an operation has to read and write once; token_softmax is bound
by its products instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from support.attention_problem import median_ms, write_json

from oomb.ops import (
    bounding_queries,
    page_bounds,
    page_scores,
    page_select,
    page_write,
    pages_like,
)

UNITS = {"K": 2**10, "M": 2**20}


def tokens(text: str) -> int:
    unit = UNITS.get(text[-1:].upper())
    return int(text) if unit is None else int(float(text[:-1]) * unit)


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    heads, kv_heads, dim, size = (
        options.query_heads,
        options.kv_heads,
        options.head_dim,
        options.page_size,
    )
    kwargs: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    chunk, past = options.chunk, options.past
    chunk_pages, past_pages = -(-chunk // size), -(-past // size)
    blocks = chunk_pages
    q = torch.randn(1, heads, chunk, dim, **kwargs)
    k = torch.randn(1, kv_heads, chunk, dim, **kwargs)
    v = torch.randn_like(k)
    summary = torch.randn(1, past_pages, kv_heads, dim, **kwargs) / size**0.5
    pool = pages_like(k, 4 * chunk_pages, size)
    slots = torch.randperm(4 * chunk_pages, device="cuda")[None, :chunk_pages].to(torch.int32)
    own_summary = torch.empty(1, chunk_pages, kv_heads, dim, **kwargs)
    bounds = torch.randn(1, past_pages, kv_heads, 2 * dim, **kwargs).abs()
    scores = page_scores(q, summary, past, size)

    def by_bounds(score: str) -> torch.Tensor:
        return page_scores(bounding_queries(q), bounds, past, size, score=score)

    calls = {
        "page write": lambda: page_write(k, v, pool, slots, summary=own_summary, check=False),
        "scores, block_mean": lambda: page_scores(q, summary, past, size),
        "scores, token_softmax": lambda: page_scores(q, summary, past, size, score="token_softmax"),
        "bounds": lambda: page_bounds(k, size),
        "by bounds, block_mean": lambda: by_bounds("block_mean"),
        "by bounds, token_softmax": lambda: by_bounds("token_softmax"),
        "selection": lambda: page_select(scores, options.budget),
    }
    moved = {
        "page write": 2 * (k.nbytes + v.nbytes) + own_summary.nbytes,
        "scores, block_mean": q.nbytes + summary.nbytes + scores.nbytes,
        "scores, token_softmax": q.nbytes + summary.nbytes + scores.nbytes,
        "bounds": k.nbytes + 2 * own_summary.nbytes,
        "by bounds, block_mean": q.nbytes + bounds.nbytes + scores.nbytes,
        "by bounds, token_softmax": q.nbytes + bounds.nbytes + scores.nbytes,
        "selection": scores.nbytes + blocks * options.budget * 4,
    }
    rows = []
    for name, call in calls.items():
        milliseconds = median_ms(call, options.repetitions)
        row = {
            "operation": name,
            "ms": milliseconds,
            "gb_per_second": moved[name] / milliseconds / 1e6,
        }
        if "token_softmax" in name:
            width = 2 * dim if "bounds" in name else dim
            products = 2 * 2 * chunk * kv_heads * past_pages * width
            row["tflops"] = products / milliseconds / 1e9
        rows.append(row)
        rate = f", {row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
        print(f"{name:24} {milliseconds:7.3f} ms  {row['gb_per_second']:6.0f} GB/s{rate}")
    return rows


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--past", type=tokens, default=4 * 2**20, help="tokens; K and M are known")
    parser.add_argument("--chunk", type=tokens, default=4096)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--query-heads", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument(
        "--json", type=Path, help="write the rows there; -: bench/results, with the usual name"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, past {options.past:,}, chunk {options.chunk:,}")
    rows = bench(options)
    shape = {key: value for key, value in vars(options).items() if isinstance(value, int)}
    write_json(options.json, "page-operations", {"shape": shape, "rows": rows})


if __name__ == "__main__":
    main()
