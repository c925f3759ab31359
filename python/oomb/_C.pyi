"""Typed surface of the native core; ``help(oomb._C.PageManager)`` shows its page manager at work.

Attention takes nouns (``Chunk``, ``PastPages``, ``GradientPages``, …), whose docstrings have their
shapes: B sequences, Hq query and Hkv key/value heads, C tokens of the chunk, D head dim, P tokens
of a page, N past tokens, Q = ceil(C / P) blocks of queries. They are frozen, may serve several
calls, and are checked when they are made; a call looks at their tensors again and checks how they
fit each other.

Checked are sizes, types, layouts and devices of all tensors, and on the CPU every entry of a
table that is used (slots, block_table, gradients.table, selection): what does not fit is a
``ValueError`` that names the argument, and no memory is touched. Trusted is what the host
cannot see:

- addresses: a ``PagePool`` has its slots where it says, and they live until kernels end;
- on a GPU the entries of tables, as reading them would wait for it, and ``stream``, a handle;
- that a place that is written or added to is named once, and that nobody else uses tensors and
  pages at the same time.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypedDict

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

class SlotPoolState:
    slot_bytes: Final[int]
    max_slots: Final[int]
    mapped_slots: Final[int]
    taken_slots: Final[int]
    free_slots: Final[int]
    committed_bytes: Final[int]
    ready_bytes: Final[int]
    taken_bytes: Final[int]

class PageStatistics:
    device_peak_bytes: Final[int]
    host_peak_bytes: Final[int]
    h2d_bytes: Final[int]
    d2h_bytes: Final[int]
    h2d_seconds: Final[float]
    d2h_seconds: Final[float]
    loaded_runs: Final[int]  # stretches of neighbouring host slots of all batches
    stored_runs: Final[int]
    exposed_copy_seconds: Final[float]
    exposed_growth_seconds: Final[float]
    hits: Final[int]
    misses: Final[int]
    device: Final[SlotPoolState]  # now
    host: Final[SlotPoolState]

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
    def max_create(self) -> int: ...
    def max_gradients(self) -> int: ...
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

class PagePool:
    """Slots of one size, in memory that its owner keeps until kernels end."""

    def __init__(self, *, address: int, slot_bytes: int, num_slots: int) -> None: ...
    address: Final[int]
    slot_bytes: Final[int]
    num_slots: Final[int]

class Visibility:
    """Which keys the queries may see, beside the causal order."""

    def __init__(
        self, *, window: int = 0, first_key: Tensor | None = None, num_keys: Tensor | None = None
    ) -> None: ...
    window: Final[int]
    first_key: Final[Tensor | None]
    num_keys: Final[Tensor | None]

class Chunk:
    """The chunk that attends: queries [B, Hq, C, D], its own keys and values [B, Hkv, C, D]."""

    def __init__(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        cap: float = 0.0,
        visibility: Visibility | None = None,
    ) -> None: ...
    q: Final[Tensor]
    k: Final[Tensor]
    v: Final[Tensor]
    scale: Final[float]
    cap: Final[float]
    visibility: Final[Visibility]

class Wave:
    """The past pages [begin, end) of one launch, and its place among the launches."""

    def __init__(
        self,
        *,
        begin: int = 0,
        end: int = 0,
        first: bool = True,
        last: bool = True,
        own_chunk: bool | None = None,
    ) -> None: ...
    begin: Final[int]
    end: Final[int]
    first: Final[bool]
    last: Final[bool]
    own_chunk: Final[bool]

class PastPages:
    """The past of a chunk, in pages."""

    def __init__(
        self,
        *,
        page_size: int,
        pool: PagePool | None = None,
        block_table: Tensor | None = None,
        num_tokens: int = 0,
        selection: Tensor | None = None,
    ) -> None: ...
    page_size: Final[int]
    pool: Final[PagePool | None]
    block_table: Final[Tensor | None]
    num_tokens: Final[int]
    selection: Final[Tensor | None]

class GradientPages:
    """Where gradients of past keys and values are added."""

    def __init__(
        self, *, pool: PagePool, table: Tensor, dtype: str = "float32", rounding_seed: int = 0
    ) -> None: ...
    pool: Final[PagePool]
    table: Final[Tensor]
    dtype: Final[str]
    rounding_seed: Final[int]

class SoftmaxState:
    """What a forward hands from wave to wave."""

    def __init__(self, *, acc: Tensor, max: Tensor, sum: Tensor) -> None: ...
    acc: Final[Tensor]
    max: Final[Tensor]
    sum: Final[Tensor]

class BackwardState:
    """What a backward hands from wave to wave; dq_acc is None where there is one."""

    def __init__(self, *, delta: Tensor, dq_acc: Tensor | None = None) -> None: ...
    delta: Final[Tensor]
    dq_acc: Final[Tensor | None]

class Output:
    """Attention's results, or their gradients."""

    def __init__(self, *, o: Tensor | None = None, lse: Tensor | None = None) -> None: ...
    o: Final[Tensor | None]
    lse: Final[Tensor | None]

class ChunkGradients:
    """Where a backward writes the gradients of the chunk's q, k and v."""

    def __init__(
        self, *, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None
    ) -> None: ...
    dq: Final[Tensor | None]
    dk: Final[Tensor | None]
    dv: Final[Tensor | None]

def attention_forward(
    *,
    chunk: Chunk,
    past: PastPages,
    output: Output,
    wave: Wave | None = None,  # None: all pages in one launch
    state: SoftmaxState | None = None,
    workspace: Tensor | Callable[[int], Tensor] | None = None,
    stream: int = 0,
) -> None: ...
def attention_backward(
    *,
    chunk: Chunk,
    past: PastPages,
    output: Output,
    d_output: Output,
    d_chunk: ChunkGradients,
    state: BackwardState,
    gradients: GradientPages | None = None,
    wave: Wave | None = None,
    deterministic: bool = True,
    workspace: Tensor | Callable[[int], Tensor] | None = None,
    stream: int = 0,
) -> None: ...
def page_write(
    *,
    k: Tensor,
    v: Tensor,
    pool: PagePool,
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
    gradients: GradientPages,
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
    visibility: Visibility | None = None,  # without a window
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
def attention_page_sizes() -> list[int]: ...
def attention_head_dim(head_dim: int, capability: int) -> int: ...
def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
def cpu_instruction_set() -> str: ...

class PeerExchange:  # CUDA builds
    """Exchanges between GPUs of one host whose processes write into one another's memory."""

    def __init__(self, *, device: int, side_bytes: int) -> None: ...
    def begin(self, *, timeout_seconds: float) -> bytes: ...
    def connect(self, *, rank: int, handles: list[bytes]) -> None: ...
    def disconnect(self) -> None: ...
    def all_to_all(
        self,
        *,
        send: int,
        send_bytes: list[int],
        received: int,
        received_bytes: list[int],
        rank: int,
        message_bytes: int,
        same_to_all: bool = False,
        stream: int,
    ) -> None: ...
    def to_heads(
        self,
        *,
        tensors: list[tuple[int, int, int, int, int]],
        received: int,
        tokens: list[int],
        rank: int,
        batch: int,
        row_bytes: int,
        message_bytes: int,
        stream: int,
    ) -> None: ...
    def to_tokens(
        self,
        *,
        tensors: list[tuple[int, int, int, int, int]],
        results: list[tuple[int, int, int, int, int]],
        tokens: list[int],
        rank: int,
        batch: int,
        row_bytes: int,
        message_bytes: int,
        stream: int,
    ) -> None: ...
    def sum(self, *, parts: int, bytes: int, dtype: str, blocks: int = 0, stream: int) -> None: ...
    def abort(self) -> None: ...
    @property
    def timed_out(self) -> bool: ...
    @property
    def device(self) -> int: ...
    @property
    def side_bytes(self) -> int: ...

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
def row_factor(*, halves: Tensor, factor: Tensor, scale: float, stream: int = 0) -> None: ...
