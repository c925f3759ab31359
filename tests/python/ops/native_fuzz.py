"""Calls the native surface with random arguments; whatever they are, this process must live on.

    python native_fuzz.py EXTENSION SURFACE SECONDS SEED TRACE

EXTENSION is a build of ``oomb._C`` under AddressSanitizer and UndefinedBehaviorSanitizer, which end
the process at the first access outside its memory. SURFACE is ``calls`` (the operations of _C),
``manager`` (its page manager) or ``ops`` (``oomb.ops``). TRACE is a file that always names the case
being run: ``... SURFACE 0 SEED TRACE`` runs that case alone.

A case takes arguments that fit and makes some of them hostile. Addresses are never lies: a pool has
the memory that a call says it has, which is all that the extension trusts.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_cases import Arguments, Cases, honest


def load(path: str) -> Any:
    """The extension under test in the place of the package's own."""
    spec = importlib.util.spec_from_file_location("oomb._C", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["oomb._C"] = module
    spec.loader.exec_module(module)
    return module


class Calls(Cases):
    """The operations of _C."""

    def run(self, extension: Any) -> None:
        kind = self.random.choice(("forward", "backward", "write", "read", "score", "select"))
        self.keep: list[Any] = []
        name, arguments = getattr(self, kind)()
        arguments = self.spoil(arguments)
        for pool, num_bytes, count in (
            ("kv_pool", "kv_slot_bytes", "kv_num_slots"),
            ("dkv_pool", "dkv_unit_bytes", "dkv_num_units"),
        ):
            if pool not in arguments:
                continue
            memory = self.pools[pool]
            if arguments[pool] not in (0, None, memory.data_ptr()):
                arguments[pool] = 0
            if not honest(arguments[num_bytes], arguments[count], memory):
                return
        getattr(extension, name)(**arguments)

    def kv(self) -> Arguments:
        self.pools = {"kv_pool": self.pool()}
        memory = self.pools["kv_pool"]
        return {
            "kv_pool": memory.data_ptr(),
            "kv_slot_bytes": memory[0].nbytes,
            "kv_num_slots": len(memory),
        }

    def dkv(self) -> Arguments:
        double = self.dtype == torch.float64
        dtype = torch.float64 if double else self.random.choice((torch.float32, torch.bfloat16))
        memory = self.pool(dtype).flatten(0, 1)
        self.pools["dkv_pool"] = memory
        return {
            "dkv_pool": memory.data_ptr(),
            "dkv_unit_bytes": memory[0].nbytes,
            "dkv_num_units": len(memory),
            "dkv_table": self.table(self.batch, self.pages, 2, most=2 * self.slots),
            "dkv_dtype": str(dtype).removeprefix("torch."),
        }

    def common(self) -> Arguments:
        heads = self.kv_heads * self.group
        q, k, v = self.rows(heads), self.rows(self.kv_heads), self.rows(self.kv_heads)
        statistics = self.normal(*q.shape[:3], dtype=self.real)
        return {
            "q": q, "k": k, "v": v, "o": torch.empty_like(q), "lse": statistics,
            "scale": 0.3, "page_size": self.page, "window": self.random.choice((0, 0, 5, 64)),
            **self.limits(), **self.kv(),
            "block_table": self.table(self.batch, self.pages, most=self.slots),
            "num_past": self.past, "page_begin": 0, "page_end": self.pages,
            "selection": self.lists(), "own_chunk": True, "first_wave": True, "last_wave": True,
        }  # fmt: skip

    def forward(self) -> tuple[str, Arguments]:
        arguments = self.common()
        q, lse = arguments["q"], arguments["lse"]
        state = {"acc": q.to(self.real), "max": lse.clone(), "sum": lse.clone()}
        return "attention_forward", arguments | state

    def backward(self) -> tuple[str, Arguments]:
        arguments = self.common() | self.dkv()
        q, k, lse = arguments["q"], arguments["k"], arguments["lse"]
        return "attention_backward", arguments | {
            "d_o": torch.randn_like(q), "d_lse": None, "dq": torch.empty_like(q),
            "dk": torch.empty_like(k), "dv": torch.empty_like(k), "delta": lse.clone(),
            "dq_acc": q.to(self.real), "deterministic": True, "rounding_seed": 3,
        }  # fmt: skip

    def write(self) -> tuple[str, Arguments]:
        k, pages = self.rows(self.kv_heads), self.own_pages
        rows = torch.full((self.batch,), self.tokens, dtype=torch.int32)
        return "page_write", self.kv() | {
            "k": k, "v": torch.randn_like(k),
            "slots": self.table(self.batch, pages, most=self.slots),
            "page_begin": 0, "page_end": pages, "page_size": self.page, "num_rows": rows,
            "summary": self.normal(self.batch, pages, self.kv_heads, self.head_dim),
        }  # fmt: skip

    def read(self) -> tuple[str, Arguments]:
        self.pools = {}
        k, self.pages = self.rows(self.kv_heads), self.own_pages
        return "page_gradient_read", self.dkv() | {
            "dk": k, "dv": torch.randn_like(k), "page_begin": 0, "page_end": self.own_pages,
            "page_size": self.page, "scale": 0.5,
        }  # fmt: skip

    def score(self) -> tuple[str, Arguments]:
        heads = self.random.choice((1, self.kv_heads))
        return "page_score", self.limits() | {
            "q": self.rows(self.kv_heads * self.group),
            "summary": self.normal(self.batch, self.pages, self.kv_heads, self.head_dim),
            "scores": self.normal(self.batch, self.own_pages, heads, self.pages, dtype=self.real),
            "kind": self.random.choice(("block_mean", "token_softmax")),
            "num_past": self.past, "page_size": self.page,
        }  # fmt: skip

    def select(self) -> tuple[str, Arguments]:
        budget = self.random.randint(1, 5)
        shape = (self.batch, self.own_pages, self.kv_heads)
        scores = self.normal(*shape, self.pages, dtype=self.real)
        scores[self.normal(*scores.shape) > 1] = self.random.choice((float("-inf"), float("nan")))
        return "page_select", {
            "scores": scores, "selection": torch.empty(*shape, budget, dtype=torch.int32),
            "budget": budget, "sink_pages": self.random.randint(0, 2),
            "recent_pages": self.random.randint(0, 2),
        }  # fmt: skip


class Manager(Cases):
    """A page manager: a call with random steps, most of which it refuses."""

    def run(self, extension: Any) -> None:
        r = self.random
        smallest = {"batch": 1, "grad_slots": 1, "backward": True, "wave_pages": 1}
        self.attempt(extension.smallest_device_slots, **smallest)
        manager = extension.PageManager(
            **self.spoil(
                {
                    "device": "cpu", "slot_bytes": r.choice((8, 64, 4096)),
                    "device_slots": r.randint(1, 40), "host_slots": r.randint(0, 60),
                    "poison": r.random() < 0.3, "dry": r.random() < 0.2,
                    "shuffle_seed": r.choice((None, 3)),
                }
            )
        )  # fmt: skip
        for _ in range(r.randint(1, 3)):
            layers, pages = r.randint(1, 3), [r.randint(0, 6) for _ in range(r.randint(1, 3))]
            most, visits = max(pages), []
            for _ in range(r.randint(1, 8)):
                first = r.randint(0, most)
                visits.append([r.randrange(layers), r.randrange(3), first, r.randint(first, most)])
            self.attempt(
                manager.begin_call,
                num_layers=layers, pages_per_sequence=pages, grad_slots=r.choice((1, 2)),
                visits=np.array(visits, np.int32), exact=r.random() < 0.5,
                wave_pages=r.choice((1, 2)), device_slots=None,
            )  # fmt: skip
            for _ in range(r.randint(0, 30)):
                self.step(manager, layers, most, len(visits))
            self.attempt(manager.end_call)
        if r.random() < 0.5:
            manager.close()

    def step(self, manager: Any, layers: int, most: int, visits: int) -> None:
        r = self.random
        layer, visit = r.randrange(layers), r.randrange(visits)
        begin = r.randint(0, most)
        pages = {"page_begin": begin, "page_end": r.randint(begin, most)}
        span = {"begin": pages["page_begin"], "end": pages["page_end"]}
        positions = np.array([r.randint(-1, 3 * most) for _ in range(r.randint(0, 4))], np.int64)
        steps: list[tuple[str, Arguments]] = [
            ("create", {"layer": layer, **pages}),
            ("commit", {"layer": layer, **pages}),
            ("create_gradients", {"layer": layer, **pages}),
            ("acquire_gradients", {"layer": layer, **pages}),
            ("drop", {"layer": layer, **pages, "kv": True, "grads": True}),
            ("waves", {"visit": visit}),
            ("own_alone", {"visit": visit, **span}),
            ("acquire", {"visit": visit, **span}),
            ("release", {"visit": visit, **span}),
            ("set_visit_pages", {"visit": visit, "pages": positions}),
            ("block_table", {"layer": layer}),
            ("gradient_table", {"layer": layer}),
            ("max_create", {}),
            ("max_gradients", {}),
            ("stats", {}),
            ("waits", {}),
            ("snapshot", {}),
            ("pool_address", {}),
        ]
        name, arguments = r.choice(steps)
        result = self.attempt(getattr(manager, name), **arguments)
        if name.endswith("table") and result is not None:
            np.asarray(result).sum()
        manager.check_integrity()

    def attempt(self, call: Callable[..., Any], **arguments: Any) -> Any:
        try:
            return call(**self.spoil(arguments))
        except REFUSALS:
            return None


class Ops(Cases):
    """``oomb.ops``: nothing but a ValueError, or torch's word that it has no memory."""

    def run(self, _extension: Any) -> None:
        from oomb import ops

        kind = self.random.choice(("attention", "write", "scores", "select", "pages"))
        call, arguments = getattr(self, kind)(ops)
        try:
            result = call(**self.spoil(arguments))
        except (ValueError, MemoryError):
            return
        except RuntimeError as error:
            text = str(error)
            if not any(word in text for word in ("allocate", "overflow", "sparse", "Sparse")):
                raise
            return
        if kind == "attention" and result[0].requires_grad and self.random.random() < 0.7:
            o, lse = result
            (o.sum() + lse.nan_to_num(0, 0, 0).sum()).backward()

    def attention(self, ops: Any) -> tuple[Callable[..., Any], Arguments]:
        rows = [self.rows(h) for h in (self.kv_heads * self.group, self.kv_heads, self.kv_heads)]
        double = self.dtype == torch.float64
        dtype = torch.float64 if double else self.random.choice((torch.float32, torch.bfloat16))
        return ops.paged_attention, {
            "q": rows[0].requires_grad_(), "k": rows[1], "v": rows[2], "kv_pages": self.pool(),
            "dkv_pages": self.random.choice((None, self.pool(dtype))),
            "block_table": self.table(self.batch, self.pages, most=self.slots),
            "num_past": self.past, "scale": 0.3, "window": 0, "selection": self.lists(),
            **self.limits(), "deterministic": True, "check": self.random.random() < 0.5,
        }  # fmt: skip

    def write(self, ops: Any) -> tuple[Callable[..., Any], Arguments]:
        k = self.rows(self.kv_heads)
        return ops.page_write, {
            "k": k, "v": torch.randn_like(k), "kv_pages": self.pool(),
            "slots": self.table(self.batch, self.own_pages, most=self.slots), "num_rows": None,
            "summary": self.normal(self.batch, self.own_pages, self.kv_heads, self.head_dim),
            "check": self.random.random() < 0.5,
        }  # fmt: skip

    def scores(self, ops: Any) -> tuple[Callable[..., Any], Arguments]:
        return ops.page_scores, {
            "q": self.rows(self.kv_heads * self.group),
            "summary": self.normal(self.batch, self.pages, self.kv_heads, self.head_dim),
            "num_past": self.past, "page_size": self.page, **self.limits(),
            "score": self.random.choice(("block_mean", "token_softmax")),
            "share": self.random.choice(("all_heads", "kv_head")),
        }  # fmt: skip

    def select(self, ops: Any) -> tuple[Callable[..., Any], Arguments]:
        scores = self.normal(self.batch, self.own_pages, 1, self.pages, dtype=self.real)
        budget = self.random.randint(2, 5)
        return ops.page_select, {
            "scores": scores, "budget": budget, "sink_pages": 1, "recent_pages": 1,
        }  # fmt: skip

    def pages(self, ops: Any) -> tuple[Callable[..., Any], Arguments]:
        return ops.pages_like, {"k": self.rows(self.kv_heads), "num_pages": 3, "page_size": 4}


REFUSALS: tuple[type[BaseException], ...] = (ValueError, TypeError, MemoryError)


def main() -> None:
    path, surface, seconds, seed, trace = sys.argv[1:6]
    extension = load(path)
    from oomb.errors import Error

    global REFUSALS
    REFUSALS = (*REFUSALS, Error, BufferError)
    if surface == "ops":
        import oomb.ops  # noqa: F401  (not in the time of the first case)
    extension.set_num_threads(2)
    surfaces: dict[str, type[Any]] = {"calls": Calls, "manager": Manager, "ops": Ops}
    case, cases, refused = int(seed), 0, 0
    end = time.monotonic() + float(seconds)
    with Path(trace).open("w") as file:
        while True:
            file.seek(0)
            file.write(f"{surface} 0 {case:<12}")
            file.flush()
            try:
                surfaces[surface](case).run(extension)
            except REFUSALS:
                refused += 1
            cases, case = cases + 1, case + 1
            if time.monotonic() >= end:
                break
    print(cases, refused)


if __name__ == "__main__":
    main()
