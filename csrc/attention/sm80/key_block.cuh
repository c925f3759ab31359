#pragma once

// The keys that a thread block of the backward owns: where they come from, and where their gradient
// goes.

#include <cstdint>

#include "attention/device/gradient_page.cuh"
#include "attention/device/numeric.cuh"
#include "attention/device/visibility.cuh"
#include "attention/sm80/backward_plan.h"
#include "attention/sm80/column_parts.cuh"

namespace oomb::attention::sm80 {

// Rows [row0, row0 + kKeys) of the own chunk, or of a page.
struct KeyBlock {
  bool own;
  int batch, kv_head, page, row0;
};

template <typename T>
struct KeySource {
  const T *k, *v;
  int64_t k_stride, v_stride;
  int first;                               // number of the first key
  int end;                                 // keys from here on are visible to nobody
  int rows;                                // that exist
  const uint32_t* query_blocks = nullptr;  // that list the page; null: all
};

// A thread block's place in a grid of own key tiles, then tiles of the wave's pages.
template <int kKeys>
__device__ __forceinline__ void place_block(const BackwardParams& p, int own_tiles,
                                            KeyBlock& block) {
  const int tile = block.own ? blockIdx.x : blockIdx.x - own_tiles;
  const int parts = block.own ? 1 : static_cast<int>(p.shape.page_size) / kKeys;
  block.page = tile / parts;
  block.row0 = (block.own ? tile : tile % parts) * kKeys;
}

// False where there is nothing to do. `block.page` counts the pages to work on; it becomes the
// number of the page.
template <typename T, int kDim, int kKeys>
__device__ bool find_keys(const BackwardParams& p, const BackwardPlan& plan, KeyBlock& block,
                          KeySource<T>& keys) {
  const int num_past = static_cast<int>(p.past.num_tokens);
  const int batch = block.batch, kv_head = block.kv_head;
  if (block.own) {
    keys.first = num_past + block.row0;
    keys.end = INT32_MAX;
    keys.rows = min(kKeys, static_cast<int>(p.shape.chunk) - block.row0);
    if (p.visibility.num_keys != nullptr) {
      keys.rows = max(0, min(keys.rows, p.visibility.num_keys[batch] - keys.first));
    }
    keys.k_stride = p.k_strides.token;
    keys.v_stride = p.v_strides.token;
    keys.k = static_cast<const T*>(p.k) + batch * p.k_strides.batch + kv_head * p.k_strides.head +
             block.row0 * keys.k_stride;
    keys.v = static_cast<const T*>(p.v) + batch * p.v_strides.batch + kv_head * p.v_strides.head +
             block.row0 * keys.v_stride;
    return true;
  }
  if (plan.work != nullptr) {
    const int list = p.past.selection_heads == 1 ? 0 : kv_head;
    const int64_t row = batch * p.past.selection_heads + list;
    if (block.page >= plan.counts[row]) return false;
    block.page = plan.work[row * plan.capacity + block.page];
    keys.query_blocks =
        plan.blocks + (row * plan.pages + block.page - p.past.page_begin) * plan.words;
  } else {
    block.page += static_cast<int>(p.past.page_begin);
  }
  const int page_size = static_cast<int>(p.shape.page_size);
  keys.first = block.page * page_size + block.row0;
  keys.end = device::visible_past(p.visibility, num_past, batch);
  if (keys.first >= keys.end) return false;
  keys.rows = min(kKeys, keys.end - keys.first);
  const int64_t matrix = int64_t{page_size} * kDim;
  keys.k_stride = keys.v_stride = kDim;
  keys.k =
      device::keys_of_page<T>(p.past, batch, block.page) + kv_head * matrix + block.row0 * kDim;
  keys.v = keys.k + p.shape.kv_heads * matrix;
  return true;
}

// Writes the gradient of a block's keys, or adds it to the gradient page. A warp has 16 of the
// keys, a thread the rows lane / 4 and lane / 4 + 8 of these. key_end: as above.
template <typename T, int kDim>
__device__ void write_gradient(const BackwardParams& p, const KeyBlock& block, int key_end,
                               const float (&dk)[kDim / 8][4], const float (&dv)[kDim / 8][4]) {
  const float scale = static_cast<float>(p.scale);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = block.row0 + warp * 16 + lane / 4, column = (lane % 4) * 2;
  const auto dk_pair = [&](int r, int n) {
    return make_float2(dk[n][2 * r] * scale, dk[n][2 * r + 1] * scale);
  };
  const auto dv_pair = [&](int r, int n) { return make_float2(dv[n][2 * r], dv[n][2 * r + 1]); };
  if (block.own) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = first_row + r * 8;
      if (row >= p.shape.chunk) continue;
      T* dk_row = static_cast<T*>(p.dk) + block.batch * p.dk_strides.batch +
                  block.kv_head * p.dk_strides.head + row * p.dk_strides.token + column;
      T* dv_row = static_cast<T*>(p.dv) + block.batch * p.dv_strides.batch +
                  block.kv_head * p.dv_strides.head + row * p.dv_strides.token + column;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float2 x = dk_pair(r, n), y = dv_pair(r, n);
        *reinterpret_cast<uint32_t*>(dk_row + n * 8) = device::pack<T>(x.x, x.y);
        *reinterpret_cast<uint32_t*>(dv_row + n * 8) = device::pack<T>(y.x, y.y);
      }
    }
    return;
  }
  const int page_size = static_cast<int>(p.shape.page_size);
  const device::GradientPage dk_page(p.grads, p.past.table_stride, block.batch, block.page, 0);
  const device::GradientPage dv_page(p.grads, p.past.table_stride, block.batch, block.page, 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 8;
    if (block.page * page_size + row >= key_end) continue;
    const int64_t element = (int64_t{block.kv_head} * page_size + row) * kDim + column;
    dk_page.add_pairs<kDim / 8>(element, [&](int n) { return dk_pair(r, n); });
    dv_page.add_pairs<kDim / 8>(element, [&](int n) { return dv_pair(r, n); });
  }
}

// The same for one of the two, and for the columns that the warp has: is_value says which.
template <typename T, int kDim, typename Parts>
__device__ void write_sum(const BackwardParams& p, const KeyBlock& block, int key_end,
                          bool is_value, const float (&sum)[Parts::kColumns / 8][4], float factor) {
  constexpr int kColumns = Parts::kColumns;
  const int lane = threadIdx.x % 32;
  const int first_row = block.row0 + Parts::row_warp() * 16 + lane / 4;
  const int column = Parts::part() * kColumns + (lane % 4) * 2;
  const auto pair = [&](int r, int n) {
    return make_float2(sum[n][2 * r] * factor, sum[n][2 * r + 1] * factor);
  };
  if (block.own) {
    const Strides& strides = is_value ? p.dv_strides : p.dk_strides;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = first_row + r * 8;
      if (row >= p.shape.chunk) continue;
      T* target = static_cast<T*>(is_value ? p.dv : p.dk) + block.batch * strides.batch +
                  block.kv_head * strides.head + row * strides.token + column;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float2 x = pair(r, n);
        *reinterpret_cast<uint32_t*>(target + n * 8) = device::pack<T>(x.x, x.y);
      }
    }
    return;
  }
  const int page_size = static_cast<int>(p.shape.page_size);
  const device::GradientPage page(p.grads, p.past.table_stride, block.batch, block.page, is_value);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + r * 8;
    if (block.page * page_size + row >= key_end) continue;
    const int64_t element = (int64_t{block.kv_head} * page_size + row) * kDim + column;
    page.add_pairs<kColumns / 8>(element, [&](int n) { return pair(r, n); });
  }
}

}  // namespace oomb::attention::sm80
