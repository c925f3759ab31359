#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "attention/sm90/forward.h"
#include "attention/sm90/forward_args.h"
#include "attention/sm90/kernels.h"
#include "attention/sm90/tensor_map.h"
#include "common/error.h"
#include "common/math.h"

namespace oomb::attention::sm90 {
namespace {

constexpr int kTaskRows = 64;  // of the kernel: query rows per warpgroup

void expect_fits(const char* argument, int64_t value) {
  expect(value >= 0 && value <= std::numeric_limits<int32_t>::max() / 2, argument, "0 to 2^30 - 1",
         value);
}

void check(const ForwardParams& params) {
  const Shape& shape = params.shape;
  const PastPages& past = params.past;
  expect(params.dtype == DType::kBFloat16, "dtype", "bfloat16", name_of(params.dtype));
  expect(takes_head_dim(shape.head_dim), "head_dim", "64, 128 or 256", shape.head_dim);
  expect(shape.page_size == 64 || shape.page_size == 128, "page_size", "64 or 128",
         shape.page_size);
  expect(shape.kv_heads > 0 && shape.query_heads % shape.kv_heads == 0, "query_heads",
         concat("a multiple of kv_heads = ", shape.kv_heads), shape.query_heads);
  expect(params.scale > 0 && std::isfinite(params.scale), "scale", "a positive number",
         params.scale);
  expect_fits("num_past", past.num_tokens);
  expect_fits("chunk", shape.chunk);
  const int64_t pages = ceil_div(past.num_tokens, shape.page_size);
  expect(past.page_begin >= 0 && past.page_end <= pages, "page_begin, page_end",
         concat("pages of the past, 0 to ", pages), concat(past.page_begin, " to ", past.page_end));
  if (past.selection != nullptr) {
    expect(past.selection_heads == 1 || past.selection_heads == shape.kv_heads, "selection",
           concat("1 or ", shape.kv_heads, " heads"), past.selection_heads);
    expect_fits("selection", shape.batch * ceil_div(shape.chunk, shape.page_size) *
                                 past.selection_heads * past.budget);
  }
  for (const int64_t stride :
       {params.o_strides.batch, params.o_strides.head, params.o_strides.token}) {
    expect(stride % 8 == 0, "o", "strides in multiples of 8 elements", stride);
  }
  expect(reinterpret_cast<uintptr_t>(params.o) % 16 == 0, "o", "data aligned to 16 bytes",
         params.o);
  const bool carried =
      params.state.acc != nullptr && params.state.max != nullptr && params.state.sum != nullptr;
  expect(carried || (params.first_wave && params.last_wave), "acc, max, sum",
         "a state to carry between waves", "none");
}

}  // namespace

bool forward_supported(const ForwardParams& params) {
  const Shape& shape = params.shape;
  return params.dtype == DType::kBFloat16 && params.cap == 0 && takes_head_dim(shape.head_dim) &&
         (shape.page_size == 64 || shape.page_size == 128) && params.scale > 0;
}

void forward(const ForwardParams& params) {
  check(params);
  const Shape& shape = params.shape;
  const PastPages& past = params.past;
  if (shape.batch == 0 || shape.query_heads == 0 || shape.chunk == 0) return;
  const bool has_past = past.page_begin < past.page_end;
  const int page = static_cast<int>(shape.page_size);
  const int tile = shape.head_dim == 256 ? 64 : page;  // keys that the kernel loads at a time

  ForwardArgs args = {};
  args.q_map = make_token_map("q", params.q, params.q_strides, shape.batch, shape.query_heads,
                              shape.chunk, shape.head_dim, kTaskRows);
  if (params.own_chunk) {
    args.k_map = make_token_map("k", params.k, params.k_strides, shape.batch, shape.kv_heads,
                                shape.chunk, shape.head_dim, tile);
    args.v_map = make_token_map("v", params.v, params.v_strides, shape.batch, shape.kv_heads,
                                shape.chunk, shape.head_dim, tile);
  }
  if (has_past) {
    args.pool_map = make_pool_map(past, shape, tile);
    args.rows_per_slot = static_cast<int32_t>(pool_rows_per_slot(past, shape));
    args.num_slots = static_cast<int32_t>(past.kv_num_slots);
  }
  args.block_table = past.block_table;
  args.table_stride = past.table_stride;
  args.selection = past.selection;
  args.selection_heads = static_cast<int32_t>(past.selection_heads);
  args.budget = static_cast<int32_t>(past.budget);
  args.first_key = params.visibility.first_key;
  args.num_keys = params.visibility.num_keys;
  args.window = static_cast<int32_t>(
      std::min<int64_t>(params.visibility.window, std::numeric_limits<int32_t>::max() / 2));

  args.batch = static_cast<int32_t>(shape.batch);
  args.query_heads = static_cast<int32_t>(shape.query_heads);
  args.kv_heads = static_cast<int32_t>(shape.kv_heads);
  args.group = args.query_heads / args.kv_heads;
  args.chunk = static_cast<int32_t>(shape.chunk);
  args.num_past = static_cast<int32_t>(past.num_tokens);
  args.num_pages = static_cast<int32_t>(ceil_div(past.num_tokens, shape.page_size));
  args.page_begin = static_cast<int32_t>(past.page_begin);
  args.page_end = static_cast<int32_t>(past.page_end);
  args.blocks = static_cast<int32_t>(ceil_div(shape.chunk, shape.page_size));
  // A long dense past should stream one kv head at a time; short units balance better if the
  // longest of all heads come first.
  args.heads_outermost = past.selection == nullptr;
  args.own_chunk = params.own_chunk;
  args.first_wave = params.first_wave;
  args.last_wave = params.last_wave;

  args.scale = static_cast<float>(params.scale);
  args.scale_log2 = static_cast<float>(params.scale * 1.4426950408889634);
  args.acc = static_cast<float*>(params.state.acc);
  args.max = static_cast<float*>(params.state.max);
  args.sum = static_cast<float*>(params.state.sum);
  args.o = params.o;
  args.lse = static_cast<float*>(params.lse);
  args.o_strides = params.o_strides;

  switch (shape.head_dim) {
    case 64:
      return (page == 64 ? launch_forward_d64_p64 : launch_forward_d64_p128)(args, params.stream);
    case 128:
      return (page == 64 ? launch_forward_d128_p64 : launch_forward_d128_p128)(args, params.stream);
    default:
      return (page == 64 ? launch_forward_d256_p64 : launch_forward_d256_p128)(args, params.stream);
  }
}

}  // namespace oomb::attention::sm90
