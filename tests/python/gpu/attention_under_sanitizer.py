"""What compute-sanitizer watches: small attention problems of one implementation.

Usage: attention_under_sanitizer.py sm90|sm80|sm80-small|plain|pages|beyond

Every tensor has memory of its own (no caching allocator), so that one byte too far is noticed.
"""

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from attention_case import Case, Problem
from test_page_ops import test_page_gradient_read as page_gradient_read
from test_page_ops import test_page_score as page_score
from test_page_ops import test_page_select as page_select
from test_page_ops import test_page_write as page_write

from oomb import _C

FP32, BF16 = torch.float32, torch.bfloat16


def play(case: Case, borders: tuple[int, ...] = ()) -> None:
    for name, value in Problem(case).run(borders).tensors().items():
        assert not value.isnan().any(), f"{name} has NaN: {case}"


def tensor_cores(head_dims: tuple[int, int]) -> None:
    """Tails of chunk and past, lists, both gradient types and orders; then masks and waves."""
    for head_dim, page_size in zip(head_dims, (64, 128), strict=True):
        tail = 2 * page_size + 17
        for lists, dkv_dtype in (("dense", FP32), ("shared", BF16), ("per_head", FP32)):
            for deterministic in (True, False):
                play(
                    Case(
                        head_dim=head_dim,
                        page_size=page_size,
                        chunk=150,
                        past=tail,
                        kv_heads=2,
                        group=3,
                        lists=lists,
                        budget=2,
                        dkv_dtype=dkv_dtype,
                        deterministic=deterministic,
                    )
                )
    for page_size in (64, 128):
        limits = dict(page_size=page_size, chunk=77, past=3 * page_size + 5, group=1, batch=2)
        limits["head_dim"] = head_dims[1]
        play(Case(**limits, window=100), (2,))
        play(Case(**limits, documents=True, padding=True, dkv_dtype=BF16), (0, 2))
        play(Case(**limits, lists="per_head", window=150, packed=True), (2,))


def parted() -> None:
    """More tiles of queries than run at once."""
    play(Case(chunk=10, past=20 * 128, group=150, kv_heads=2))


def plain() -> None:
    for dtype, dkv_dtype in ((torch.float64, torch.float64), (BF16, BF16)):
        for lists in ("dense", "per_head"):
            play(
                Case(
                    head_dim=40,
                    page_size=24,
                    chunk=50,
                    past=60,
                    lists=lists,
                    budget=2,
                    window=70,
                    dtype=dtype,
                    dkv_dtype=dkv_dtype,
                ),
                (2,),
            )


def pages() -> None:
    page_write(64, 64, BF16, True)
    page_write(5, 7, FP32, True)
    page_gradient_read(BF16, FP32)
    page_gradient_read(FP32, BF16)
    for kind in ("block_mean", "token_softmax"):
        page_score(64, 64, BF16, kind, "padding", True)
        page_score(33, 20, FP32, kind, "documents", False)
    page_select(1000, 64, FP32, 2, 3)


def beyond() -> None:
    """Reads a page behind the end of the pool: an error that has to be found.

    By the plain kernels; Hopper's own refuse such a slot themselves.
    """
    case = Case(head_dim=64, page_size=64, kv_heads=1, group=1, chunk=10, past=64)
    problem = Problem(case, spare_slots=1)
    problem.pool = problem.pool[:1].clone()
    problem.block_table.fill_(1)
    problem.forward()


which = sys.argv[1]
TENSOR_CORES = {"sm90": (64, 128), "sm80": (64, 128), "sm80-small": (256, 512)}
if which in (*TENSOR_CORES, "plain"):
    _C.force_attention(which)
if which == "beyond":
    _C.force_attention("plain")
if which in TENSOR_CORES:
    tensor_cores(TENSOR_CORES[which])
if which == "sm80":
    parted()
if which in ("plain", "pages", "beyond"):
    {"plain": plain, "pages": pages, "beyond": beyond}[which]()
torch.cuda.synchronize()
print(f"{which}: all played")
