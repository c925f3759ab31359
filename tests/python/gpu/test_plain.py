"""The kernels for any CUDA GPU, any head dim and any page size, forced."""

from collections.abc import Iterator

import pytest
import torch
from attention_case import Case, Problem, check, check_bits

from oomb import _C

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    _C.force_attention("plain")
    yield
    _C.force_attention(None)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    return FP64 if dtype == FP64 else FP32


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
@pytest.mark.parametrize("head_dim", [1, 16, 80, 96, 128, 131, 256])
def test_head_dims(head_dim: int, lists: str, dtype: torch.dtype) -> None:
    check(
        Case(
            head_dim=head_dim,
            page_size=32,
            chunk=75,
            past=170,
            batch=2,
            lists=lists,
            dtype=dtype,
            dkv_dtype=gradient_dtype(dtype),
        )
    )


@pytest.mark.parametrize("dtype", [FP64, FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "per_head"])
@pytest.mark.parametrize("softcap", [1.0, 50.0])
def test_soft_caps(softcap: float, lists: str, dtype: torch.dtype) -> None:
    check(
        Case(
            head_dim=80,
            page_size=32,
            chunk=75,
            past=170,
            batch=2,
            window=100,
            lists=lists,
            dtype=dtype,
            dkv_dtype=gradient_dtype(dtype),
            softcap=softcap,
        )
    )


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "per_head"])
@pytest.mark.parametrize("head_dim", [264, 512])
def test_wide_heads(head_dim: int, lists: str, dtype: torch.dtype) -> None:
    """Gemma 4's global layers."""
    check(
        Case(
            head_dim=head_dim,
            page_size=64,
            chunk=75,
            past=170,
            batch=2,
            lists=lists,
            dtype=dtype,
            dkv_dtype=gradient_dtype(dtype),
        )
    )


@pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 16, 48, 100, 128])
def test_page_sizes(page_size: int, dtype: torch.dtype) -> None:
    for lists in ("dense", "per_head"):
        check(
            Case(
                head_dim=24,
                page_size=page_size,
                chunk=110,
                past=3 * page_size + page_size // 2,
                lists=lists,
                budget=2,
                dtype=dtype,
                dkv_dtype=gradient_dtype(dtype),
            )
        )


@pytest.mark.parametrize(
    "limits",
    [
        dict(window=1),
        dict(window=50),
        dict(documents=True),
        dict(padding=True),
        dict(documents=True, padding=True, window=90),
    ],
    ids=str,
)
@pytest.mark.parametrize("lists", ["dense", "shared"])
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
def test_masks(dtype: torch.dtype, lists: str, limits: dict[str, int]) -> None:
    check(
        Case(
            head_dim=40,
            page_size=24,
            chunk=130,
            past=7 * 24 + 5,
            batch=2,
            lists=lists,
            dtype=dtype,
            dkv_dtype=gradient_dtype(dtype),
            **limits,  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("lists", ["dense", "shared", "per_head"])
def test_bits(lists: str, dtype: torch.dtype) -> None:
    case = Case(
        head_dim=72,
        page_size=40,
        chunk=130,
        past=11 * 40 + 5,
        batch=2,
        lists=lists,
        budget=6,
        documents=True,
        dtype=dtype,
        dkv_dtype=FP64 if dtype == FP64 else BF16,
    )
    for borders in [(0,), (1,), (3, 4), (2, 2, 11)]:
        check_bits(case, borders)


def test_pools_past_two_to_the_31_elements() -> None:
    problem = Problem(Case(chunk=64, past=300, page_size=96))
    expected = problem.run().tensors()
    problem.move_apart(9 * 2**30)
    for name, value in problem.run().tensors().items():
        assert torch.equal(value, expected[name]), name
