"""Arguments of the native surface that fit, and hostile ones in their places, by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

INTS = (0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 2**64, 2**70)
FLOATS = (0.0, 1.0, -1.0, 0.3, 1e300, float("inf"), float("nan"))
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHERS = (None, "x", 1.5, [1, 2], b"", (), {}, object(), True)
MOST = 2**60  # bytes that the extension takes any pool to have at most

Arguments = dict[str, Any]


class Cases:
    """Arguments that fit, and ways to spoil them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        r = self.random
        self.dtype = r.choice(DTYPES)
        self.real = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.batch, self.kv_heads, self.group = r.randint(1, 2), r.randint(1, 3), r.randint(1, 3)
        self.head_dim, self.page = r.choice((1, 3, 8, 16, 33)), r.choice((1, 2, 5, 8, 16))
        self.tokens, self.past = r.randint(1, 40), r.randint(0, 60)
        self.pages = -(-self.past // self.page)
        self.own_pages = -(-self.tokens // self.page)
        self.slots = self.batch * max(self.pages, self.own_pages) + r.randint(0, 3)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self.torch).to(dtype or self.dtype)

    def table(self, *shape: int, most: int) -> torch.Tensor:
        """Places in [0, most), each once."""
        places = torch.randperm(most, generator=self.torch)[: int(np.prod(shape))]
        return places.to(torch.int32).view(shape).contiguous()

    def pool(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.normal(self.slots, 2, self.kv_heads, self.page, self.head_dim, dtype=dtype)

    def rows(self, heads: int) -> torch.Tensor:
        return self.normal(self.batch, heads, self.tokens, self.head_dim)

    def lists(self) -> torch.Tensor | None:
        if self.pages == 0 or self.random.random() < 0.6:
            return None
        heads, budget = self.random.choice((1, self.kv_heads)), self.random.randint(1, self.pages)
        lists = torch.full((self.batch, self.own_pages, heads, budget), -1, dtype=torch.int32)
        for row in lists.view(-1, budget):
            count = self.random.randint(0, budget)
            row[:count] = self.table(count, most=self.pages).sort().values
        return lists

    def limits(self) -> Arguments:
        keys = self.past + self.tokens
        first = torch.randint(0, keys, (self.batch, self.tokens), generator=self.torch)
        num = torch.randint(0, keys + 1, (self.batch,), generator=self.torch)
        return {
            "first_key": first.to(torch.int32) if self.random.random() < 0.3 else None,
            "num_keys": num.to(torch.int32) if self.random.random() < 0.3 else None,
        }

    # --- hostile values

    def spoil(self, arguments: Arguments) -> Arguments:
        for name in self.random.sample(sorted(arguments), self.random.choice((0, 1, 1, 1, 2, 3))):
            arguments[name] = self.spoilt(arguments[name])
        return arguments

    def spoilt(self, value: Any) -> Any:
        r = self.random
        if r.random() < 0.05:
            return r.choice(OTHERS)
        if isinstance(value, torch.Tensor):
            return self.spoilt_tensor(value)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return r.choice((*INTS, value + 1, value - 1, 2 * value))
        if isinstance(value, float):
            return r.choice(FLOATS)
        return r.choice((*OTHERS, *INTS, self.table(3, most=9)))

    def spoilt_tensor(self, x: torch.Tensor) -> Any:
        r = self.random
        axis = r.randrange(x.ndim) if x.ndim else 0
        ways: list[Callable[[], Any]] = [
            lambda: None,
            lambda: x.numpy(force=True) if x.dtype != torch.bfloat16 else x,
            lambda: x.to(r.choice((*DTYPES, torch.int32, torch.int64, torch.uint8))),
            lambda: x.transpose(axis, -1),
            lambda: x.unsqueeze(axis),
            lambda: x[0] if x.ndim and len(x) else x,
            lambda: x.narrow(axis, 0, r.randint(0, x.shape[axis])),
            lambda: torch.cat([x, x], axis),
            lambda: x[..., ::2],
            lambda: x[:1].expand(x.shape) if len(x) else x,
            lambda: torch.empty((*x.shape[:axis], 0, *x.shape[axis + 1 :]), dtype=x.dtype),
            lambda: torch.empty((0, 2**40, 1, 2**30)[: max(x.ndim, 1)], dtype=x.dtype),
            lambda: torch.empty((2**50, 1, 0, 64)[: max(x.ndim, 1)], dtype=x.dtype)
            if x.ndim > 2
            else x,
            lambda: x.to("meta"),
            lambda: x.to_sparse(),
            lambda: torch.frombuffer(bytearray(8 * x.numel() + 9), dtype=torch.uint8, offset=1),
        ]
        if x.dtype == torch.int32:
            entries = (
                -(2**31),
                -2,
                -1,
                0,
                1,
                2**31 - 1,
                self.slots - 1,
                self.slots,
                2 * self.slots,
            )

            def other_entries() -> torch.Tensor:
                changed = x.clone()
                for _ in range(r.randint(1, 3)):
                    if changed.numel():
                        changed.view(-1)[r.randrange(changed.numel())] = r.choice(entries)
                return changed

            ways += 6 * [other_entries]
        try:
            return r.choice(ways)()
        except (RuntimeError, IndexError):  # not of this tensor
            return None


def honest(num_bytes: Any, count: Any, pool: torch.Tensor) -> bool:
    """Whether a pool has what these say, or they are what no pool has."""
    if not isinstance(num_bytes, int) or not isinstance(count, int):
        return True
    size = num_bytes * count
    return num_bytes <= 0 or count <= 0 or size <= pool.nbytes or size > MOST
