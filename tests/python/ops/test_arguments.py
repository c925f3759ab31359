"""What the operations cannot use is refused by name, before anything is allocated or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from oomb import ops
from oomb.ops import attention as attention_module
from oomb.ops import pages as pages_module

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM, PAGE = 2, 4, 2, 24, 16, 8
INT = torch.int32

Changes = dict[str, Any]  # a value, or a function of the good one


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=INT)


def lists(*pages: int, heads: int = 1, blocks: int = 3) -> torch.Tensor:
    return torch.tensor(pages, dtype=INT).repeat(BATCH, blocks, heads, 1)


def good() -> Changes:
    k = torch.randn(BATCH, KV_HEADS, TOKENS, HEAD_DIM)
    return {
        "q": torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM),
        "k": k,
        "v": torch.randn_like(k),
        "kv_pages": ops.pages_like(k, 10, PAGE),
        "dkv_pages": ops.pages_like(k, 10, PAGE),
        "block_table": table([0, 1, 2], [3, 4, 5]),
    }


def changed(arguments: Changes, changes: Changes) -> Changes:
    return arguments | {
        name: change(arguments[name]) if callable(change) else change
        for name, change in changes.items()
    }


ATTENTION: list[tuple[Changes, str]] = [
    ({"q": None}, r"q: expected a tensor \[batch, heads, tokens, head_dim\], got NoneType"),
    ({"q": lambda x: x.numpy()}, "q: expected a tensor .*, got ndarray"),
    ({"q": lambda x: x[0]}, r"q: expected \[batch, heads, tokens, head_dim\], got \[4, 24, 16\]"),
    ({"q": lambda x: x.int()}, "q: expected torch.float64 or .*, got torch.int32"),
    ({"q": lambda x: x.bfloat16()}, "k: expected torch.bfloat16, got torch.float32"),
    ({"q": lambda x: x.transpose(1, 2)}, r"k: expected \[2, kv_heads, 4, 16\], got"),
    ({"q": lambda x: x[:1]}, r"k: expected \[1, kv_heads, 24, 16\], got"),
    ({"q": lambda x: x[:, :3]}, "q: expected heads in groups for 2 kv heads, got 3"),
    ({"q": lambda x: x[..., :0]}, "q: expected a head_dim >= 1, got 0"),
    ({"num_past": 2**63 - 1}, "num_past: expected an int <= 1073741824, got 9223372036854775807"),
    ({"window": 2**63}, "window: expected an int <= 9223372036854775807, got"),
    ({"q": lambda x: x.to("meta")}, "k: expected device meta, got cpu"),
    ({"k": lambda x: x[0]}, r"k: expected \[2, kv_heads, 24, 16\], got \[2, 24, 16\]"),
    ({"k": lambda x: x.repeat(1, 1, 2, 1)}, r"k: expected .*, got \[2, 2, 48, 16\]"),
    ({"v": lambda x: x[:, :1]}, r"v: expected \[2, 2, 24, 16\], got \[2, 1, 24, 16\]"),
    ({"v": lambda x: x.double()}, "v: expected torch.float32, got torch.float64"),
    ({"kv_pages": None}, r"kv_pages: expected a tensor \[slots, 2, 2, page_size, 16\], got None"),
    ({"kv_pages": lambda x: x[0]}, r"kv_pages: expected \[slots, 2, 2, page_size, 16\], got"),
    ({"kv_pages": lambda x: x.bfloat16()}, "kv_pages: expected torch.float32, got torch.bfloat16"),
    ({"kv_pages": lambda x: x.double()}, "kv_pages: expected torch.float32, got torch.float64"),
    ({"kv_pages": lambda x: x.to("meta")}, "kv_pages: expected device cpu, got meta"),
    ({"kv_pages": lambda x: x.mT.contiguous().mT}, "kv_pages: expected a contiguous tensor, got"),
    ({"kv_pages": lambda x: x[:, :, :, :0]}, "kv_pages: expected a page_size >= 1, got 0"),
    ({"kv_pages": lambda x: x[:3]}, r"block_table: expected slots in \[0, 3\), got 0 … 5"),
    ({"kv_pages": lambda x: x.requires_grad_()}, "kv_pages: expected no requires_grad"),
    ({"dkv_pages": lambda x: x.requires_grad_()}, "dkv_pages: expected no requires_grad"),
    ({"dkv_pages": lambda x: x.half()}, "dkv_pages: expected torch.float32 or torch.bfloat16, got"),
    ({"dkv_pages": lambda x: x.double()}, "dkv_pages: expected torch.float32 or .*, got torch.flo"),
    ({"dkv_pages": lambda x: x.repeat(1, 1, 1, 2, 1)}, "dkv_pages: expected page_size 8, got 16"),
    ({"dkv_pages": lambda x: x[:2]}, r"block_table: expected slots in \[-1, 2\), got 0 … 5"),
    ({"block_table": None}, r"block_table: expected a tensor \[2, pages\], got NoneType"),
    ({"block_table": lambda x: x.long()}, "block_table: expected torch.int32, got torch.int64"),
    ({"block_table": lambda x: x[0]}, r"block_table: expected \[2, pages\], got \[3\]"),
    ({"block_table": lambda x: x[:1]}, r"block_table: expected \[2, pages\], got \[1, 3\]"),
    ({"block_table": lambda x: x - 1}, r"block_table: expected slots in \[0, 10\), got -1 … 4"),
    ({"block_table": lambda x: x + 5}, r"block_table: expected slots in \[0, 10\), got 5 … 10"),
    ({"block_table": lambda x: x % 3}, "block_table: expected each slot once, .*, got slot 0 twi"),
    ({"dkv_table": table([0, 1, 2])}, r"dkv_table: expected \[2, pages\], got \[1, 3\]"),
    ({"dkv_table": table([0], [1])}, r"dkv_table: expected \[2, 3\], got \[2, 1\]"),
    ({"dkv_table": table([0, 1, 2], [3, 4, 10])}, r"dkv_table: expected slots in \[-1, 10\), got"),
    ({"dkv_table": table([0, 1, 2], [3, 4, 2])}, "dkv_table: expected each slot once, .* slot 2"),
    (
        {"dkv_pages": None, "dkv_table": table([0, 1, 2], [3, 4, 5])},
        "dkv_table: expected None without dkv_pages, got a tensor",
    ),
    ({"num_past": -1}, "num_past: expected an int >= 0, got -1"),
    ({"num_past": 8.0}, "num_past: expected an int >= 0, got 8.0"),
    ({"num_past": "8"}, "num_past: expected an int >= 0, got '8'"),
    ({"num_past": 25}, r"block_table: expected \[batch, >= 4\] for num_past 25, got \[2, 3\]"),
    ({"scale": "x"}, "scale: expected a finite number, got 'x'"),
    ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
    ({"scale": 10**400}, "scale: expected a finite number, got 1000"),
    ({"softcap": 10**400}, r"softcap: expected a number of 1e-30 \.\. 1e\+30 or None, got 1000"),
    ({"softcap": 0}, r"softcap: expected a number of 1e-30 \.\. 1e\+30 or None, got 0"),
    ({"softcap": -1.5}, r"softcap: expected a number of 1e-30 \.\. 1e\+30 or None, got -1.5"),
    ({"softcap": True}, r"softcap: expected a number of 1e-30 \.\. 1e\+30 or None, got True"),
    ({"softcap": 1e-31}, r"softcap: expected a number of 1e-30 \.\. 1e\+30 or None, got 1e-31"),
    ({"softcap": 1e31}, r"softcap: expected a number of 1e-30 \.\. 1e\+30 or None, got 1e\+31"),
    (
        {"softcap": float("inf")},
        r"softcap: expected a number of 1e-30 \.\. 1e\+30 or None, got inf",
    ),
    ({"window": -1}, "window: expected an int >= 0, got -1"),
    ({"window": None}, "window: expected an int >= 0, got None"),
    ({"selection": [[0]]}, r"selection: expected a tensor \[2, 3, heads, budget\], got list"),
    ({"selection": lists(0, 1).long()}, "selection: expected torch.int32, got torch.int64"),
    ({"selection": lists(0, 1, blocks=2)}, r"selection: expected \[2, 3, heads, budget\], got"),
    ({"selection": lists(0, 1, heads=4)}, "selection: expected 1 or 2 heads, got 4"),
    ({"selection": lists()}, "selection: expected lists of at least 1 entry"),
    ({"selection": lists(1, 0)}, "selection: expected ascending pages, -1 padded, got"),
    ({"selection": lists(1, 1)}, "selection: expected ascending pages, -1 padded, got"),
    ({"selection": lists(0, -1, 2)}, "selection: expected ascending pages, -1 padded, got"),
    ({"selection": lists(2, -1, 2)}, "selection: expected ascending pages, -1 padded, got"),
    ({"selection": lists(-1, 0)}, "selection: expected ascending pages, -1 padded, got"),
    ({"selection": lists(0, 3)}, "selection: expected past pages below 3, got 3"),
    ({"first_key": torch.zeros(2, 3, dtype=INT)}, r"first_key: expected \[2, 24\], got \[2, 3\]"),
    ({"first_key": torch.zeros(2, 24)}, "first_key: expected torch.int32, got torch.float32"),
    ({"num_keys": [3, 3]}, r"num_keys: expected a tensor \[2\], got list"),
    ({"num_keys": table([3, 49])[0]}, r"num_keys: expected numbers in \[0, 49\), got 3 … 49"),
    ({"deterministic": "no"}, "deterministic: expected a bool, got 'no'"),
]


@pytest.mark.parametrize(("changes", "text"), ATTENTION)
def test_attention(changes: Changes, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        ops.paged_attention(**changed(good(), changes))


def test_gradients_in_the_pages_that_are_read() -> None:
    arguments = good()
    arguments["dkv_pages"] = arguments["kv_pages"]
    with pytest.raises(ValueError, match="^dkv_pages: expected other pages than those with keys"):
        ops.paged_attention(**arguments)
    # The same pool is one for both where the slots are others.
    arguments["kv_pages"] = arguments["dkv_pages"] = ops.pages_like(arguments["k"], 12, PAGE)
    ops.paged_attention(**arguments, dkv_table=table([6, 7, 8], [9, 10, 11]))


@pytest.mark.parametrize(
    ("keys", "gradients", "first", "meets"),
    [
        (torch.float32, torch.float32, 9, True),
        (torch.float32, torch.float32, 8, False),
        (torch.bfloat16, torch.float32, 8, True),  # a slot of gradients takes those of two pages
        (torch.bfloat16, torch.float32, 6, False),
        (torch.float32, torch.bfloat16, 9.5, True),  # and here a page's those of two gradients
        (torch.float32, torch.bfloat16, 8.5, False),
        (torch.float32, torch.bfloat16, 10, False),
    ],
)
def test_gradients_in_views_of_the_pages_that_are_read(
    keys: torch.dtype, gradients: torch.dtype, first: float, meets: bool
) -> None:
    """Slots 1 to 5 and 9 are read, and one is written that begins where slot ``first`` does."""
    arguments = good()
    arguments |= {name: arguments[name].to(keys) for name in ("q", "k", "v")}
    pool = arguments["kv_pages"] = ops.pages_like(arguments["k"], 12, PAGE)
    values = pool.view(gradients).flatten()
    view = values[int(first * values.numel() / 12) :]
    of_slot = pool[0].numel()
    view = view[: view.numel() // of_slot * of_slot].view(-1, *pool.shape[1:])
    arguments |= {"dkv_pages": view, "block_table": table([9, 1, 2], [3, 4, 5])}
    arguments["dkv_table"] = table([0, -1, -1], [-1, -1, -1])
    if not meets:
        ops.paged_attention(**arguments)
        return
    with pytest.raises(ValueError, match="^dkv_pages: expected other pages than those with keys"):
        ops.paged_attention(**arguments)


def test_pages_may_be_shared_where_no_gradient_is_added() -> None:
    shared = table([0, 1, 2], [0, 1, 3])
    arguments = good() | {"block_table": shared}
    arguments["dkv_table"] = table([0, 1, 2], [3, 4, 5])
    ops.paged_attention(**arguments)
    del arguments["dkv_table"]
    ops.paged_attention(**arguments | {"dkv_pages": None})


WRITE: list[tuple[Changes, str]] = [
    ({"k": None}, r"k: expected a tensor \[batch, kv_heads, tokens, head_dim\], got NoneType"),
    ({"k": lambda x: x[0]}, r"k: expected \[batch, kv_heads, tokens, head_dim\], got"),
    ({"v": lambda x: x[:, :1]}, r"v: expected \[2, 2, 24, 16\], got \[2, 1, 24, 16\]"),
    ({"v": lambda x: x.half()}, "v: expected torch.float32, got torch.float16"),
    ({"kv_pages": lambda x: x.double()}, "kv_pages: expected torch.float32, got torch.float64"),
    ({"kv_pages": lambda x: x[:, :1]}, r"kv_pages: expected \[slots, 2, 2, page_size, 16\], got"),
    ({"kv_pages": lambda x: x.requires_grad_()}, "kv_pages: expected no requires_grad, as no"),
    (
        {"summary": torch.zeros(2, 3, 2, 16, requires_grad=True)},
        "summary: expected no requires_grad, as no gradient reaches it, got a tensor with it",
    ),
    ({"slots": lambda x: x.long()}, "slots: expected torch.int32, got torch.int64"),
    ({"slots": lambda x: x[:, :2]}, r"slots: expected \[2, 3\], got \[2, 2\]"),
    ({"slots": lambda x: x + 5}, r"slots: expected slots in \[-1, 10\), got 5 … 10"),
    ({"slots": lambda x: x % 4}, "slots: expected each slot once, .*, got slot 0 twice"),
    ({"num_rows": [1, 2]}, r"num_rows: expected a tensor \[2\], got list"),
    ({"num_rows": table([1])[0]}, r"num_rows: expected \[2\], got \[1\]"),
    ({"num_rows": table([1, 25])[0]}, r"num_rows: expected numbers in \[0, 25\), got 1 … 25"),
    ({"summary": torch.zeros(2, 3, 2, 8)}, "summary: expected \\[2, 3, 2, 16\\], got"),
    (
        {"summary": torch.zeros(2, 3, 2, 16).double()},
        "summary: expected torch.float32, got torch.float64",
    ),
]


@pytest.mark.parametrize(("changes", "text"), WRITE)
def test_writing(changes: Changes, text: str) -> None:
    arguments = good()
    arguments = {name: arguments[name] for name in ("k", "v", "kv_pages")} | {
        "slots": arguments["block_table"]
    }
    with pytest.raises(ValueError, match=f"^{text}"):
        ops.page_write(**changed(arguments, changes))
    assert not arguments["kv_pages"].any()


def test_what_is_known_to_be_right_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object, **__: object) -> None:
        raise AssertionError("values were read")

    arguments = good()
    k, v, pages, slots = (arguments[n] for n in ("k", "v", "kv_pages", "block_table"))
    arguments |= {"selection": lists(0, 1), "dkv_table": table([6, 7, 8], [9, -1, -1])}
    arguments["num_keys"] = table([48, 40])[0]

    def write_and_attend(**options: bool) -> None:
        ops.page_write(k, v, pages, slots, num_rows=table([24, 20])[0], **options)
        ops.paged_attention(**arguments | {"dkv_pages": pages}, **options)

    for module, name in (
        (pages_module, "check_slots"),
        (pages_module, "check_once"),
        (pages_module, "check_range"),
        (attention_module, "check_slots"),
        (attention_module, "check_once"),
        (attention_module, "check_range"),
        (attention_module, "_check_selection"),
        (attention_module, "_meet"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, look)
            write_and_attend(check=False)
            with pytest.raises(AssertionError, match="^values were read"):
                write_and_attend()


def test_the_first_chunk_of_a_loop_has_no_pages_to_choose() -> None:
    arguments = good() | {"block_table": table([], [])}
    scores = ops.page_scores(arguments["q"], torch.zeros(BATCH, 0, KV_HEADS, HEAD_DIM), 0, PAGE)
    found = ops.paged_attention(**arguments, num_past=0, selection=ops.page_select(scores, 4))
    for one, other in zip(found, ops.paged_attention(**arguments, num_past=0), strict=True):
        assert torch.equal(one, other)


def test_a_pool_may_be_empty() -> None:
    arguments = good() | {"block_table": table([], []), "dkv_pages": None}
    expected = ops.paged_attention(**arguments)
    arguments["kv_pages"] = ops.pages_like(arguments["k"], 0, PAGE)
    arguments["dkv_pages"] = ops.pages_like(arguments["k"], 0, PAGE)
    query = arguments["q"].requires_grad_()
    found = ops.paged_attention(**arguments)
    found[0].sum().backward()
    assert torch.equal(found[0], expected[0]) and query.grad is not None


def test_numbers_may_be_numpys() -> None:
    arguments = good()
    expected = ops.paged_attention(**arguments, num_past=20, window=5, scale=0.25)[0]
    numbers = {"num_past": np.int64(20), "window": np.int32(5), "scale": np.float32(0.25)}
    assert torch.equal(ops.paged_attention(**arguments, **numbers)[0], expected)  # type: ignore[arg-type]
    assert ops.pages_like(arguments["k"], np.int64(3), PAGE).shape[0] == 3  # type: ignore[arg-type]


def test_what_lies_behind_the_past_is_not_looked_at() -> None:
    arguments = good() | {"block_table": table([0, 1, 99], [3, 4, 99]), "num_past": 2 * PAGE}
    for chosen in (None, lists(0, 1)):
        ops.paged_attention(**arguments, selection=chosen)


def test_pages_of_padding_may_share_a_slot() -> None:
    arguments = good() | {"block_table": table([0, 1, 2], [3, 4, 4])}
    arguments["num_keys"] = table([48, 16])[0]
    with pytest.raises(ValueError, match="slot 4 twice; give -1 in dkv_table"):
        ops.paged_attention(**arguments)
    ops.paged_attention(**arguments, dkv_table=table([0, 1, 2], [3, 4, -1]))


ROWS, SUMMARY = torch.randn(2, 4, 24, 16), torch.randn(2, 3, 2, 16)
SCORES = torch.randn(2, 3, 1, 5)

OTHERS: list[tuple[Callable[[], object], str]] = [
    (lambda: ops.pages_like(ROWS[0], 3, 8), r"k: expected \[batch, kv_heads, tokens, head_dim\]"),
    (lambda: ops.pages_like(ROWS, -3, 8), "num_pages: expected an int >= 0, got -3"),
    (lambda: ops.pages_like(ROWS, 3, 0), "page_size: expected an int >= 1, got 0"),
    (lambda: ops.pages_like(ROWS, 3.0, 8), "num_pages: expected an int >= 0, got 3.0"),  # type: ignore[arg-type]
    (lambda: ops.pages_like(ROWS, 3, 8, dtype="float32"), "dtype: expected .*, got 'float32'"),  # type: ignore[arg-type]
    (
        lambda: ops.page_write(
            ROWS, ROWS, ops.pages_like(ROWS, 6, 8), table([0, 1, 2], [3, 4, 5]), summary=SUMMARY
        ),
        r"summary: expected \[2, 3, 4, 16\], got \[2, 3, 2, 16\]",
    ),
    (
        lambda: ops.page_write(
            ROWS,
            ROWS,
            ops.pages_like(ROWS, 6, 8),
            table([0, 1, 2], [3, 4, 5]),
            summary=[1],  # type: ignore[arg-type]
        ),
        r"summary: expected a tensor .*, got list",
    ),
    (lambda: ops.page_scores(ROWS[0], SUMMARY, 24, 8), r"q: expected \[batch, heads, tokens"),
    (lambda: ops.page_scores(ROWS, SUMMARY[0], 24, 8), r"summary: expected \[2, pages, kv_heads"),
    (
        lambda: ops.page_scores(ROWS, SUMMARY.double(), 24, 8),
        "summary: expected torch.float32, got",
    ),
    (lambda: ops.page_scores(ROWS, SUMMARY, 2**62, 1), "num_past: expected an int <= 1073741824"),
    (lambda: ops.page_scores(ROWS, SUMMARY, 24, 2**62), "page_size: expected an int <= 1073741824"),
    (
        lambda: ops.page_scores(ROWS, SUMMARY[:, :, :0], 24, 8),
        "k: expected at least 1 kv head, got",
    ),
    # A division by zero, which ended the process.
    (
        lambda: ops.page_scores(ROWS[:, :1, :8, :0], SUMMARY[:, :1, :1, :0], 8, 8),
        "head_dim: expected at least 1, got 0",
    ),
    (
        lambda: ops.page_write(
            ROWS[..., :0],
            ROWS[..., :0],
            ops.pages_like(ROWS[..., :0], 6, 8),
            table([0, 1, 2], [3, 4, 5]),
            summary=torch.zeros(2, 3, ROWS.shape[1], 0),
        ),
        "head_dim: expected at least 1, got 0",
    ),
    (lambda: ops.page_scores(ROWS, SUMMARY, 25, 8), "summary: expected rows of 4 pages, got 3"),
    (lambda: ops.page_scores(ROWS, SUMMARY, -24, 8), "num_past: expected an int >= 0, got -24"),
    (lambda: ops.page_scores(ROWS, SUMMARY, 24, 0), "page_size: expected an int >= 1, got 0"),
    (lambda: ops.page_scores(ROWS, SUMMARY, 24, 8, score="mean"), "score: expected 'block_mean'"),
    (lambda: ops.page_scores(ROWS, SUMMARY, 24, 8, share="head"), "share: expected 'all_heads'"),
    (
        lambda: ops.page_scores(ROWS, SUMMARY, 24, 8, num_keys=table([1])[0]),
        r"num_keys: expected \[2\], got \[1\]",
    ),
    (lambda: ops.page_select(SCORES[0], 2), r"scores: expected \[batch, blocks, heads, pages\]"),
    (lambda: ops.page_select(SCORES.int(), 2), "scores: expected torch.float32 or torch.float64"),
    (lambda: ops.page_select(SCORES, 0), "budget: expected an int >= 1, got 0"),
    (lambda: ops.page_select(SCORES, "2"), "budget: expected an int >= 1, got '2'"),  # type: ignore[arg-type]
    (lambda: ops.page_select(SCORES, 2, sink_pages=-1), "sink_pages: expected an int >= 0, got -1"),
    (
        lambda: ops.page_select(SCORES, 2, sink_pages=2, recent_pages=1),
        r"sink_pages \+ recent_pages: expected <= budget 2, got 3",
    ),
]


@pytest.mark.parametrize(("call", "text"), OTHERS)
def test_the_others(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        call()
