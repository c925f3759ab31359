#pragma once

// What help() says about the nouns of _C. csrc/attention/params.h has the legend of shapes.

namespace oomb::bindings {

constexpr const char* kPagePoolDoc = R"doc(
Slots of one size, in memory that its owner keeps until the kernels that use it end.

Args:
    address: of slot 0, on the device of the tensors; slot s lies at address + s * slot_bytes.
    slot_bytes: for keys and values at least 2 * Hkv * P * D values. For gradients this is the unit
        in which their table counts, and a page may take several.
    num_slots: that there are so many is trusted.
)doc";

constexpr const char* kVisibilityDoc = R"doc(
Which keys the chunk's queries may see, beside the causal order.

Args:
    window: a query sees its last so many keys, itself included; 0: all.
    first_key: int32 [B, C], first key that a query sees, counted over past and chunk; None: 0.
    num_keys: int32 [B], keys before a sequence's right padding; None: all.
)doc";

constexpr const char* kChunkDoc = R"doc(
The chunk that attends.

Args:
    q: [B, Hq, C, D]; the last dimension is contiguous, here and below.
    k, v: [B, Hkv, C, D] of q's dtype, the chunk's own keys and values.
    scale: of the logits.
    cap: the scaled logits s become cap * tanh(s / cap), before anything is hidden; 0: they stay.
    visibility: None: all keys that lie before a query.
)doc";

constexpr const char* kWaveDoc = R"doc(
The past pages that one launch takes, and its place among the launches of an attention.

Waves come in ascending order of pages. The raw state goes from one to the next.

Args:
    begin, end: logical pages [begin, end); empty: the own chunk alone.
    first: the state begins here and is not read.
    last: results are written here.
    own_chunk: this launch takes the chunk's own keys too; None: the first does.
)doc";

constexpr const char* kPastPagesDoc = R"doc(
The past of a chunk, in pages.

Args:
    page_size: tokens of a page, P, and queries of a block that shares a list of pages.
    pool: of the pages' keys and values; None where no page is read.
    block_table: int32 [B, pages]: slot of each page, -1 where it is not there.
    num_tokens: past tokens, N.
    selection: int32 [B, Q, 1 or Hkv, budget]: pages that each block of queries sees, ascending,
        padded with -1; None: all.
)doc";

constexpr const char* kGradientPagesDoc = R"doc(
Where gradients of past keys and values are added.

Args:
    pool: its slots are the units in which the table counts.
    table: int32 [B, pages, 2]: units at which each page's dK and dV begin; -1: none are wanted.
    dtype: "float32" or "bfloat16" (stochastic rounding); "float64" for float64 tensors.
    rounding_seed: the page and the element are mixed in.
)doc";

constexpr const char* kSoftmaxStateDoc = R"doc(
What a forward hands from wave to wave: float32, float64 for float64 tensors; contiguous.

Args:
    acc: [B, Hq, C, D], the output before it is divided.
    max, sum: [B, Hq, C].
)doc";

constexpr const char* kBackwardStateDoc = R"doc(
What a backward hands from wave to wave: float32, float64 for float64 tensors; contiguous.

Args:
    delta: [B, Hq, C], work space of one wave too.
    dq_acc: [B, Hq, C, D]; None where there is one wave.
)doc";

constexpr const char* kOutputDoc = R"doc(
Attention's results, or their gradients.

Args:
    o: [B, Hq, C, D] of q's dtype; a forward writes it in its last wave.
    lse: [B, Hq, C] contiguous float32, float64 for float64 tensors; of gradients: None for zero.
)doc";

constexpr const char* kChunkGradientsDoc = R"doc(
Where a backward writes the gradients of the chunk's q, k and v, of their shapes and dtype.

Args:
    dq: written in the last wave.
    dk, dv: written in the wave that takes the own chunk.
)doc";

}  // namespace oomb::bindings
