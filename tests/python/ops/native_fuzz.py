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

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_cases import OTHERS, Arguments, Cases, honest
from native_calls import Noun, all_made, leaves, noun, value_at, with_other


def load(path: str) -> Any:
    """The extension under test in the place of the package's own."""
    spec = importlib.util.spec_from_file_location("oomb._C", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["oomb._C"] = module
    spec.loader.exec_module(module)
    return module


class Calls(Cases):
    """The operations of _C and the nouns that they take."""

    def run(self, extension: Any) -> None:
        kind = self.random.choice(("forward", "backward", "write", "read", "score", "select"))
        self.pools: dict[str, torch.Tensor] = {}  # by the path of their noun
        name, arguments = getattr(self, kind)()
        arguments = self.spoil_leaves(arguments)
        for path, memory in self.pools.items():
            pool = value_at(arguments, path)
            if not isinstance(pool, Noun):
                continue
            if pool.fields["address"] not in (0, None, memory.data_ptr()):
                arguments = with_other(arguments, f"{path}.address", 0)
            if not honest(pool.fields["slot_bytes"], pool.fields["num_slots"], memory):
                return
        nouns = all_made(extension, arguments)
        if self.random.random() < 0.1:
            self.resize_one(arguments)
        getattr(extension, name)(**nouns)

    def spoil_leaves(self, arguments: Arguments) -> Arguments:
        """Hostile values in nouns, and now and then something else in the place of one."""
        count = self.random.choice((0, 1, 1, 1, 2, 3))
        paths = leaves(arguments)
        for path in self.random.sample(paths, min(count, len(paths))):
            arguments = with_other(arguments, path, self.spoilt(value_at(arguments, path)))
        if self.random.random() < 0.05:
            name = self.random.choice(sorted(arguments))
            others = [x for other, x in arguments.items() if other != name and isinstance(x, Noun)]
            arguments = {**arguments, name: self.random.choice([*others, *OTHERS])}
            self.pools = {path: x for path, x in self.pools.items() if path.split(".")[0] != name}
        return arguments

    def resize_one(self, arguments: Arguments) -> None:
        """A tensor changes between the making of its noun and the call."""
        tensors = [value_at(arguments, path) for path in leaves(arguments)]
        own = [x for x in tensors if isinstance(x, torch.Tensor) and x.ndim and x.is_contiguous()]
        if own:
            x = self.random.choice(own)
            with contextlib.suppress(RuntimeError):
                x.resize_(self.random.randint(0, x.shape[0]), *x.shape[1:])

    def pool_of(self, path: str, memory: torch.Tensor) -> Noun:
        self.pools[path] = memory
        return noun(
            "PagePool",
            address=memory.data_ptr(),
            slot_bytes=memory[0].nbytes,
            num_slots=len(memory),
        )

    def gradients(self) -> Noun:
        double = self.dtype == torch.float64
        dtype = torch.float64 if double else self.random.choice((torch.float32, torch.bfloat16))
        return noun(
            "GradientPages",
            pool=self.pool_of("gradients.pool", self.pool(dtype).flatten(0, 1)),
            table=self.table(self.batch, self.pages, 2, most=2 * self.slots),
            dtype=str(dtype).removeprefix("torch."),
            rounding_seed=3,
        )

    def visibility(self, window: int = 0) -> Noun:
        return noun("Visibility", window=window, **self.limits())

    def common(self) -> Arguments:
        heads = self.kv_heads * self.group
        q, k, v = self.rows(heads), self.rows(self.kv_heads), self.rows(self.kv_heads)
        statistics = self.normal(*q.shape[:3], dtype=self.real)
        visibility = self.visibility(self.random.choice((0, 0, 5, 64)))
        past = noun(
            "PastPages", page_size=self.page, pool=self.pool_of("past.pool", self.pool()),
            block_table=self.table(self.batch, self.pages, most=self.slots),
            num_tokens=self.past, selection=self.lists(),
        )  # fmt: skip
        wave = noun("Wave", begin=0, end=self.pages, first=True, last=True, own_chunk=True)
        return {
            "chunk": noun("Chunk", q=q, k=k, v=v, scale=0.3, visibility=visibility), "past": past,
            "output": noun("Output", o=torch.empty_like(q), lse=statistics),
            "wave": self.random.choice((None, wave)),
        }  # fmt: skip

    def forward(self) -> tuple[str, Arguments]:
        arguments = self.common()
        q, lse = arguments["chunk"].fields["q"], arguments["output"].fields["lse"]
        state = noun("SoftmaxState", acc=q.to(self.real), max=lse.clone(), sum=lse.clone())
        return "attention_forward", arguments | {"state": state}

    def backward(self) -> tuple[str, Arguments]:
        arguments = self.common()
        q, k = (arguments["chunk"].fields[name] for name in ("q", "k"))
        lse = arguments["output"].fields["lse"]
        return "attention_backward", arguments | {
            "d_output": noun("Output", o=torch.randn_like(q), lse=None),
            "d_chunk": noun(
                "ChunkGradients",
                dq=torch.empty_like(q), dk=torch.empty_like(k), dv=torch.empty_like(k),
            ),
            "state": noun("BackwardState", delta=lse.clone(), dq_acc=q.to(self.real)),
            "gradients": self.gradients(), "deterministic": True,
        }  # fmt: skip

    def write(self) -> tuple[str, Arguments]:
        k, pages = self.rows(self.kv_heads), self.own_pages
        rows = torch.full((self.batch,), self.tokens, dtype=torch.int32)
        return "page_write", {
            "k": k, "v": torch.randn_like(k), "pool": self.pool_of("pool", self.pool()),
            "slots": self.table(self.batch, pages, most=self.slots),
            "page_begin": 0, "page_end": pages, "page_size": self.page, "num_rows": rows,
            "summary": self.normal(self.batch, pages, self.kv_heads, self.head_dim),
        }  # fmt: skip

    def read(self) -> tuple[str, Arguments]:
        k, self.pages = self.rows(self.kv_heads), self.own_pages
        return "page_gradient_read", {
            "dk": k, "dv": torch.randn_like(k), "gradients": self.gradients(), "page_begin": 0,
            "page_end": self.own_pages, "page_size": self.page, "scale": 0.5,
        }  # fmt: skip

    def score(self) -> tuple[str, Arguments]:
        heads = self.random.choice((1, self.kv_heads))
        return "page_score", {
            "q": self.rows(self.kv_heads * self.group),
            "summary": self.normal(self.batch, self.pages, self.kv_heads, self.head_dim),
            "scores": self.normal(self.batch, self.own_pages, heads, self.pages, dtype=self.real),
            "kind": self.random.choice(("block_mean", "token_softmax")),
            "num_past": self.past, "page_size": self.page, "visibility": self.visibility(),
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
