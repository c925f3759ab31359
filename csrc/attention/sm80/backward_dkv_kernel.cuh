#pragma once

// dK = scale * dS^T Q and dV = P^T dO. A block of four warps owns 64 keys of one kv head, a warp 16
// of them, with K and V in registers; queries and dO of all heads of the group stream through two
// stages of shared memory. Everything is computed transposed, so that P^T and dS^T come out of the
// products as the A operands of the next ones, and one block is the only writer of its gradients:
//
//   per 16 queries: S^T = K Q^T, dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T
//   Q

#include "attention/device/gradient_page.cuh"
#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/device/tile.cuh"
#include "attention/sm80/block_place.cuh"
#include "attention/sm80/loads.cuh"
#include "attention/sm80/query_steps.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::sm80 {

constexpr int kKeys = 64;  // of a block

template <int kDim>
struct KeyPass {
  using Tile = device::Tile<kDim>;
  static constexpr int kMatrixBytes = Tile::bytes(kQueries);
  static constexpr int kLse = 2 * kMatrixBytes;
  static constexpr int kDelta = kLse + kQueries * 4;
  static constexpr int kStageBytes = kDelta + kQueries * 4;
  static constexpr int kSharedBytes = 2 * kStageBytes;
};

// A block's keys: rows [row0, row0 + 64) of its own chunk or of a page. Kept in shared memory while
// the main loop needs the registers.
struct KeyPlace {
  bool own;
  int page, row0;
};

// Grid: (own key tiles, then tiles of the wave's pages; kv heads; batch).
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim == 64 ? 3 : 2)
    dkv_kernel(const BackwardParams p, const BackwardPlan plan, int own_tiles) {
  using Pass = KeyPass<kDim>;
  using Tile = device::Tile<kDim>;
  extern __shared__ __align__(1024) char shared_memory[];
  __shared__ QuerySteps<kKeys> steps;
  __shared__ KeyPlace place;
  const uint32_t shared = device::shared_address(shared_memory);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int batch = blockIdx.z, kv_head = blockIdx.y;
  const int num_past = static_cast<int>(p.past.num_tokens);
  const int page_size = static_cast<int>(p.shape.page_size);
  const bool own = static_cast<int>(blockIdx.x) < own_tiles;

  int page = 0, row0, key_first, key_end, key_rows = kKeys;
  const T *k, *v;
  int64_t k_stride = kDim, v_stride = kDim;
  const uint32_t* blocks = nullptr;
  if (own) {
    row0 = blockIdx.x * kKeys;
    key_first = num_past + row0;
    key_end = INT32_MAX;
    key_rows = min(kKeys, static_cast<int>(p.shape.chunk) - row0);
    if (p.visibility.num_keys != nullptr) {
      key_rows = max(0, min(key_rows, p.visibility.num_keys[batch] - key_first));
    }
    k_stride = p.k_strides.token;
    v_stride = p.v_strides.token;
    k = static_cast<const T*>(p.k) + batch * p.k_strides.batch + kv_head * p.k_strides.head +
        row0 * k_stride;
    v = static_cast<const T*>(p.v) + batch * p.v_strides.batch + kv_head * p.v_strides.head +
        row0 * v_stride;
  } else {
    const int parts = page_size / kKeys;
    const int unit = (blockIdx.x - own_tiles) / parts;
    row0 = (blockIdx.x - own_tiles) % parts * kKeys;
    if (plan.work != nullptr) {
      const int list = p.past.selection_heads == 1 ? 0 : kv_head;
      const int64_t row = batch * p.past.selection_heads + list;
      if (unit >= plan.counts[row]) return;
      page = plan.work[row * plan.capacity + unit];
      blocks = plan.blocks + (row * plan.pages + page - p.past.page_begin) * plan.words;
    } else {
      page = static_cast<int>(p.past.page_begin) + unit;
    }
    key_first = page * page_size + row0;
    key_end = device::visible_past(p.visibility, num_past, batch);
    if (key_first >= key_end) return;
    key_rows = min(kKeys, key_end - key_first);
    const int64_t entry = batch * p.past.table_stride + page;
    if (p.grads.dkv_table[entry * 2] < 0 && p.grads.dkv_table[entry * 2 + 1] < 0) return;
    const int64_t matrix = int64_t{page_size} * kDim;
    k = device::keys_of_page<T>(p.past, batch, page) + kv_head * matrix + row0 * kDim;
    v = k + p.shape.kv_heads * matrix;
  }

  // K and V pass through the second stage on their way to registers.
  load_rows<kDim, kKeys>(shared + Pass::kStageBytes, k, k_stride, key_rows);
  load_rows<kDim, kKeys>(shared + Pass::kStageBytes + Pass::kMatrixBytes, v, v_stride, key_rows);
  device::commit_copies();
  if (threadIdx.x == 0) {
    place = KeyPlace{own, page, row0};
    steps.start(p, plan, batch, kv_head, key_first, key_end, own ? row0 / kQueries : 0, blocks);
  }
  __syncthreads();

  const auto start_copies = [&](int index) {
    const QueryStep& step = steps.ring[index % steps.kRing];
    if (step.rows == 0) return;
    const int offset = index % 2 * Pass::kStageBytes;
    load_rows<kDim, kQueries>(shared + offset, static_cast<const T*>(step.q), p.q_strides.token,
                              step.rows);
    load_rows<kDim, kQueries>(shared + offset + Pass::kMatrixBytes, static_cast<const T*>(step.d_o),
                              p.do_strides.token, step.rows);
    const int row = threadIdx.x % kQueries;
    const bool is_lse = threadIdx.x < kQueries;
    const bool inside = row < step.rows;
    const auto* source = static_cast<const float*>(is_lse ? p.lse : p.delta) + step.row;
    copy_word(shared_memory + offset + (is_lse ? Pass::kLse : Pass::kDelta) + row * 4,
              source + (inside ? row : 0), inside);
  };
  start_copies(0);
  device::commit_copies();
  device::wait_copies<1>();
  __syncthreads();
  uint32_t keys[kDim / 16][4], values[kDim / 16][4];
  {
    const uint32_t base =
        shared + Pass::kStageBytes + Tile::block_a(lane) + warp * 16 * Tile::kRowBytes;
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      device::load_matrices(keys[i], base ^ (i * 32));
      device::load_matrices(values[i], (base ^ (i * 32)) + Pass::kMatrixBytes);
    }
  }

  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  const float scale = static_cast<float>(p.scale) * kLog2E;
  for (int index = 0; steps.ring[index % steps.kRing].rows > 0; ++index) {
    device::wait_copies<0>();
    __syncthreads();
    start_copies(index + 1);
    if (lane == 0 && warp == index % 4) steps.describe(p, plan, index + 2);
    device::commit_copies();
    const int offset = index % 2 * Pass::kStageBytes;

    // Not unrolled: with more of the products in flight the registers would not suffice.
#pragma unroll 1
    for (int part = 0; part < kQueries / 16; ++part) {
      const uint32_t rows = shared + offset + part * 16 * Tile::kRowBytes;
      const uint32_t query_base = rows + Tile::block_b(lane);
      const uint32_t query_columns = rows + Tile::block_a(lane);
      float s[2][4] = {}, dp[2][4] = {};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        const uint32_t address = query_base ^ (i * 32);
        uint32_t b[4];
        device::load_matrices(b, address);
        device::multiply<T>(s[0], keys[i], b[0], b[1]);
        device::multiply<T>(s[1], keys[i], b[2], b[3]);
        device::load_matrices(b, address + Pass::kMatrixBytes);
        device::multiply<T>(dp[0], values[i], b[0], b[1]);
        device::multiply<T>(dp[1], values[i], b[2], b[3]);
      }
      if (steps.ring[index % steps.kRing].masked) {
        const int key = steps.key_first + warp * 16 + lane / 4;
        const int query = steps.ring[index % steps.kRing].first + part * 16 + (lane % 4) * 2;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const auto range =
                device::visible_keys(p.shape, p.visibility, static_cast<int>(p.past.num_tokens),
                                     blockIdx.z, query + n * 8 + c);
            const int end = min(range.end, steps.key_end);
            if (key < range.begin || key >= end) s[n][c] = -INFINITY;
            if (key + 8 < range.begin || key + 8 >= end) s[n][2 + c] = -INFINITY;
          }
        }
      }
      uint32_t probabilities[4], ds[4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        // The pair of queries that this lane's columns belong to.
        const uint32_t pair = shared + offset + (part * 16 + n * 8 + (lane % 4) * 2) * 4;
        float2 lse = device::load_pair(pair + Pass::kLse);
        const float2 delta = device::load_pair(pair + Pass::kDelta);
        lse.x = lse.x == -INFINITY ? INFINITY : lse.x * kLog2E;
        lse.y = lse.y == -INFINITY ? INFINITY : lse.y * kLog2E;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float p0 = device::exp2_fast(fmaf(s[n][2 * r], scale, -lse.x));
          const float p1 = device::exp2_fast(fmaf(s[n][2 * r + 1], scale, -lse.y));
          probabilities[2 * n + r] = device::pack<T>(p0, p1);
          ds[2 * n + r] =
              device::pack<T>(p0 * (dp[n][2 * r] - delta.x), p1 * (dp[n][2 * r + 1] - delta.y));
        }
      }
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b, (query_columns ^ (n * 32)) + Pass::kMatrixBytes);
        device::multiply<T>(dv[2 * n], probabilities, b[0], b[1]);
        device::multiply<T>(dv[2 * n + 1], probabilities, b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        device::load_matrices_transposed(b, (query_columns ^ (n * 32)));
        device::multiply<T>(dk[2 * n], ds, b[0], b[1]);
        device::multiply<T>(dk[2 * n + 1], ds, b[2], b[3]);
      }
    }
  }

  const float out_scale = static_cast<float>(p.scale);
  const BlockPlace block;
  const int column = (lane % 4) * 2;
  if (place.own) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = place.row0 + warp * 16 + r * 8 + lane / 4;
      if (row >= p.shape.chunk) continue;
      T* dk_row = static_cast<T*>(p.dk) + block.batch * p.dk_strides.batch +
                  block.head * p.dk_strides.head + row * p.dk_strides.token + column;
      T* dv_row = static_cast<T*>(p.dv) + block.batch * p.dv_strides.batch +
                  block.head * p.dv_strides.head + row * p.dv_strides.token + column;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<uint32_t*>(dk_row + n * 8) =
            device::pack<T>(dk[n][2 * r] * out_scale, dk[n][2 * r + 1] * out_scale);
        *reinterpret_cast<uint32_t*>(dv_row + n * 8) =
            device::pack<T>(dv[n][2 * r], dv[n][2 * r + 1]);
      }
    }
    return;
  }
  const device::GradientPage dk_page(p.grads, p.past.table_stride, block.batch, place.page, 0);
  const device::GradientPage dv_page(p.grads, p.past.table_stride, block.batch, place.page, 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = place.row0 + warp * 16 + r * 8 + lane / 4;
    if (place.page * page_size + row >= steps.key_end) continue;
    const int64_t element = (int64_t{block.head} * page_size + row) * kDim + column;
    dk_page.add_pairs<kDim / 8>(element, [&](int n) {
      return make_float2(dk[n][2 * r] * out_scale, dk[n][2 * r + 1] * out_scale);
    });
    dv_page.add_pairs<kDim / 8>(element,
                                [&](int n) { return make_float2(dv[n][2 * r], dv[n][2 * r + 1]); });
  }
}

template <typename T, int kDim>
void launch_dkv(const BackwardParams& params, const BackwardPlan& plan) {
  using Pass = KeyPass<kDim>;
  const int64_t parts = params.shape.page_size / kKeys;
  const int64_t own_tiles = params.own_chunk ? ceil_div(params.shape.chunk, kKeys) : 0;
  int64_t page_tiles = 0;
  if (params.grads.dkv_table != nullptr) {
    page_tiles = parts * (plan.work != nullptr ? plan.capacity : plan.pages);
  }
  if (own_tiles + page_tiles == 0) return;
  const auto kernel = dkv_kernel<T, kDim>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Pass::kSharedBytes),
      "cudaFuncSetAttribute");
  const dim3 grid(own_tiles + page_tiles, params.shape.kv_heads, params.shape.batch);
  kernel<<<grid, kThreads, Pass::kSharedBytes, static_cast<cudaStream_t>(params.stream)>>>(
      params, plan, static_cast<int>(own_tiles));
  check_launch("attention_backward dK, dV (sm80)");
}

}  // namespace oomb::attention::sm80
