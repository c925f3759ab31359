#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "attention/aligned.h"
#include "attention/sm90/backward.h"
#include "attention/sm90/backward_plan.h"
#include "attention/sm90/kernels.h"
#include "attention/sm90/sum_map.h"
#include "attention/sm90/tensor_map.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::sm90 {
namespace {

constexpr int64_t kAlignment = 256;

// Of the L2 (50 MB), for what blocks at work together read and add to again and again: queries, dO
// and dQ of one kv head's group, 8 bytes an element.
constexpr int64_t kStripeBytes = int64_t{32} << 20;

// Steps in deterministic mode. At the end of a launch multiprocessors wait for the last units of
// others, on average for half of one; so these are short. But units at work on a head trail each
// other by a step or so: with few steps a head keeps few multiprocessors busy. However many heads a
// launch has, steps are as many: a part of the heads (head_groups) has the bits of all.
constexpr int64_t kClosingSteps = 84;
// Of the units before, at least. Pages in bf16 are rounded once more, for which walks must be long.
constexpr int64_t kOpeningSteps = 264, kOpeningStepsBFloat16 = 600;

// Hands out pieces of one allocation; with a null base it only adds up.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    const int64_t offset = used_;
    used_ = align_up(used_ + count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(base_ + offset);
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

bool has_past(const BackwardParams& params) {
  return params.past.page_end > params.past.page_begin && params.past.num_tokens > 0;
}

int num_multiprocessors() {
  int device = 0;
  int count = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return count;
}

// Descriptors of the keys and values for boxes of own_rows and past_rows.
void set_key_maps(BackwardKernelArgs& args, int own_rows, int past_rows) {
  const BackwardParams& params = args.params;
  const Shape& shape = params.shape;
  args.k = make_token_map("k", params.k, params.k_strides, shape.batch, shape.kv_heads, shape.chunk,
                          shape.head_dim, own_rows);
  args.v = make_token_map("v", params.v, params.v_strides, shape.batch, shape.kv_heads, shape.chunk,
                          shape.head_dim, own_rows);
  args.pool = has_past(params) ? make_pool_map(params.past, shape, past_rows) : args.k;
}

// Of `blocks` query blocks those that close a launch in deterministic mode.
int64_t closing_blocks(const BackwardParams& params, const Tiling& tiling, int64_t blocks) {
  const Shape& shape = params.shape;
  const bool rounded = params.grads.dtype == DType::kBFloat16;
  const int64_t steps = tiling.block_rows / kQueryRows * (shape.query_heads / shape.kv_heads);
  const int64_t closing = ceil_div(kClosingSteps, std::max<int64_t>(steps, 1));  // no queries: 0
  const int64_t fewest = rounded ? kOpeningStepsBFloat16 : kOpeningSteps;
  return (blocks - closing) * steps >= fewest ? closing : 0;
}

}  // namespace

// The fewer heads at once, the better their queries and dQ fit the L2. But blocks that must wait
// for each other within a head trail by about two steps, so that a head keeps no more blocks busy
// than half its query tiles.
int64_t heads_together(const BackwardParams& params) {
  const Shape& shape = params.shape;
  if (!adds_in_order(params)) return 1;
  const int64_t heads = shape.batch * shape.kv_heads;
  const int64_t steps = ceil_div(shape.chunk, kQueryRows) * (shape.query_heads / shape.kv_heads);
  int64_t together = std::min(heads, ceil_div(2 * num_multiprocessors(), steps));
  while (heads % together != 0) ++together;
  return together;
}

Tiling plan_tiling(const BackwardParams& params) {
  const Shape& shape = params.shape;
  const PastPages& past = params.past;
  Tiling tiling;
  const auto page_size = static_cast<int32_t>(shape.page_size);
  if (past.selection != nullptr) tiling.key_rows = page_size;
  if (shape.head_dim == 256) tiling.key_rows = 64;
  tiling.block_rows = past.selection != nullptr ? page_size : tiling.key_rows;
  if (has_past(params)) {
    const int64_t end = ceil_div(past.page_end * shape.page_size, tiling.key_rows);
    tiling.tile_begin = static_cast<int32_t>(past.page_begin * shape.page_size / tiling.key_rows);
    tiling.past_tiles = static_cast<int32_t>(end) - tiling.tile_begin;
  }
  const int64_t row_bytes = 8 * (shape.query_heads / shape.kv_heads) * shape.head_dim;
  const int64_t stripes = std::max<int64_t>(ceil_div(shape.chunk * row_bytes, kStripeBytes), 1);
  const int64_t blocks = ceil_div(shape.chunk, tiling.block_rows);
  int64_t closing = 0;
  int64_t stripe_blocks = std::max<int64_t>(blocks, 1);
  if (past.selection != nullptr) {
    tiling.own_descends = true;
  } else if (params.deterministic) {
    closing = closing_blocks(params, tiling, blocks);
    stripe_blocks -= closing;
  } else if (stripes == 1 || params.grads.dtype == DType::kFloat32) {
    // Pages in bf16 would be rounded once per stripe, of which there are many.
    stripe_blocks = ceil_div(stripe_blocks, stripes);
    tiling.own_descends = true;
    tiling.sums_stay = true;
  }
  tiling.stripe_blocks = static_cast<int32_t>(stripe_blocks);
  tiling.stripes = static_cast<int32_t>(ceil_div(blocks - closing, stripe_blocks));
  tiling.closing_blocks = static_cast<int32_t>(closing);
  return tiling;
}

BackwardWorkspace plan_workspace(const BackwardParams& params, void* base) {
  const Shape& shape = params.shape;
  const PastPages& past = params.past;
  const int64_t heads = shape.batch * shape.query_heads;
  const int64_t tiles = ceil_div(shape.chunk, kQueryRows);
  const Tiling tiling = plan_tiling(params);
  Arena arena(base);
  BackwardWorkspace workspace;
  workspace.lse = arena.take<float>(heads * tiles * kQueryRows);
  workspace.delta = arena.take<float>(heads * tiles * kQueryRows);
  if (params.dq_acc == nullptr && !queries_apart(params)) {
    workspace.dq = arena.take<float>(heads * shape.chunk * shape.head_dim);
  }
  workspace.query_tiles = arena.take<QueryTile>(shape.batch * tiles);
  workspace.zeroed_offset = arena.used();
  workspace.counters = arena.take<int32_t>(heads * tiles * 2);
  if (tiling.closing_blocks > 0) {
    workspace.page_turns =
        arena.take<int32_t>(shape.batch * shape.kv_heads * tiling.past_tiles * 8);
  }
  workspace.next_unit = arena.take<int32_t>(1);
  workspace.num_units = arena.take<int32_t>(1);
  workspace.empty_rows = arena.take<int32_t>(shape.batch * tiles);
  if (past.selection != nullptr && has_past(params)) {
    workspace.list_tiles = tiling.past_tiles;
    workspace.reader_words = ceil_div(ceil_div(shape.chunk, shape.page_size), 32);
    const int64_t lists = shape.batch * past.selection_heads;
    workspace.readers = arena.take<uint32_t>(lists * workspace.list_tiles * workspace.reader_words);
    workspace.zeroed_bytes = arena.used() - workspace.zeroed_offset;
    workspace.active = arena.take<int32_t>(lists * workspace.list_tiles);
    workspace.active_begin = arena.take<int32_t>(lists * kReaderClasses + 1);
  } else {
    workspace.zeroed_bytes = arena.used() - workspace.zeroed_offset;
  }
  const int64_t own_tiles = params.own_chunk ? ceil_div(shape.chunk, tiling.key_rows) : 0;
  const int64_t past_units = tiling.past_tiles * (tiling.stripes + (tiling.closing_blocks > 0));
  workspace.max_units = (own_tiles + past_units) * shape.batch * shape.kv_heads;
  workspace.units = arena.take<Unit>(workspace.max_units);
  workspace.bytes = arena.used();
  return workspace;
}

bool backward_supported(const BackwardParams& params) {
  const Shape& shape = params.shape;
  return params.dtype == DType::kBFloat16 && params.cap == 0 && takes_head_dim(shape.head_dim) &&
         (shape.page_size == 64 || shape.page_size == 128) && aligned(params.q, params.q_strides) &&
         aligned(params.k, params.k_strides) && aligned(params.v, params.v_strides) &&
         aligned(params.o, params.o_strides) && aligned(params.d_o, params.do_strides) &&
         aligned(params.dq, params.dq_strides) && aligned(params.dk, params.dk_strides) &&
         aligned(params.dv, params.dv_strides) &&
         (params.grads.dtype == DType::kFloat32 || params.grads.dtype == DType::kBFloat16) &&
         reinterpret_cast<uintptr_t>(params.grads.dkv_pool) % 16 == 0 &&
         params.grads.dkv_unit_bytes % 16 == 0;  // as bulk copies of a gradient page want it
}

int64_t backward_workspace_bytes(const BackwardParams& params) {
  return plan_workspace(params, nullptr).bytes;
}

void backward(const BackwardParams& params) {
  const Shape& shape = params.shape;
  if (shape.batch == 0 || shape.query_heads == 0 || shape.chunk == 0) return;
  expect(
      backward_supported(params), "head_dim, page_size, dtype, cap",
      "64, 128 or 256, 64 or 128, bfloat16, 0, all data and rows aligned to 16 bytes",
      concat(shape.head_dim, ", ", shape.page_size, ", ", name_of(params.dtype), ", ", params.cap));
  expect(params.dq_acc != nullptr || (params.first_wave && params.last_wave), "dq_acc",
         "an accumulator where the past comes in several waves", "none");
  const BackwardWorkspace workspace = plan_workspace(params, params.workspace);
  expect(params.workspace_bytes >= workspace.bytes, "workspace",
         concat("at least ", workspace.bytes, " bytes"), params.workspace_bytes);
  BackwardKernelArgs args;
  args.tiling = plan_tiling(params);
  args.params = params;
  args.workspace = workspace;
  args.q = make_token_map("q", params.q, params.q_strides, shape.batch, shape.query_heads,
                          shape.chunk, shape.head_dim, kQueryRows);
  args.d_o = make_token_map("d_o", params.d_o, params.do_strides, shape.batch, shape.query_heads,
                            shape.chunk, shape.head_dim, kQueryRows);
  set_key_maps(args, args.tiling.key_rows,
               std::min(args.tiling.key_rows, static_cast<int>(shape.page_size)));
  float* sum = params.dq_acc != nullptr ? static_cast<float*>(params.dq_acc) : workspace.dq;
  args.dq = args.q;
  if (!queries_apart(params)) {
    args.dq = make_sum_map("dq_acc", sum, shape.batch * shape.query_heads, shape.chunk,
                           shape.head_dim, kQueryRows);
  }
  args.own_tiles =
      params.own_chunk ? static_cast<int32_t>(ceil_div(shape.chunk, args.tiling.key_rows)) : 0;
  args.pool_rows_per_slot = 0;
  if (has_past(params)) {
    args.pool_rows_per_slot = static_cast<int32_t>(pool_rows_per_slot(params.past, shape));
  }
  args.heads_together = static_cast<int32_t>(heads_together(params));
  args.query_tiles = static_cast<int32_t>(ceil_div(shape.chunk, kQueryRows));
  args.group = static_cast<int32_t>(shape.query_heads / shape.kv_heads);
  args.scale_log2 = static_cast<float>(params.scale * 1.4426950408889634);
  launch_backward_prepare(args);
  launch_backward_units(args);
  const int blocks = num_multiprocessors();
  switch (shape.head_dim) {
    case 64: launch_backward_d64(args, blocks); break;
    case 128: launch_backward_d128(args, blocks); break;
    default: launch_backward_d256(args, blocks);
  }
  if (!queries_apart(params)) {
    if (params.last_wave) launch_backward_finish(params, workspace);
    return;
  }
  set_key_maps(args, kQueryKernelKeys, kQueryKernelKeys);
  switch (shape.head_dim) {
    case 64: return launch_backward_query_d64(args);
    case 128: return launch_backward_query_d128(args);
    default: return launch_backward_query_d256(args);
  }
}

}  // namespace oomb::attention::sm90
