"""Products leave multiprocessors for a time: what was there before comes back, whatever fails."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oomb.parallel import product_processors
from oomb.parallel.product_processors import leave_processors

DEVICE = torch.device("cuda", 0)


class OtherCublas:
    """Targets of handles in the place of the library's."""

    def __init__(self) -> None:
        self.targets: dict[int, int] = {}

    def cublasGetSmCountTarget(self, handle: ctypes.c_void_p, target: Any) -> int:
        assert handle.value is not None
        target._obj.value = self.targets.get(handle.value, 0)
        return 0

    def cublasSetSmCountTarget(self, handle: ctypes.c_void_p, target: ctypes.c_int) -> int:
        assert handle.value is not None
        self.targets[handle.value] = target.value
        return 0


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> OtherCublas:
    library = OtherCublas()
    monkeypatch.setattr(product_processors, "_cublas", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 7)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return library


def test_one_inside_another(cublas: OtherCublas) -> None:
    outer = leave_processors(DEVICE)
    inner = leave_processors(DEVICE)
    assert cublas.targets == {7: 124}
    inner()
    assert cublas.targets == {7: 124}
    outer()
    assert cublas.targets == {7: 0}


def test_it_ends_for_the_thread_that_began_it(
    cublas: OtherCublas, monkeypatch: pytest.MonkeyPatch
) -> None:
    cublas.targets[7] = 100  # the user's
    take_back = leave_processors(DEVICE)
    assert cublas.targets == {7: 100}
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 8)  # of another thread
    take_back()
    assert cublas.targets == {7: 100}


@pytest.mark.parametrize(("count", "left"), [(132, 8), (114, 7), (16, 1), (14, 1)])
def test_small_gpus_leave_less(count: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert product_processors.processors_left(DEVICE) == left


def test_without_the_library_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert product_processors._cublas.__wrapped__() is None
    monkeypatch.setattr(product_processors, "_cublas", lambda: None)
    leave_processors(DEVICE)()
