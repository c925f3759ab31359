"""What ``oomb._C`` refuses on the CPU instead of leaving its memory; see its stub for the rest."""

from __future__ import annotations

import doctest
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oomb
from oomb import _C

ROOT = Path(__file__).resolve().parents[3]
PAGES, PAGE, KV_HEADS, HEAD_DIM, SLOTS = 3, 4, 2, 8, 5
INT = torch.int32

Arguments = dict[str, Any]


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def entries(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=INT)


POOL = tensor(SLOTS, 2, KV_HEADS, PAGE, HEAD_DIM)
UNITS = POOL.flatten(0, 1)


def write() -> Arguments:
    rows = tensor(1, KV_HEADS, PAGES * PAGE, HEAD_DIM)
    return {
        "k": rows, "v": rows.clone(), "kv_pool": POOL.data_ptr(), "kv_num_slots": SLOTS,
        "kv_slot_bytes": POOL[0].nbytes, "slots": entries(0, 4, 2), "page_begin": 0,
        "page_end": PAGES, "page_size": PAGE,
    }  # fmt: skip


def read() -> Arguments:
    rows = tensor(1, KV_HEADS, PAGES * PAGE, HEAD_DIM)
    return {
        "dk": rows, "dv": rows.clone(), "dkv_pool": UNITS.data_ptr(), "dkv_num_units": 2 * SLOTS,
        "dkv_unit_bytes": UNITS[0].nbytes, "dkv_table": entries(0, 9, -1, -1, 4, 5).view(1, 3, 2),
        "dkv_dtype": "float32", "page_begin": 0, "page_end": PAGES, "page_size": PAGE,
    }  # fmt: skip


def backward() -> Arguments:
    q, lse = tensor(1, KV_HEADS, 6, HEAD_DIM), tensor(1, KV_HEADS, 6)
    rows = {name: q.clone() for name in ("q", "k", "v", "o", "d_o", "dq", "dk", "dv")}
    gradients = {name: x for name, x in read().items() if name.startswith("dkv")}
    return rows | gradients | {
        "lse": lse, "delta": lse.clone(), "scale": 1.0, "page_size": PAGE,
        "kv_pool": POOL.data_ptr(), "kv_slot_bytes": POOL[0].nbytes, "kv_num_slots": SLOTS,
        "block_table": entries(0, 4, 2), "num_past": 10, "page_begin": 0, "page_end": PAGES,
    }  # fmt: skip


def score() -> Arguments:
    return {
        "q": tensor(1, 4, 6, HEAD_DIM), "summary": tensor(1, PAGES, KV_HEADS, HEAD_DIM),
        "scores": tensor(1, 2, 1, PAGES), "kind": "block_mean", "num_past": 10, "page_size": PAGE,
    }  # fmt: skip


TOO_FAR = r"-1 or a place below 5, got 5"
CASES: list[tuple[Callable[..., None], Callable[[], Arguments], Arguments, str]] = [
    (_C.page_write, write, {"slots": entries(0, 5, 2)}, f"slots: expected {TOO_FAR}"),
    (_C.page_write, write, {"slots": entries(0, -2, 2)}, "slots: expected -1 or .* got -2"),
    (_C.page_write, write, {"kv_num_slots": 4}, "slots: expected .* below 4, got 4"),
    (_C.page_write, write, {"kv_num_slots": 0}, "kv_num_slots: expected a number above 0"),
    (_C.page_write, write, {"kv_pool": 0}, "kv_pool: expected the address of the pool"),
    (_C.page_write, write, {"kv_pool": POOL.data_ptr() + 1}, "kv_pool: expected .* aligned"),
    (_C.page_write, write, {"kv_slot_bytes": 513}, "kv_slot_bytes: expected .* multiple of 4"),
    (_C.page_write, write, {"kv_slot_bytes": 2**61}, "kv_slot_bytes: expected sizes whose product"),
    (_C.page_write, write, {"page_size": 2**62}, r"page_size: expected 1 to 2\^30 tokens"),
    (_C.page_write, write, {"k": tensor(1, 2, 12, 0)}, "head_dim: expected at least 1, got 0"),
    (_C.page_write, write, {"k": tensor(1, 0, 12, 8)}, "k: expected at least 1 kv head, got 0"),
    (_C.page_gradient_read, read, {"dkv_num_units": 9}, "dkv_table: expected .* below 9, got 9"),
    (_C.page_gradient_read, read, {"dkv_unit_bytes": 2}, "dkv_table: expected .* below"),
    (_C.page_gradient_read, read, {"dkv_pool": 0}, "dkv_pool: expected the address"),
    (
        _C.page_gradient_read,
        read,
        {"dkv_table": entries(0, -1, -1, -1, 4, 5).view(1, 3, 2)},
        "dkv_table: expected aligned places for both dK and dV of page 0, .* got 0, -1",
    ),
    (_C.attention_backward, backward, {"dkv_num_units": 9}, "dkv_table: expected .* below 9"),
    (_C.attention_backward, backward, {"block_table": entries(0, 5, 2)}, "block_table: expected"),
    (_C.attention_backward, backward, {"num_past": 2**63 - 1}, r"num_past: expected 0 to 2\^30"),
    (_C.page_score, score, {"num_past": 2**63 - 1}, r"num_past: expected 0 to 2\^30 tokens"),
    (_C.page_score, score, {"page_size": 2**63 - 1}, r"page_size: expected 1 to 2\^30 tokens"),
    (_C.page_score, score, {"summary": tensor(1, 3, 0, 8)}, "k: expected at least 1 kv head"),
]


@pytest.mark.parametrize(("call", "good", "changes", "text"), CASES)
def test_refused(
    call: Callable[..., None], good: Callable[[], Arguments], changes: Arguments, text: str
) -> None:
    call(**good())
    with pytest.raises(ValueError, match=f"^{text}"):
        call(**good() | changes)


def test_elements_must_be_aligned() -> None:
    q = torch.frombuffer(bytearray(4 * 4 * 6 * HEAD_DIM + 1), dtype=torch.float32, offset=1)
    with pytest.raises(ValueError, match="^q: expected memory aligned to its elements of 4 bytes"):
        _C.page_score(**score() | {"q": q.view(1, 4, 6, HEAD_DIM)})


def test_a_window_beyond_all_keys_is_none() -> None:
    results = []
    for window in (0, 2**63 - 1):
        torch.manual_seed(0)
        q = torch.randn(1, KV_HEADS, 6, HEAD_DIM)
        o, lse = torch.empty_like(q), tensor(1, KV_HEADS, 6)
        _C.attention_forward(
            q=q, k=q, v=q, o=o, lse=lse, scale=1.0, page_size=PAGE, window=window
        )  # fmt: skip
        results.append(o)
    assert torch.equal(*results)


def test_more_threads_than_there_can_be() -> None:
    with pytest.raises(ValueError, match="^count: expected 1 to 4096, got"):
        _C.set_num_threads(2**40)


def test_kernels_are_known_by_name_and_by_their_steps() -> None:
    """In a build without CUDA too, which may plan for a GPU."""
    with pytest.raises(ValueError, match="^OOMB_ATTENTION: expected sm90, sm80 or plain, got fast"):
        _C.force_attention("fast")
    assert _C.attention_key_tile() == 128


class TestPageManager:
    good = {"device": "cpu", "slot_bytes": 64, "device_slots": 8, "host_slots": 8}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"slot_bytes": 2**62}, r"slot_bytes: expected 1 .. 2\^32, got"),
            ({"device_slots": 2**62}, "device_memory: expected 0 .. 1073741823 slots, got"),
            ({"host_slots": 2**40}, "host_memory: expected 0 .. 1073741823 slots, got"),
        ],
    )
    def test_pools_that_cannot_be(self, changes: Arguments, text: str) -> None:
        with pytest.raises(ValueError, match=f"^{text}"):
            _C.PageManager(**self.good | changes)

    def begin(self, manager: _C.PageManager, **changes: Any) -> None:
        call = {"num_layers": 1, "pages_per_sequence": [2], "grad_slots": 1, "exact": True}
        visits = np.array([[0, 0, 0, 2]], np.int32)
        manager.begin_call(**call | {"visits": visits} | changes)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"pages_per_sequence": [-1, 2]}, "pages_per_sequence: expected 0 or more pages"),
            ({"num_layers": 2**62}, r"num_layers: expected 1 to 2\^31 - 1"),
            ({"wave_pages": 2**62}, r"wave_pages: expected 1 to 2\^31 - 1"),
        ],
    )
    def test_calls_that_cannot_be(self, changes: Arguments, text: str) -> None:
        with pytest.raises(ValueError, match=f"^{text}"):
            self.begin(_C.PageManager(**self.good), **changes)

    def test_tables_that_no_memory_holds(self) -> None:
        """They are refused before anything of them is allocated, and the manager stays usable."""
        manager = _C.PageManager(**self.good)
        with pytest.raises(oomb.OutOfMemoryError, match="tables of the call's pages: needed"):
            self.begin(manager, num_layers=2**20, pages_per_sequence=[2**20])
        with pytest.raises(ValueError, match="layer: expected a layer of the call, got 0"):
            manager.block_table(0)
        self.begin(manager)
        assert np.asarray(manager.block_table(0)).tolist() == [[-1, -1]]


def test_the_page_managers_example() -> None:
    """Its docstring is all that one needs to use it alone, so it must run."""
    documentation = _C.PageManager.__doc__
    assert documentation is not None
    test = doctest.DocTestParser().get_doctest(documentation, {}, "PageManager", None, 0)
    assert len(test.examples) > 10
    failures = io.StringIO()
    torch.manual_seed(0)
    results = doctest.DocTestRunner(verbose=False).run(test, out=failures.write)
    assert results.failed == 0, failures.getvalue()


def test_every_method_of_the_page_manager_says_what_it_does() -> None:
    for name, member in vars(_C.PageManager).items():
        if name.startswith("_") or isinstance(member, property):
            continue
        signature, *text = (member.__doc__ or "").strip().split("\n\n")
        assert any(line.strip() for line in text), f"{signature}: no docstring"


def sanitized() -> Path:
    found = sorted((ROOT / "build/asan").glob("_C.*.so"))
    assert found, "no extension in build/asan: make test-slow compiles it"
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("surface", ["calls", "manager", "ops"])
def test_random_arguments_under_the_sanitizers(surface: str, tmp_path: Path) -> None:
    # Both must be there before the first exception is thrown, which python itself never does.
    libraries = [
        subprocess.run(
            ["c++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    trace = tmp_path / "trace"
    script = Path(__file__).with_name("native_fuzz.py")
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        # Python and torch keep what they have until the end; a size that cannot be is refused.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    seed = {"calls": 0, "manager": 10**6, "ops": 2 * 10**6}[surface]
    command = [sys.executable, str(script), str(sanitized()), surface, "20", str(seed), str(trace)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    report = f"{trace.read_text()}\n{run.stdout[-1000:]}\n{run.stderr[-6000:]}"
    assert run.returncode == 0, report
    cases, refused = (int(count) for count in run.stdout.split())
    assert cases > 100, report
    if surface == "calls":  # neither nearly all refused nor nearly none: the arguments are good
        assert 0.1 * cases < refused < 0.9 * cases, report
