"""What attention kernels are given is checked before they run; nouns stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_calls import all_made, noun, with_other
from paged_case import Case, Problem, relative

from oomb import _C

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "duplicate": ({"selection": [1, 1, -1]}, "selection: expected ascending"),
    "descending": ({"selection": [2, 1, -1]}, "selection: expected ascending"),
    "future": ({"selection": [0, 3, -1]}, "selection: expected pages below 3"),
    "below": ({"selection": [-2, 1, -1]}, "selection: expected pages below 3"),
    "after_padding": ({"selection": [0, -1, 1]}, "selection: expected page ids, then only -1"),
    "not_resident": ({"block_table": [0, -1, 2]}, "block_table: expected page 1"),
    "listed_not_resident": (
        {"block_table": [0, -1, 2], "selection": [0, 1, -1]}, "block_table: expected page 1",
    ),
    "slot_outside": ({"block_table": [0, 1, 6]}, "block_table: expected page 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_lists_are_refused(name: str) -> None:
    changes, message = REFUSALS[name]
    problem = Problem(Case(chunk=16))
    if "selection" in changes:
        problem.selection = torch.tensor([[[changes["selection"]]]], dtype=torch.int32)
    if "block_table" in changes:
        problem.block_table = torch.tensor([changes["block_table"]], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        problem.forward()


def test_what_is_not_needed_may_be_absent() -> None:
    window = Problem(Case(chunk=16, window=20))
    window.block_table[0, 0] = -1
    listed = Problem(Case(chunk=16, budget=3))
    listed.selection = torch.tensor([[[[0, 2, -1]]]], dtype=torch.int32)
    listed.block_table[0, 1] = -1
    for problem in (window, listed):
        o, lse = problem.forward()
        expected = problem.reference()
        assert relative(o, expected["o"]) < 1e-13
        assert relative(lse, expected["lse"]) < 1e-13


def test_arguments_are_checked() -> None:
    problem = Problem(Case())

    good = {
        "chunk": noun(
            "Chunk", q=problem.q, k=problem.k, v=problem.v, scale=1.0, visibility=noun("Visibility")
        ),
        "past": noun(
            "PastPages", page_size=16, block_table=problem.block_table, num_tokens=48,
            pool=noun(
                "PagePool", address=problem.kv_pool.data_ptr(), num_slots=len(problem.kv_pool),
                slot_bytes=problem.kv_pool[0].nbytes,
            ),
        ),
        "wave": noun("Wave", end=3),
        "output": noun(
            "Output", o=torch.empty_like(problem.q), lse=torch.empty(1, 4, 40).double()
        ),
    }  # fmt: skip
    _C.attention_forward(**all_made(_C, good))

    def message(path: str, value: Any) -> str:
        with pytest.raises(ValueError) as info:
            _C.attention_forward(**all_made(_C, with_other(good, path, value)))
        return str(info.value)

    q, k = problem.q, problem.k
    cases = [
        ("chunk.q", q[0], "q: expected 4 dimensions, got 3"),
        ("chunk.v", 3, "v: expected a tensor, got int"),
        ("chunk.v", problem.v.float(), "v: expected float64, got float32"),
        ("chunk.q", q.to(torch.int32), "q: expected float64, float32, float16 or"),
        ("chunk.v", problem.v[:, :, 1:], "v: expected shape [1, 2, 40, 16], got [1, 2, 39, 16]"),
        (
            "chunk.k",
            k.transpose(2, 3).contiguous().transpose(2, 3),
            "k: expected a contiguous last dimension",
        ),
        ("chunk.q", q[:, :3], "q: expected heads in groups for 2 kv heads, got 3"),
        ("output.lse", torch.empty(1, 4, 40), "lse: expected float64, got float32"),
        (
            "output.lse",
            problem.block_table[None],
            "lse: expected float32 or float64, got int32",
        ),
        ("output.o", q[:, 1:], "o: expected shape [1, 4, 40, 16], got [1, 3, 40, 16]"),
        ("past.page_size", 0, "page_size: expected 1 to 2^30 tokens, got 0"),
        ("wave.end", 4, "wave: expected a range within 3 past pages, got 0, 4"),
        ("wave.begin", 4, "begin, end: expected a range of pages, got 4, 3"),
        (
            "past.block_table",
            problem.block_table.long(),
            "block_table: expected int32, got another type",
        ),
        ("past.block_table", None, "block_table: expected entries of 3 pages, got 0"),
        (
            "past.selection",
            torch.empty(1, 3, 1, 0, dtype=torch.int32),
            "selection: expected lists of at least 1 entry (-1: no page), got 0",
        ),
        ("chunk.visibility.window", -1, "window: expected 0 or more"),
        ("past.pool", None, "past.pool: expected a PagePool, got None"),
        ("past.pool.slot_bytes", 8, "past.pool: expected slots of at least 8192 bytes"),
        ("past.pool.slot_bytes", -8, "slot_bytes: expected 0 or more, got -8"),
        ("past.pool.num_slots", 0, "past.pool: expected at least 1 slot, got 0"),
        ("past.pool.address", 0, "past.pool: expected an address aligned to elements of 8"),
        ("wave.first", False, "state: expected a SoftmaxState, as there are other waves, got None"),
        (
            "chunk.visibility.num_keys",
            torch.ones(2, dtype=torch.int32),
            "num_keys: expected shape",
        ),
    ]
    for path, value, text in cases:
        assert message(path, value).startswith(text)


def test_nouns_cannot_be_changed() -> None:
    chunk = Problem(Case()).chunk()
    with pytest.raises(AttributeError):
        chunk.q = chunk.k  # type: ignore[misc]
    with pytest.raises(AttributeError):
        chunk.mask = chunk.k  # type: ignore[attr-defined]


def test_a_noun_looks_at_its_tensors_again() -> None:
    """A tensor that was resized meanwhile must not leave a kernel with its old memory."""
    problem = Problem(Case())
    output = _C.Output(o=torch.empty_like(problem.q), lse=torch.empty(1, 4, 40).double())
    past = problem.past()
    problem.block_table.resize_(1, 2)
    with pytest.raises(ValueError, match="^block_table: expected entries of 3 pages, got 2"):
        _C.attention_forward(chunk=problem.chunk(), past=past, output=output)
