"""What ``oomb._C`` refuses on the CPU instead of leaving its memory; see its stub for the rest."""

from __future__ import annotations

import doctest
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from native_calls import Arguments, Noun, all_made, noun, with_other

import oomb
from oomb import _C
from oomb.config import Score

ROOT = Path(__file__).resolve().parents[3]
PAGES, PAGE, KV_HEADS, HEAD_DIM, SLOTS = 3, 4, 2, 8, 5
INT = torch.int32


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def entries(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=INT)


POOL = tensor(SLOTS, 2, KV_HEADS, PAGE, HEAD_DIM)
UNITS = POOL.flatten(0, 1)


def pool(slots: torch.Tensor) -> Noun:
    return noun(
        "PagePool", address=slots.data_ptr(), slot_bytes=slots[0].nbytes, num_slots=len(slots)
    )


def write() -> Arguments:
    rows = tensor(1, KV_HEADS, PAGES * PAGE, HEAD_DIM)
    return {
        "k": rows, "v": rows.clone(), "pool": pool(POOL), "slots": entries(0, 4, 2),
        "page_begin": 0, "page_end": PAGES, "page_size": PAGE,
    }  # fmt: skip


def read() -> Arguments:
    rows = tensor(1, KV_HEADS, PAGES * PAGE, HEAD_DIM)
    table = entries(0, 9, -1, -1, 4, 5).view(1, 3, 2)
    return {
        "dk": rows, "dv": rows.clone(), "gradients": noun(
            "GradientPages", pool=pool(UNITS), table=table, dtype="float32"
        ), "page_begin": 0, "page_end": PAGES, "page_size": PAGE,
    }  # fmt: skip


def backward() -> Arguments:
    q, lse = tensor(1, KV_HEADS, 6, HEAD_DIM), tensor(1, KV_HEADS, 6)
    return {
        "chunk": noun("Chunk", q=q.clone(), k=q.clone(), v=q.clone(), scale=1.0),
        "past": noun(
            "PastPages", page_size=PAGE, pool=pool(POOL), block_table=entries(0, 4, 2),
            num_tokens=10,
        ),
        "output": noun("Output", o=q.clone(), lse=lse),
        "d_output": noun("Output", o=q.clone()),
        "d_chunk": noun("ChunkGradients", dq=q.clone(), dk=q.clone(), dv=q.clone()),
        "state": noun("BackwardState", delta=lse.clone()),
        "gradients": read()["gradients"],
    }  # fmt: skip


def score() -> Arguments:
    return {
        "q": tensor(1, 4, 6, HEAD_DIM), "summary": tensor(1, PAGES, KV_HEADS, HEAD_DIM),
        "scores": tensor(1, 2, 1, PAGES), "kind": "block_mean", "num_past": 10, "page_size": PAGE,
    }  # fmt: skip


TOO_FAR = r"-1 or a place below 5, got 5"
WRITE, READ = (_C.page_write, write), (_C.page_gradient_read, read)
BACKWARD, SCORE = (_C.attention_backward, backward), (_C.page_score, score)
ONE_OF_TWO = entries(0, -1, -1, -1, 4, 5).view(1, 3, 2)
CASES: list[tuple[tuple[Callable[..., None], Callable[[], Arguments]], str, Any, str]] = [
    (WRITE, "slots", entries(0, 5, 2), f"slots: expected {TOO_FAR}"),
    (WRITE, "slots", entries(0, -2, 2), "slots: expected -1 or .* got -2"),
    (WRITE, "pool.num_slots", 4, "slots: expected .* below 4, got 4"),
    (WRITE, "pool.num_slots", 0, "pool: expected at least 1 slot, got 0"),
    (WRITE, "pool.num_slots", -1, "num_slots: expected 0 or more, got -1"),
    (WRITE, "pool.address", 0, "pool: expected an address aligned"),
    pytest.param(
        *(WRITE, "pool.address", POOL.data_ptr() + 1, "pool: expected an address aligned"),
        id="pool.address-odd",  # the same in every process that collects it
    ),
    (WRITE, "pool.slot_bytes", 513, "pool: expected slots of .* multiple of 4"),
    (WRITE, "pool.slot_bytes", 2**61, "slot_bytes: expected sizes whose product"),
    (WRITE, "page_size", 2**62, r"page_size: expected 1 to 2\^30 tokens"),
    (WRITE, "k", tensor(1, 2, 12, 0), "head_dim: expected at least 1, got 0"),
    (WRITE, "k", tensor(1, 0, 12, 8), "k: expected at least 1 kv head, got 0"),
    (READ, "gradients.pool.num_slots", 9, "gradients.table: expected .* below 9, got 9"),
    (READ, "gradients.pool.slot_bytes", 2, "gradients.table: expected .* below"),
    (READ, "gradients.pool.slot_bytes", 0, "gradients.pool: expected slots of at least 1 byte"),
    (READ, "gradients.pool.address", 0, "gradients.pool: expected an address"),
    (READ, "gradients.dtype", "float16", "dtype: expected float64, float32 or bfloat16, got float"),
    (READ, "gradients.dtype", "float64", "gradients.dtype: expected float32 or bfloat16, got"),
    (READ, "gradients.table", None, "table: expected a tensor, got None"),
    (
        READ,
        "gradients.table",
        ONE_OF_TWO,
        "gradients.table: expected aligned places for both dK and dV of page 0, .* got 0, -1",
    ),
    (BACKWARD, "gradients.pool.num_slots", 9, "gradients.table: expected .* below 9"),
    (BACKWARD, "past.block_table", entries(0, 5, 2), "block_table: expected"),
    (BACKWARD, "past.num_tokens", 2**63 - 1, r"num_tokens: expected 0 to 2\^30"),
    (BACKWARD, "d_output.o", tensor(1, KV_HEADS, 5, HEAD_DIM), "d_output.o: expected shape"),
    (BACKWARD, "state.delta", tensor(1, KV_HEADS, 5), "delta: expected shape"),
    (SCORE, "num_past", 2**63 - 1, r"num_past: expected 0 to 2\^30 tokens"),
    (SCORE, "page_size", 2**63 - 1, r"page_size: expected 1 to 2\^30 tokens"),
    (SCORE, "summary", tensor(1, 3, 0, 8), "k: expected at least 1 kv head"),
    (SCORE, "kind", "mean", "kind: expected block_mean or token_softmax, got mean"),
    (SCORE, "visibility", noun("Visibility", window=5), "visibility: expected no window"),
]


@pytest.mark.parametrize(("call", "path", "value", "text"), CASES)
def test_refused(
    call: tuple[Callable[..., None], Callable[[], Arguments]], path: str, value: Any, text: str
) -> None:
    operation, good = call
    operation(**all_made(_C, good()))
    with pytest.raises(ValueError, match=f"^{text}"):
        operation(**all_made(_C, with_other(good(), path, value)))


def test_scores_are_known_by_the_same_names() -> None:
    """In the config and in the extension, in one order."""
    for name in get_args(Score):
        _C.page_score(**score() | {"kind": name})
    with pytest.raises(ValueError) as info:
        _C.page_score(**score() | {"kind": ""})
    assert str(info.value) == f"kind: expected {' or '.join(get_args(Score))}, got "


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
        chunk = _C.Chunk(q=q, k=q, v=q, scale=1.0, visibility=_C.Visibility(window=window))
        _C.attention_forward(
            chunk=chunk, past=_C.PastPages(page_size=PAGE), output=_C.Output(o=o, lse=lse)
        )
        results.append(o)
    assert torch.equal(*results)


def test_more_threads_than_there_can_be() -> None:
    with pytest.raises(ValueError, match="^count: expected 1 to 4096, got"):
        _C.set_num_threads(2**40)


def test_kernels_are_known_by_name_and_by_their_steps() -> None:
    """In a build without CUDA too, which may plan for a GPU."""
    names = "sm90, sm80, sm80-small or plain"
    with pytest.raises(ValueError, match=f"^OOMB_ATTENTION: expected {names}, got fast"):
        _C.force_attention("fast")
    assert _C.attention_key_tile() == 128
    assert _C.attention_page_sizes() == [64, 128]
    sizes = (32, 64, 72, 80, 96, 112, 128, 192, 256, 512)
    padded = [64, 64, 96, 96, 96, 128, 128, 256, 256, 512]
    assert [_C.attention_head_dim(x, 90) for x in sizes] == padded
    assert _C.attention_head_dim(192, 89) == 256  # in small tiles
    assert _C.attention_head_dim(320, 80) == 512
    assert _C.attention_head_dim(320, 89) == 320  # whose shared memory is too small for 512
    assert _C.attention_head_dim(80, 75) == 80


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
        with pytest.raises(oomb.OutOfMemoryError, match="2147483647 pieces of outputs"):
            self.begin(manager, num_layers=2**10, outputs=2**31 - 1)
        with pytest.raises(ValueError, match="layer: expected a layer of the call, got 0"):
            manager.block_table(0)
        self.begin(manager)
        assert np.asarray(manager.block_table(0)).tolist() == [[-1, -1]]


def test_a_visit_reads_its_own_outputs_alone() -> None:
    """Those of others, which are dead once they are read, stay."""
    manager = _C.PageManager(device="cpu", slot_bytes=64, device_slots=8, host_slots=8)
    visits = np.array([[0, 3, 0, 2], [0, 3, 2, 4]], np.int32)
    manager.begin_call(
        num_layers=1, pages_per_sequence=[1], grad_slots=1, visits=visits, outputs=4, exact=True
    )
    written, read = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
    manager.write_output(layer=0, begin=0, end=4, source=written.ctypes.data, num_bytes=256)

    def take(visit: int, begin: int, end: int) -> None:
        target = read.ctypes.data + 64 * begin
        manager.read_output(
            visit=visit, begin=begin, end=end, target=target, num_bytes=64 * (end - begin)
        )

    for visit, begin, end in ((0, 0, 4), (0, 1, 3), (1, 0, 4), (1, 1, 3)):
        text = f"begin, end: expected a range within {2 * visit} .. {2 * visit + 2}, got {begin} .."
        with pytest.raises(ValueError, match=re.escape(text)):
            take(visit, begin, end)
    take(0, 0, 2)
    take(1, 2, 4)
    assert (read == written).all()


def test_counters_are_those_of_the_snapshot() -> None:
    """Progress reads them instead of walking all pages."""
    manager = _C.PageManager(device="cpu", slot_bytes=64, device_slots=8, host_slots=8)
    visits = np.array([[0, 0, 0, 3]], np.int32)
    manager.begin_call(num_layers=1, pages_per_sequence=[3], grad_slots=1, visits=visits)
    manager.create(0, 0, 2)
    counters, snapshot = manager.stats(), json.loads(manager.snapshot())
    for tier, state in (("device", counters.device), ("host", counters.host)):
        for name, value in snapshot[tier].items():
            assert getattr(state, name) == value, (tier, name)
    assert counters.device.taken_bytes == 2 * 64
    assert counters.host.taken_bytes == 0


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
