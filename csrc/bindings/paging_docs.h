#pragma once

// What help(oomb._C.PageManager) says.

namespace oomb::bindings {

constexpr const char* kPageManagerDoc = R"doc(
Keeps the pages of a call in two tiers: on the device while kernels use them, else on the host.

A page holds the keys and values of ``page_size`` tokens of one layer and sequence, in a slot of
``slot_bytes``; a gradient page holds their gradients, in one or two slots. A call says beforehand
in which order layers visit their pages; the manager then evicts what is needed last and loads ahead
what is needed next. Kernels find a page through the tables, which follow it.

    begin_call
      create, commit            a chunk's pages are made, written by a kernel, and handed over
      waves, acquire, release   the pages of a visit are held on the device while kernels read them
      create_gradients          pages that a later visit will add gradients to
      acquire_gradients, drop   a chunk's gradients are read; its pages die
    end_call

Args:
    device: "cpu", or "cuda:<index>".
    slot_bytes: bytes of a slot, at most 4 GiB.
    device_slots, host_slots: most slots of each tier; memory comes as it is used.
    explicit_host_memory: the host's size was asked for by name, so wait where memory is growing.
    map_device_memory: let the device tier grow and shrink, where the GPU can.
    dry: keep the books without copying a byte.
    copy_delay_seed, shuffle_seed, disabled_wait, poison: for tests.

Used from one thread at a time. Between ``acquire`` and ``release`` a page does not move. On a GPU
every step takes the stream of the kernels that use the pages; on the CPU it is ignored.

Raises:
    ValueError: an argument does not fit.
    oomb.OutOfMemoryError: a tier is too small; the text says by how much, and what to change.
    oomb.Error: steps in an order that cannot be, such as a release without acquire.

Example: three pages through a device tier of two, read in waves.

    >>> import numpy as np, torch
    >>> from oomb import _C
    >>> heads, head_dim, page_size, past = 2, 8, 4, 12
    >>> slot_bytes = 2 * heads * page_size * head_dim * 4  # K and V of a page, float32
    >>> pages = _C.PageManager(device="cpu", slot_bytes=slot_bytes, device_slots=2, host_slots=8)
    >>> visits = np.array([[0, 0, 0, 3]], np.int32)  # layer 0 reads (0) pages 0 to 2
    >>> pages.begin_call(num_layers=1, pages_per_sequence=[3], grad_slots=1, visits=visits)
    >>> table = torch.from_numpy(pages.block_table(0))
    >>> pool = _C.PagePool(address=pages.pool_address(), slot_bytes=slot_bytes,
    ...                    num_slots=pages.device_slots)
    >>> k, v = torch.randn(2, 1, heads, past, head_dim)
    >>> for page in range(3):
    ...     pages.create(0, page, page + 1)
    ...     _C.page_write(k=k, v=v, pool=pool, slots=table, page_begin=page, page_end=page + 1,
    ...                   page_size=page_size)
    ...     pages.commit(0, page, page + 1)
    >>> table.tolist()[0].count(-1)  # one of them is on the host now
    1
    >>> q, own_k, own_v = torch.randn(3, 1, heads, 4, head_dim)
    >>> o, lse, acc = torch.empty_like(q), torch.empty(1, heads, 4), torch.empty_like(q)
    >>> chunk = _C.Chunk(q=q, k=own_k, v=own_v, scale=head_dim**-0.5)
    >>> past_pages = _C.PastPages(page_size=page_size, pool=pool, block_table=table,
    ...                           num_tokens=past)
    >>> state = _C.SoftmaxState(acc=acc, max=torch.empty_like(lse), sum=torch.empty_like(lse))
    >>> waves = pages.waves(0)
    >>> for begin, end in waves:
    ...     wave = _C.Wave(begin=begin, end=end, first=begin == 0, last=end == 3)
    ...     pages.acquire(0, begin, end)
    ...     _C.attention_forward(chunk=chunk, past=past_pages, output=_C.Output(o=o, lse=lse),
    ...                          wave=wave, state=state)
    ...     pages.release(0, begin, end)
    >>> pages.end_call()
    >>> len(waves)
    2
    >>> seen = torch.ones(4, past + 4, dtype=torch.bool).tril(past)
    >>> whole = torch.nn.functional.scaled_dot_product_attention(
    ...     q, torch.cat([k, own_k], 2), torch.cat([v, own_v], 2), attn_mask=seen)
    >>> torch.allclose(o, whole, atol=1e-5)
    True
)doc";

constexpr const char* kBeginCallDoc = R"doc(
Begin a call, whose pages are known from here on.

Args:
    num_layers: layers that have pages.
    pages_per_sequence: pages of each sequence of the batch, per layer.
    grad_slots: slots of a gradient page, 1 or 2.
    visits: int32 [visits, 4] of layer, kind, first page, last page + 1, in the order in which they
        happen. Kinds: 0 reads keys and values; 1 reads them and adds gradients; 2 reads gradients.
    exact: visits use all of their range; False: at most that, until ``set_visit_pages``.
    wave_pages: waves end at multiples of this many pages (``attention_key_tile``).
    device_slots: a lower cap of the device tier, for this call.
)doc";

constexpr const char* kSetVisitPagesDoc =
    "Say which pages a visit reads: int64 positions, sequence * most pages of a sequence + page.";
constexpr const char* kEndCallDoc = "End the call: all pages die, and the device's memory goes.";
constexpr const char* kCloseDoc = "End the call and give back all memory; calls are refused then.";
constexpr const char* kPoolAddressDoc =
    "Address of the device tier: slot s lies at it + s * slot_bytes, while a call runs.";
constexpr const char* kBlockTableDoc =
    "Slot of each page of a layer, int32 [batch, most pages], -1 where it is not on the device: a "
    "NumPy array on the CPU, a DLPack capsule on a GPU. It follows the pages; do not write to it.";
constexpr const char* kGradientTableDoc =
    "Places of each page's dK and dV, int32 [batch, most pages, 2], in units of half a slot; -1: "
    "none. As block_table.";
constexpr const char* kMaxCreateDoc = "Pages per sequence that can be created at once, at least 1.";
constexpr const char* kMaxOutputsDoc = R"doc(
Pieces of kept outputs that one ``write_output`` or ``read_output`` may take.
)doc";

constexpr const char* kWriteOutputDoc = R"doc(
Keep an output: copy it into slots of its own, behind what the stream holds.

Args:
    layer: whose attention made it.
    begin, end: pieces, numbered through the call; each holds ``slot_bytes``, the last may be short.
    source: address of the first piece's bytes, contiguous, on the device.
    num_bytes: of all pieces.
)doc";

constexpr const char* kReadOutputDoc = R"doc(
Take a kept output back: copy its pieces out, after which they are dead.

Args:
    visit: the entry of the access order that reads them.
    begin, end: pieces, as they were written.
    target: address of the first piece's bytes, contiguous, on the device.
    num_bytes: of all pieces.
)doc";

constexpr const char* kMaxGradientsDoc =
    "Gradient pages per sequence that can be acquired at once, at least 1.";
constexpr const char* kCreateDoc =
    "Give pages [page_begin, page_end) of every sequence their slots, undefined bytes; they stay "
    "on "
    "the device until commit.";
constexpr const char* kCommitDoc =
    "Hand over created pages, once the kernel that writes them runs.";
constexpr const char* kCreateGradientsDoc =
    "Let these pages have gradients: zero until the first visit that adds to them.";
constexpr const char* kWavesDoc =
    "Cut a visit's pages into ranges [begin, end), each of which fits the device at once.";
constexpr const char* kOwnAloneDoc =
    "Whether to run the chunk's own keys before acquiring this wave, as its pages are still on the "
    "host.";
constexpr const char* kAcquireDoc =
    "Hold a wave of a visit on the device; the stream waits for what is still being copied.";
constexpr const char* kReleaseDoc = "Let go of a wave, once the kernels that use it are launched.";
constexpr const char* kAcquireGradientsDoc =
    "Hold the gradient pages of these pages on the device, to be read and then dropped.";
constexpr const char* kDropDoc =
    "Let pages die: their keys and values (kv), their gradients (grads), or both.";
constexpr const char* kStatsDoc =
    "Bytes copied and held, seconds of copying and of waiting, pages found and missed, of this "
    "call; how much of each tier is in use now. Read without walking the pages.";
constexpr const char* kWaitsDoc =
    "float64 [2, visits]: seconds that compute stood still in each visit, for loads and for "
    "stores.";
constexpr const char* kSnapshotDoc = "The state of all pages as JSON, for looking into.";
constexpr const char* kCheckIntegrityDoc = "Raise oomb.Error if the books do not add up.";

}  // namespace oomb::bindings
