"""Error of gradient pages after many chunks' adds, for each dtype they can have.

    python bench/gradient_accumulation.py                # the GPU where there is one, else the CPU
    python bench/gradient_accumulation.py --device cpu --json result.json

`attention_backward` adds the dK and dV of chunk after chunk to the same past pages; every chunk
has fresh queries and output gradients, and the rounding seed that the engine gives it. The
reference: the same inputs, rounded to the storage dtype, through fp64 kernels into fp64 pages.

Two kinds of gradient: "zero mean" (a random walk over the chunks) and "common part" (every
chunk's queries and output gradients share a mean, as in training). "kernel" rows are what the
kernels leave in their pages. "emulated" rows add and round in torch what the kernels computed, as
other pages would.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.emulated_pages import OnePlane, TwoPlanes
from support.record import write_record
from torch import Tensor

from oomb import _C
from oomb.core.call_pages import seed_of_call, seed_of_chunk
from oomb.ops.launch import stream_of, workspace_on
from oomb.ops.pages import pool_of

LAYER = 3  # any; it is part of the rounding seed


@dataclasses.dataclass(frozen=True)
class Shape:
    query_heads: int = 7
    kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 64
    chunk: int = 64
    past_pages: int = 4

    @property
    def past(self) -> int:
        return self.past_pages * self.page_size

    @property
    def page(self) -> tuple[int, int, int]:
        return self.kv_heads, self.page_size, self.head_dim


class Draws:
    """Keys and values that all chunks see; queries and output gradients of each."""

    def __init__(self, shape: Shape, common_part: float, storage: torch.dtype, device: str) -> None:
        self._shape = shape
        self._to = {"dtype": storage, "device": device}
        self._generator = torch.Generator().manual_seed(20)
        self.kv_pages = self._random(shape.past_pages, 2, *shape.page).to(**self._to)
        own = (1, shape.kv_heads, shape.chunk, shape.head_dim)
        self.k, self.v = (self._random(*own).to(**self._to) for _ in range(2))
        each_head = (1, shape.query_heads, 1, shape.head_dim)
        self._q_mean, self._d_o_mean = (common_part * self._random(*each_head) for _ in range(2))

    def chunk(self) -> tuple[Tensor, Tensor]:
        """q and d_o, each [1, Hq, C, D] in the storage dtype."""
        s = self._shape
        size = (1, s.query_heads, s.chunk, s.head_dim)
        q = self._q_mean + self._random(*size)
        d_o = self._d_o_mean + self._random(*size)
        return q.to(**self._to), d_o.to(**self._to)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator)


class Attention:
    """Kernels of one dtype over the past; their gradient pages come with each call."""

    def __init__(self, shape: Shape, draws: Draws, dtype: torch.dtype) -> None:
        self._k, self._v = draws.k.to(dtype), draws.v.to(dtype)
        self._kv = draws.kv_pages.to(dtype)
        device = self._kv.device
        pages = torch.arange(2 * shape.past_pages, dtype=torch.int32, device=device)
        self._gradient_table = pages.view(1, -1, 2)
        self._past = _C.PastPages(
            page_size=shape.page_size,
            pool=pool_of(self._kv),
            block_table=pages[None, : shape.past_pages].contiguous(),
            num_tokens=shape.past,
        )
        self._scale, self._stream = shape.head_dim**-0.5, stream_of(device)

    def forward(self, q: Tensor, d_o: Tensor) -> Callable[[Tensor, int], None]:
        """Runs the forward; returns the backward, which adds to pages [2 n, Hkv, P, D]."""
        real = torch.float64 if self._k.dtype == torch.float64 else torch.float32
        q, d_o = q.to(self._k.dtype), d_o.to(self._k.dtype)
        lse = torch.empty(q.shape[:3], dtype=real, device=q.device)
        inputs: dict[str, Any] = {
            "chunk": _C.Chunk(q=q, k=self._k, v=self._v, scale=self._scale),
            "past": self._past,
            "output": _C.Output(o=torch.empty_like(q), lse=lse),
            "stream": self._stream,
        }
        _C.attention_forward(**inputs)
        inputs["d_output"] = _C.Output(o=d_o)
        inputs["d_chunk"] = _C.ChunkGradients(
            dq=torch.empty_like(q), dk=torch.empty_like(self._k), dv=torch.empty_like(self._v)
        )
        inputs["state"] = _C.BackwardState(delta=torch.empty_like(lse))

        def backward(gradient_pages: Tensor, rounding_seed: int) -> None:
            gradients = _C.GradientPages(
                pool=pool_of(gradient_pages),
                table=self._gradient_table,
                dtype=str(gradient_pages.dtype).removeprefix("torch."),
                rounding_seed=rounding_seed,
            )
            _C.attention_backward(**inputs, gradients=gradients, workspace=workspace_on(q.device))

        return backward


def rounding_seed(chunk: int) -> int:
    """The engine's, for one layer of its first call."""
    return seed_of_chunk(seed_of_call(0), LAYER, chunk)


def errors(got: Tensor, exact: Tensor) -> dict[str, float]:
    """Of dK and dV together, each over its own norm.

    bias: mean error in the direction of each element's sign, over the mean magnitude (negative:
    sums come out too small). bias_deviation: standard deviation of that mean.
    """
    norms = torch.stack([exact[kind::2].norm() for kind in range(2)])
    weight = (1 / norms).repeat(exact.shape[0] // 2).view(-1, 1, 1, 1)
    difference, scaled = (got.double() - exact) * weight, exact * weight
    outward = difference * exact.sign()
    magnitude = scaled.abs().mean()
    return {
        "relative": float(difference.norm() / scaled.norm()),
        "bias": float(outward.mean() / magnitude),
        "bias_deviation": float(outward.std() / outward.numel() ** 0.5 / magnitude),
    }


def accumulate(
    shape: Shape, storage: torch.dtype, common_part: float, borders: list[int], device: str
) -> list[dict[str, object]]:
    """One row per kind of page and number of chunks."""
    draws = Draws(shape, common_part, storage, device)
    kernels, reference = Attention(shape, draws, storage), Attention(shape, draws, torch.float64)
    exact = torch.zeros(2 * shape.past_pages, *shape.page, dtype=torch.float64, device=device)
    fp32, bf16 = torch.zeros_like(exact).float(), torch.zeros_like(exact).bfloat16()
    emulated: dict[str, OnePlane | TwoPlanes] = {
        "bf16, nearest": OnePlane(fp32),
        "24 bits, nearest": TwoPlanes(fp32, stochastic=False),
        "24 bits, stochastic": TwoPlanes(fp32, stochastic=True),
    }
    squares = 0.0  # of the contributions' norms: a random walk's sum has their root as its norm
    rows: list[dict[str, object]] = []
    for chunk in range(borders[-1]):
        q, d_o = draws.chunk()
        backward, seed = kernels.forward(q, d_o), rounding_seed(chunk)
        backward(fp32, seed)
        backward(bf16, seed)
        contribution = torch.zeros_like(fp32)
        backward(contribution, seed)
        for pages in emulated.values():
            pages.add(contribution)
        squares += float(contribution.double().square().sum())
        reference.forward(q, d_o)(exact, seed)

        if chunk + 1 not in borders:
            continue
        sums = {
            "fp32": (fp32.double(), 4, "kernel"),
            "bf16, stochastic": (bf16.double(), 2, "kernel"),
        }
        sums |= {n: (p.read(), p.bytes_per_element, "emulated") for n, p in emulated.items()}
        for name, (got, size, source) in sums.items():
            row: dict[str, object] = {
                "storage": str(storage).removeprefix("torch."),
                "gradients": "common part" if common_part else "zero mean",
                "chunks": chunk + 1,
                "pages": name,
                "source": source,
                "bytes_per_element": size,
                "growth": float(exact.norm()) / squares**0.5,
            }
            rows.append(row | errors(got, exact))
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    borders = sorted({row["chunks"] for row in rows})
    head = "".join(f"{n:>11,}" for n in borders)
    for key in dict.fromkeys((row["storage"], row["gradients"]) for row in rows):
        table = [row for row in rows if (row["storage"], row["gradients"]) == key]
        print(f"\nq, k, v {key[0]}, gradients: {key[1]}")
        print(f"{'pages':31} bytes{head}   bias after {borders[-1]:,}")
        for name in dict.fromkeys(row["pages"] for row in table):
            line = [row for row in table if row["pages"] == name]
            last = line[-1]
            print(
                f"{name + ' (' + last['source'] + ')':31} {last['bytes_per_element']:5}"
                + "".join(f"{row['relative']:11.1e}" for row in line)
                + f"   {last['bias']:+.1e} ± {last['bias_deviation']:.0e}"
            )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Shape):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=int, default=field.default, metavar="N"
        )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--storage", nargs="+", choices=["float32", "bfloat16"], help="of q, k, v")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--common-part", type=float, default=0.25, help="mean over deviation")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()

    shape = Shape(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Shape)})
    on_cpu = options.device == "cpu"
    storages = options.storage or (["float32", "bfloat16"] if on_cpu else ["bfloat16"])
    device = _C.cpu_instruction_set() if on_cpu else torch.cuda.get_device_name()
    # The fp64 reference has no fast kernel, and need not have one.
    warnings.filterwarnings("ignore", "attention with float64")
    torch.manual_seed(0)
    begin = time.perf_counter()
    rows = []
    for storage in storages:
        for common_part in (0.0, options.common_part):
            rows += accumulate(
                shape, getattr(torch, storage), common_part, sorted(options.chunks), options.device
            )
    show(rows)
    print(f"\n{device}, torch {torch.__version__}, {time.perf_counter() - begin:.0f} s")
    if options.json is not None:
        result = {
            "date": datetime.date.today().isoformat(),
            "device": device if not on_cpu else f"{platform.machine()}, {device}",
            "torch": torch.__version__,
            "shape": dataclasses.asdict(shape),
            "common_part": options.common_part,
            "rows": rows,
        }
        write_record(options.json, result)


if __name__ == "__main__":
    main()
