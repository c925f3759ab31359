"""Typed surface of the native core; the functions are defined in csrc/bindings."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

class BuildInfo(TypedDict):
    version: str
    compiler: str
    build_type: str
    cuda: bool
    cuda_compiler: str
    cuda_architectures: list[str]

class Device(TypedDict):
    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    problem: str

class CudaStatus(TypedDict):
    built: bool
    runtime_version: int
    driver_version: int
    devices: list[Device]
    problem: str

def build_info() -> BuildInfo: ...
def cuda_status() -> CudaStatus: ...

class PageStatistics(TypedDict):
    device_peak_bytes: int
    host_peak_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    exposed_copy_seconds: float
    hits: int
    misses: int

class PageManager:
    """Keeps a call's KV and gradient pages in two tiers; see csrc/paging/page_manager.h."""

    def __init__(
        self,
        *,
        device: str,
        slot_bytes: int,
        device_slots: int,
        host_slots: int,
        copy_delay_seed: int | None = None,
        shuffle_seed: int | None = None,
        disabled_wait: str | None = None,
        poison: bool = False,
    ) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def device_slots(self) -> int: ...
    def begin_call(
        self,
        *,
        num_layers: int,
        pages_per_sequence: Sequence[int],
        grad_slots: int,
        visits: NDArray[np.int32],
        exact: bool = True,
    ) -> None: ...
    def set_visit_pages(self, visit: int, pages: NDArray[np.int64]) -> None: ...
    def end_call(self) -> None: ...
    def close(self) -> None: ...
    def pool_address(self) -> int: ...
    def block_table(self, layer: int) -> NDArray[np.int32]: ...
    def gradient_table(self, layer: int) -> NDArray[np.int32]: ...
    def max_create(self, layer: int = 0) -> int: ...
    def max_gradients(self, layer: int = 0) -> int: ...
    def create(self, layer: int, page_begin: int, page_end: int, stream: int = 0) -> None: ...
    def commit(self, layer: int, page_begin: int, page_end: int, stream: int = 0) -> None: ...
    def create_gradients(self, layer: int, page_begin: int, page_end: int) -> None: ...
    def waves(
        self,
        visit: int,
        page_begin: int,
        page_end: int,
        pages: NDArray[np.int64] | None = None,
    ) -> list[tuple[int, int]]: ...
    def acquire(
        self,
        visit: int,
        begin: int,
        end: int,
        pages: NDArray[np.int64] | None = None,
        stream: int = 0,
    ) -> None: ...
    def release(
        self,
        visit: int,
        begin: int,
        end: int,
        pages: NDArray[np.int64] | None = None,
        stream: int = 0,
    ) -> None: ...
    def acquire_gradients(
        self, layer: int, page_begin: int, page_end: int, stream: int = 0
    ) -> None: ...
    def drop(
        self,
        layer: int,
        page_begin: int,
        page_end: int,
        kv: bool = True,
        grads: bool = True,
        stream: int = 0,
    ) -> None: ...
    def stats(self) -> PageStatistics: ...
    def snapshot(self) -> str: ...
    def check_integrity(self) -> None: ...

def smallest_device_slots(*, batch: int, grad_slots: int, backward: bool) -> int: ...
def page_waits() -> list[str]: ...
