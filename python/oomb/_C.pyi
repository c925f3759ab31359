"""Typed surface of the native core; ``help(oomb._C.PageManager)`` shows its page manager at work.

Checked are sizes, types, layouts and devices of all tensors, and on the CPU every entry of a
table that is used (slots, block_table, dkv_table, selection): what does not fit is a
``ValueError`` that names the argument, and no memory is touched. Trusted is what the host
cannot see:

- addresses: a pool of ``kv_num_slots`` slots of ``kv_slot_bytes`` lies at ``kv_pool``, one of
  ``dkv_num_units`` units of ``dkv_unit_bytes`` at ``dkv_pool``; both live until kernels end;
- on a GPU the entries of tables, as reading them would wait for it, and ``stream``, a handle;
- that a place that is written or added to is named once, and that nobody else uses tensors and
  pages at the same time.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
    h2d_seconds: float
    d2h_seconds: float
    loaded_runs: int  # stretches of neighbouring host slots of all batches
    stored_runs: int
    exposed_copy_seconds: float
    exposed_growth_seconds: float
    hits: int
    misses: int

class PageManager:
    """Keeps the pages of a call in two tiers; help() has the steps of a call and an example.

    Used from one thread at a time. Ranges, visits and steps out of order are refused; ``stream`` is
    trusted to be a handle of the device's, and tables are not to be written to.
    """

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
        explicit_host_memory: bool = False,
        dry: bool = False,
        map_device_memory: bool = True,
    ) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def device_slots(self) -> int: ...
    @property
    def device_capacity(self) -> int: ...
    @property
    def keeps_device_memory(self) -> bool: ...
    def begin_call(
        self,
        *,
        num_layers: int,
        pages_per_sequence: Sequence[int],
        grad_slots: int,
        visits: NDArray[np.int32],
        exact: bool = True,
        wave_pages: int = 1,
        device_slots: int | None = None,
        outputs: int = 0,
    ) -> None: ...
    def set_visit_pages(self, visit: int, pages: NDArray[np.int64]) -> None: ...
    def end_call(self) -> None: ...
    def close(self) -> None: ...
    def pool_address(self) -> int: ...
    def block_table(self, layer: int) -> Any: ...  # NumPy array on the CPU, DLPack capsule on a GPU
    def gradient_table(self, layer: int) -> Any: ...
    def max_create(self, layer: int = 0) -> int: ...
    def max_gradients(self, layer: int = 0) -> int: ...
    def max_outputs(self) -> int: ...
    def write_output(
        self, *, layer: int, begin: int, end: int, source: int, num_bytes: int, stream: int = 0
    ) -> None: ...  # source: an address that kernels can read, of num_bytes bytes; trusted
    def read_output(
        self, *, visit: int, begin: int, end: int, target: int, num_bytes: int, stream: int = 0
    ) -> None: ...  # target: likewise, to write to
    def create(self, layer: int, page_begin: int, page_end: int, stream: int = 0) -> None: ...
    def commit(self, layer: int, page_begin: int, page_end: int, stream: int = 0) -> None: ...
    def create_gradients(self, layer: int, page_begin: int, page_end: int) -> None: ...
    def waves(self, visit: int) -> list[tuple[int, int]]: ...
    def own_alone(self, visit: int, begin: int, end: int) -> bool: ...
    def acquire(self, visit: int, begin: int, end: int, stream: int = 0) -> None: ...
    def release(self, visit: int, begin: int, end: int, stream: int = 0) -> None: ...
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
    def waits(self) -> NDArray[np.float64]: ...  # [2, visits]: for loads, for stores
    def snapshot(self) -> str: ...
    def check_integrity(self) -> None: ...

def smallest_device_slots(
    *, batch: int, grad_slots: int, backward: bool, wave_pages: int = 1
) -> int: ...
def page_waits() -> list[str]: ...
def fail_cuda_call(k: int) -> None: ...  # CUDA builds; tests
def cuda_calls_made() -> int: ...
def copy_mapped(*, source: int, destination: int, words: int, stream: int) -> None: ...
def attention_forward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor | None,
    lse: Tensor | None,
    scale: float,
    page_size: int,
    window: int = 0,
    first_key: Tensor | None = None,
    num_keys: Tensor | None = None,
    kv_pool: int = 0,
    kv_slot_bytes: int = 0,
    kv_num_slots: int = 0,
    block_table: Tensor | None = None,
    num_past: int = 0,
    page_begin: int = 0,
    page_end: int = 0,
    selection: Tensor | None = None,
    own_chunk: bool = True,
    first_wave: bool = True,
    last_wave: bool = True,
    acc: Tensor | None = None,
    max: Tensor | None = None,
    sum: Tensor | None = None,
    workspace: Tensor | Callable[[int], Tensor] | None = None,
    stream: int = 0,
) -> None: ...
def attention_backward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    delta: Tensor,
    scale: float,
    page_size: int,
    d_lse: Tensor | None = None,
    window: int = 0,
    first_key: Tensor | None = None,
    num_keys: Tensor | None = None,
    kv_pool: int = 0,
    kv_slot_bytes: int = 0,
    kv_num_slots: int = 0,
    block_table: Tensor | None = None,
    num_past: int = 0,
    page_begin: int = 0,
    page_end: int = 0,
    selection: Tensor | None = None,
    own_chunk: bool = True,
    first_wave: bool = True,
    last_wave: bool = True,
    dkv_pool: int = 0,
    dkv_unit_bytes: int = 0,
    dkv_num_units: int = 0,
    dkv_table: Tensor | None = None,
    dkv_dtype: str = "float32",
    rounding_seed: int = 0,
    deterministic: bool = True,
    dq_acc: Tensor | None = None,
    workspace: Tensor | Callable[[int], Tensor] | None = None,
    stream: int = 0,
) -> None: ...
def page_write(
    *,
    k: Tensor,
    v: Tensor,
    kv_pool: int,
    kv_slot_bytes: int,
    kv_num_slots: int,
    slots: Tensor,
    page_begin: int,
    page_end: int,
    page_size: int,
    num_rows: Tensor | None = None,
    summary: Tensor | None = None,
    stream: int = 0,
) -> None: ...
def page_gradient_read(
    *,
    dk: Tensor,
    dv: Tensor,
    dkv_pool: int,
    dkv_unit_bytes: int,
    dkv_num_units: int,
    dkv_table: Tensor,
    dkv_dtype: str,
    page_begin: int,
    page_end: int,
    page_size: int,
    scale: float = 1.0,
    stream: int = 0,
) -> None: ...
def page_score(
    *,
    q: Tensor,
    summary: Tensor,
    scores: Tensor,
    kind: str,
    num_past: int,
    page_size: int,
    first_key: Tensor | None = None,
    num_keys: Tensor | None = None,
    workspace: Tensor | Callable[[int], Tensor] | None = None,
    stream: int = 0,
) -> None: ...
def page_select(
    *,
    scores: Tensor,
    selection: Tensor,
    budget: int,
    sink_pages: int = 0,
    recent_pages: int = 0,
    stream: int = 0,
) -> None: ...
def force_attention(implementation: str | None) -> None: ...
def attention_key_tile() -> int: ...
def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
def cpu_instruction_set() -> str: ...

class PageCopier:  # CUDA builds; for bench/page_copy.py
    def __init__(
        self,
        *,
        device: int,
        slot_bytes: int,
        device_slots: int,
        host_slots: int,
        piece_bytes: int = ...,
        huge_pages: bool = True,
        batched: bool = True,
        overlap_hint: bool = True,
    ) -> None: ...
    def prepare_host(self) -> None: ...
    def commit_host(self, bytes: int | None = None) -> None: ...
    def ready_host_bytes(self) -> int: ...
    def release_host(self) -> None: ...
    def copy(
        self, to_host: bool, device_slots: NDArray[np.int32], host_slots: NDArray[np.int32]
    ) -> None: ...
    def drain(self) -> None: ...

def rounded_add(*, sum: Tensor, addend: Tensor, seed: int, stream: int = 0) -> None: ...
