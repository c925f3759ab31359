#pragma once

// What every implementation of an attention operation (cpu, sm90, sm80, plain) receives. Plain
// data: pointers, sizes and strides. All strides count elements; the head dimension is contiguous.
//
// Legend of shapes: B batch, Hq query heads, Hkv key/value heads, C tokens of the chunk, D head
// dim, P page size, N past tokens, n past pages = ceil(N / P), Q query blocks = ceil(C / P).
//
// Key i of a sequence is past token i for i < N and the chunk's own token i - N after that. Query
// row r of the chunk is key N + r. It sees key i when all of these hold:
//   i <= N + r                        causal
//   i > N + r - window                window > 0
//   i >= first_key[b][r]              first_key != null (documents)
//   i < num_keys[b]                   num_keys != null (right padding)
//   selection lists page i / P        selection != null and i < N
// A row that sees nothing has o = 0 and lse = -inf, and contributes no gradient.

#include <cstdint>

#include "common/dtype.h"

namespace oomb::attention {

struct Strides {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t token = 0;
};

struct Shape {
  int64_t batch = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;  // divides query_heads; head h reads kv head h / (query_heads / kv_heads)
  int64_t chunk = 0;
  int64_t head_dim = 0;
  int64_t page_size = 0;
};

struct Visibility {
  int64_t window = 0;                  // 0: unlimited
  const int32_t* first_key = nullptr;  // [B, C], may be null
  const int32_t* num_keys = nullptr;   // [B], may be null
};

// The past, seen through a block table. A launch handles one wave: logical pages
// [page_begin, page_end) in ascending order, after the own chunk where own_chunk is set.
struct PastPages {
  // Slot s holds one page: K [Hkv, P, D], then V [Hkv, P, D], at kv_pool + s * kv_slot_bytes.
  const void* kv_pool = nullptr;
  int64_t kv_slot_bytes = 0;
  int64_t kv_num_slots = 0;              // extent of the pool, for descriptors and checks
  const int32_t* block_table = nullptr;  // [B, table_stride]: slot of logical page, -1 not resident
  int64_t table_stride = 0;
  int64_t num_tokens = 0;  // N
  int64_t page_begin = 0;
  int64_t page_end = 0;

  // Pages each block of P queries attends to; ascending, -1 padded. Null: all past pages.
  const int32_t* selection = nullptr;  // [B, Q, selection_heads, budget]
  int64_t selection_heads = 1;         // 1 (shared by all heads) or Hkv
  int64_t budget = 0;
};

// Raw softmax state carried between waves, private to one implementation. acc is the unnormalised
// output. Double where the inputs are, float otherwise. Laid out [B, Hq, C, D] and [B, Hq, C].
struct SoftmaxState {
  void* acc = nullptr;
  void* max = nullptr;
  void* sum = nullptr;
};

struct ForwardParams {
  Shape shape;
  Visibility visibility;
  PastPages past;
  DType dtype = DType::kFloat32;  // of q, k, v, pages and o
  double scale = 1.0;
  double cap = 0.0;  // of the scaled scores: cap * tanh(score / cap), before the mask; 0: none

  const void* q = nullptr;  // [B, Hq, C, D]
  const void* k = nullptr;  // [B, Hkv, C, D], the own chunk
  const void* v = nullptr;
  Strides q_strides, k_strides, v_strides;

  bool own_chunk = true;   // this wave starts with the own chunk
  bool first_wave = true;  // state is initialised, not read
  bool last_wave = true;   // o and lse are written; state need not be
  SoftmaxState state;      // may be null when first_wave and last_wave

  void* o = nullptr;    // [B, Hq, C, D]
  void* lse = nullptr;  // [B, Hq, C] contiguous, natural logarithm; float (double for double)
  Strides o_strides;

  void* workspace = nullptr;  // forward_workspace_bytes(params), or null: slower in places
  int64_t workspace_bytes = 0;
  void* stream = nullptr;  // cudaStream_t
};

// Gradient pages: dK of a logical page is at dkv_pool + dkv_table[b][page][0] * dkv_unit_bytes, dV
// at entry [1]; each [Hkv, P, D]. So dK|dV may share one slot or take one each. Entry -1: no
// gradient is wanted for that page (dQ still is). Gradients are added to what is there.
struct GradientPages {
  void* dkv_pool = nullptr;
  int64_t dkv_unit_bytes = 0;
  const int32_t* dkv_table = nullptr;  // [B, table_stride, 2]
  DType dtype = DType::kFloat32;       // kFloat64 for double inputs; kBFloat16: stochastic rounding
  uint64_t rounding_seed = 0;          // mixes (seed, layer, chunk); the page and element are added
};

struct BackwardParams {
  Shape shape;
  Visibility visibility;
  PastPages past;
  GradientPages grads;
  DType dtype = DType::kFloat32;
  double scale = 1.0;
  double cap = 0.0;  // as in ForwardParams
  bool deterministic = true;

  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* o = nullptr;
  const void* d_o = nullptr;    // [B, Hq, C, D]
  const void* lse = nullptr;    // [B, Hq, C]
  const void* d_lse = nullptr;  // [B, Hq, C] contiguous, may be null
  Strides q_strides, k_strides, v_strides, o_strides, do_strides;

  bool own_chunk = true;   // dk, dv of the own chunk are written in this wave
  bool first_wave = true;  // dq_acc is initialised and delta computed, not read
  bool last_wave = true;   // dq is written
  void* dq_acc = nullptr;  // [B, Hq, C, D] float (double): carried between waves; null if one wave
  void* delta = nullptr;   // [B, Hq, C] float (double) work space: rowsum(o * d_o) - d_lse

  void* dq = nullptr;  // [B, Hq, C, D]
  void* dk = nullptr;  // [B, Hkv, C, D]
  void* dv = nullptr;
  Strides dq_strides, dk_strides, dv_strides;

  void* workspace = nullptr;  // device implementations: backward_workspace_bytes(params)
  int64_t workspace_bytes = 0;
  void* stream = nullptr;
};

// Writes a chunk's keys and values into their slots and the mean key of each page.
struct PageWriteParams {
  Shape shape;  // query_heads unused
  DType dtype = DType::kFloat32;
  const void* k = nullptr;  // [B, Hkv, C, D]
  const void* v = nullptr;
  Strides k_strides, v_strides;
  int64_t page_begin = 0;  // first and last + 1 of the chunk's pages (0 .. ceil(C / P)) to write
  int64_t page_end = 0;
  void* kv_pool = nullptr;
  int64_t kv_slot_bytes = 0;
  const int32_t* slots = nullptr;  // [B, slots_stride]: slot of the chunk's page; -1: skip the page
  int64_t slots_stride = 0;
  const int32_t* num_rows = nullptr;  // [B] real tokens of the chunk, may be null (= C)
  void* summary = nullptr;     // [B, summary_stride, Hkv, D] of dtype, at the chunk's first page
  int64_t summary_stride = 0;  // pages per sequence; summary may be null. Mean over real tokens
  void* stream = nullptr;
};

// Adds a chunk's gradient pages to the gradient of its own keys and values:
// dk[b, h, r] += scale * dK page. Pages with dkv_table -1 add nothing.
struct PageGradientReadParams {
  Shape shape;
  DType dtype = DType::kFloat32;  // of dk, dv
  GradientPages grads;            // dkv_table [B, table_stride, 2], at the chunk's first page
  int64_t table_stride = 0;
  int64_t page_begin = 0;
  int64_t page_end = 0;
  double scale = 1.0;
  void* dk = nullptr;
  void* dv = nullptr;
  Strides dk_strides, dv_strides;
  void* stream = nullptr;
};

enum class ScoreKind : int32_t { kBlockMean, kTokenSoftmax };
constexpr const char* kScoreNames[] = {"block_mean", "token_softmax"};  // as Python has them

// scores[b, block, head, page] of every past page for every query block. A page that no row of the
// block's first document may see gets -inf.
//   kBlockMean:    mean over the block's real queries and the group's heads . summary; summed
//                  over kv heads when score_heads == 1
//   kTokenSoftmax: per real token softmax over candidate pages of (group-summed query . summary),
//                  unscaled; summed over the block's tokens, and over kv heads when
//                  score_heads == 1
// Candidates of a block: pages p with (p + 1) * P > first_key[b][first row of the block] and
// p * P < min(N, num_keys[b]).
struct PageScoreParams {
  Shape shape;
  Visibility visibility;
  DType dtype = DType::kFloat32;
  ScoreKind kind = ScoreKind::kBlockMean;
  const void* q = nullptr;
  Strides q_strides;
  const void* summary = nullptr;  // [B, summary_stride, Hkv, D] of dtype
  int64_t summary_stride = 0;
  int64_t num_tokens = 0;  // N
  int64_t score_heads = 1;
  void* scores = nullptr;  // [B, Q, score_heads, n] float (double for double)
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
  void* stream = nullptr;
};

// The budget highest scores of each row, ties to the lower page; ascending page ids, -1 padded.
// Pages at -inf are never chosen. The first sink_pages and last recent_pages candidates are always
// chosen and count against the budget.
struct PageSelectParams {
  int64_t rows = 0;  // B * Q * score_heads
  int64_t num_pages = 0;
  int64_t budget = 0;
  int64_t sink_pages = 0;
  int64_t recent_pages = 0;
  DType dtype = DType::kFloat32;
  const void* scores = nullptr;  // [rows, num_pages]
  int32_t* selection = nullptr;  // [rows, budget]
  void* stream = nullptr;
};

}  // namespace oomb::attention
