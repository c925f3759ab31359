#pragma once

// dQ where it is not summed on the way: with page lists, in deterministic mode and with pages of
// 64. Units of the main kernel that are at work together share query blocks in no useful order, so
// that adding dQ up in a fixed order would make them wait for each other; and with units of 64 keys
// the sums would cost twice the traffic. Instead this kernel walks a query block's own list once
// more, as the forward does, and recomputes S and dP:
//
//   S  = Q K^T     64 queries x 64 keys
//   dP = dO V^T    the same, while S becomes P
//   dQ += dS K     dS and the sum in registers
//
// Q and dO stay in shared memory: kept in registers as well, for head dimension 64 ptxas 13.0 gave
// their registers to dS and the result was wrong.
//
// Three warpgroups: the first loads, the other two own one query tile of one head each. With pages
// of 128 they take the two tiles of a query block; with pages of 64, two heads of a group.
// Order of the sum: own tiles ascending, then listed pages ascending; a wave resumes from dq_acc.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/backward_plan.h"
#include "attention/sm90/hidden_rows.cuh"
#include "attention/sm90/ptx/backward_ops.h"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/tma.h"
#include "attention/sm90/ptx/wgmma.h"
#include "common/cuda_check.h"

namespace oomb::attention::sm90 {

inline constexpr int kQueryKernelThreads = 384;
inline constexpr int kQueryKernelStages = 4;

// A stage's keys.
struct KeyInfo {
  int32_t key_begin;  // in the sequence; -1: no more
  int32_t row_begin;  // rows that exist
  int32_t row_end;
  int32_t masked;
};

template <int kDim>
struct QueryShared {
  static constexpr int kTile = 64 * kDim;

  alignas(1024) __nv_bfloat16 k[kQueryKernelStages][kTile];
  alignas(1024) __nv_bfloat16 v[kQueryKernelStages][kTile];
  alignas(1024) __nv_bfloat16 q[2][kTile];
  alignas(1024) __nv_bfloat16 d_o[2][kTile];
  KeyInfo keys[kQueryKernelStages];
  uint64_t full[kQueryKernelStages], empty[kQueryKernelStages];
  uint64_t q_full;
  uint64_t settled;  // see hidden_rows.cuh
};

// What a warpgroup works on.
struct QueryUnit {
  int batch;
  int kv_head;
  int block;  // of page_size queries
  int tile;   // of 64 queries
  int head;
  bool valid;

  __device__ QueryUnit(const BackwardKernelArgs& args, int half) {
    const Shape& shape = args.params.shape;
    const int group = args.group;
    const int kv_heads = static_cast<int>(shape.kv_heads);
    const int page_size = static_cast<int>(shape.page_size);
    const int chunk = static_cast<int>(shape.chunk);
    const int blocks = (chunk + page_size - 1) / page_size;
    const bool two_tiles = page_size == 2 * kQueryRows;
    const int units = two_tiles ? group : (group + 1) / 2;
    int index = blockIdx.x;
    const int of_group = two_tiles ? index % units : 2 * (index % units) + half;
    index /= units;
    block = index % blocks;
    index /= blocks;
    kv_head = index % kv_heads;
    batch = index / kv_heads;
    tile = two_tiles ? 2 * block + half : block;
    head = kv_head * group + of_group;
    valid = of_group < group && tile * kQueryRows < chunk;
  }
};

// Loads queries once, then keys and values. One warp; its lanes walk together and lane 0 issues.
template <int kDim>
__device__ inline void load_keys(const BackwardKernelArgs& args, QueryShared<kDim>& shared) {
  const BackwardParams& params = args.params;
  const PastPages& past = params.past;
  const QueryUnit unit(args, 0);
  const QueryUnit other(args, 1);
  const int chunk = static_cast<int>(params.shape.chunk);
  const int page_size = static_cast<int>(params.shape.page_size);
  const int past_tokens = static_cast<int>(past.num_tokens);
  const bool leads = threadIdx.x == 0;

  if (leads) barrier_arrive_expect(&shared.q_full, sizeof(shared.q) + sizeof(shared.d_o));
#pragma unroll
  for (int i = 0; i < 2 && leads; ++i) {
    // What does not exist arrives as zeros.
    const QueryUnit& half = i == 0 ? unit : other;
    const int row = half.valid ? half.tile * kQueryRows : chunk;
    const int head = half.valid ? half.head : 0;
    for (int d = 0; d < kDim; d += 64) {
      tma_load_4d(shared.q[i] + d * 64, args.q, &shared.q_full, d, row, head, unit.batch);
      tma_load_4d(shared.d_o[i] + d * 64, args.d_o, &shared.q_full, d, row, head, unit.batch);
    }
  }

  const QueryTile* tiles = args.workspace.query_tiles + unit.batch * args.query_tiles;
  int lower_min = tiles[unit.tile].lower_min;
  int lower_max = tiles[unit.tile].lower_max;
  if (other.valid) {
    lower_min = min(lower_min, tiles[other.tile].lower_min);
    lower_max = max(lower_max, tiles[other.tile].lower_max);
  }
  int num_keys = 0x7fffffff;
  if (params.visibility.num_keys != nullptr) num_keys = params.visibility.num_keys[unit.batch];

  int step = 0;
  uint32_t settled = 0;
  // Fills a stage with the keys [key_begin + row_begin, key_begin + row_end); `rows` of the tile
  // are there, the others arrive as zeros. copy(to, is K, barrier, first column) is called by one
  // lane.
  const auto put = [&](int key_begin, int row_end, int rows, bool masked, const auto& copy) {
    const int stage = step % kQueryKernelStages;
    barrier_wait(&shared.empty[stage], (step / kQueryKernelStages & 1) ^ 1);
    ++step;
    const int row_begin = max(0, lower_min - key_begin);
    const bool hides = row_begin > 0 || row_end < rows;
    if (leads) {
      KeyInfo& info = shared.keys[stage];
      info.key_begin = key_begin;
      info.row_begin = row_begin;
      info.row_end = row_end;
      info.masked = masked || row_begin > 0 || row_end < kQueryKernelKeys || lower_max > key_begin;
      uint64_t* barrier = hides ? &shared.settled : &shared.full[stage];
      barrier_arrive_expect(barrier, 2 * sizeof(shared.k[0]));
#pragma unroll 1
      for (int d = 0; d < kDim; d += 64) {
        copy(shared.k[stage] + d * 64, true, barrier, d);
        copy(shared.v[stage] + d * 64, false, barrier, d);
      }
    }
    if (hides) {
      barrier_wait(&shared.settled, settled & 1);
      ++settled;
      zero_rows_outside<kQueryKernelKeys, kDim>(shared.k[stage], row_begin, row_end);
      zero_rows_outside<kQueryKernelKeys, kDim>(shared.v[stage], row_begin, row_end);
      if (leads) barrier_arrive(&shared.full[stage]);
    }
  };

  if (args.own_tiles > 0) {
    const int first = max(0, lower_min - past_tokens) / kQueryKernelKeys;
    const int last = other.valid ? other.tile : unit.tile;
#pragma unroll 1
    for (int tile = first; tile <= last; ++tile) {
      const int row = tile * kQueryKernelKeys;
      const int rows = min(kQueryKernelKeys, chunk - row);
      const int row_end = min(rows, num_keys - past_tokens - row);
      if (row_end <= 0) break;
      put(past_tokens + row, row_end, rows, tile >= unit.tile,
          [&](void* to, bool is_key, uint64_t* barrier, int d) {
            tma_load_4d(to, is_key ? args.k : args.v, barrier, d, row, unit.kv_head, unit.batch);
          });
    }
  }

  if (args.tiling.past_tiles > 0) {
    const int lists = static_cast<int>(past.selection_heads);
    const int blocks = (chunk + page_size - 1) / page_size;
    const int64_t list = (static_cast<int64_t>(unit.batch) * blocks + unit.block) * lists +
                         (lists == 1 ? 0 : unit.kv_head);
    const int32_t* pages = past.selection + list * past.budget;
    const int budget = static_cast<int>(past.budget);
    const int tokens = min(past_tokens, num_keys);
#pragma unroll 1
    for (int i = 0; i < budget; ++i) {
      const int page = pages[i];
      if (page < 0 || page >= past.page_end) break;
      if (page < past.page_begin) continue;
      if ((page + 1) * page_size <= lower_min) continue;
      const int slot = past.block_table[unit.batch * past.table_stride + page];
      if (slot < 0) __trap();  // a page that is not resident must never be read as zeros
#pragma unroll 1
      for (int row = 0; row < page_size; row += kQueryKernelKeys) {
        const int key_begin = page * page_size + row;
        const int row_end = min(kQueryKernelKeys, tokens - key_begin);
        if (row_end <= 0) break;
        const int k_row = slot * args.pool_rows_per_slot + unit.kv_head * page_size + row;
        const int v_row = k_row + static_cast<int>(params.shape.kv_heads) * page_size;
        put(key_begin, row_end, kQueryKernelKeys, false,
            [&](void* to, bool is_key, uint64_t* barrier, int d) {
              tma_load_2d(to, args.pool, barrier, d, is_key ? k_row : v_row);
            });
      }
    }
  }
  const int stage = step % kQueryKernelStages;
  barrier_wait(&shared.empty[stage], (step / kQueryKernelStages & 1) ^ 1);
  if (leads) {
    shared.keys[stage].key_begin = -1;
    barrier_arrive(&shared.full[stage]);
  }
}

template <int kDim>
__device__ __forceinline__ void compute_queries(const BackwardKernelArgs& args,
                                                QueryShared<kDim>& shared, int half) {
  const BackwardParams& params = args.params;
  const int chunk = static_cast<int>(params.shape.chunk);
  const int past_tokens = static_cast<int>(params.past.num_tokens);
  const int lane = threadIdx.x % 32;
  const QueryUnit unit(args, half);
  const bool valid = unit.valid;
  const int batch_head = unit.batch * static_cast<int>(params.shape.query_heads) + unit.head;
  // This thread's rows are row and row + 8.
  const int row = unit.tile * kQueryRows + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column0 = lane % 4 * 2;

  float lse[2] = {INFINITY, INFINITY};
  float delta[2] = {0.0f, 0.0f};
  int lower[2] = {0, 0};
  float dq[kDim / 2];
  if (valid) {
    const int64_t padded = static_cast<int64_t>(args.query_tiles) * kQueryRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row + 8 * i;
      lse[i] = args.workspace.lse[batch_head * padded + r];
      delta[i] = args.workspace.delta[batch_head * padded + r];
      if (r >= chunk) continue;
      if (params.visibility.first_key != nullptr) {
        lower[i] = params.visibility.first_key[static_cast<int64_t>(unit.batch) * chunk + r];
      }
      if (params.visibility.window > 0) {
        lower[i] = static_cast<int>(
            max(static_cast<int64_t>(lower[i]), past_tokens + r - params.visibility.window + 1));
      }
    }
  }
  // One straight piece of code for sums that start and sums that resume: with a branch the compiler
  // would copy them between registers inside the loop.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = row + 8 * i;
    const bool resumes = valid && !params.first_wave && r < chunk;
    const float* sum = static_cast<const float*>(params.dq_acc) +
                       (static_cast<int64_t>(batch_head) * chunk + r) * kDim + column0;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      load_pair_if(resumes, sum + 8 * j, dq[4 * j + 2 * i], dq[4 * j + 2 * i + 1]);
    }
  }

  if (!valid) {  // leaves the tensor cores to the other one
    for (int step = 0;; ++step) {
      const int stage = step % kQueryKernelStages;
      barrier_wait(&shared.full[stage], step / kQueryKernelStages & 1);
      if (shared.keys[stage].key_begin < 0) return;
      if (lane == 0) barrier_arrive(&shared.empty[stage]);
    }
  }

  barrier_wait(&shared.q_full, 0);
  const uint64_t q_rows = operand_k_major(shared.q[half]);
  const uint64_t do_rows = operand_k_major(shared.d_o[half]);

  for (int step = 0;; ++step) {
    const int stage = step % kQueryKernelStages;
    barrier_wait(&shared.full[stage], step / kQueryKernelStages & 1);
    const KeyInfo& info = shared.keys[stage];
    if (info.key_begin < 0) break;

    // Declared here, so that none of them lives on into the next step.
    float s[32];
    float dp[32];
    uint32_t packed_ds[16];
    const uint64_t k_rows = operand_k_major(shared.k[stage]);
    const uint64_t v_rows = operand_k_major(shared.v[stage]);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      wgmma_ss<64>(s, operand_advance(q_rows, operand_k_step(d, 64)),
                   operand_advance(k_rows, operand_k_step(d, 64)), d > 0);
    }
    wgmma_commit();
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      wgmma_ss<64>(dp, operand_advance(do_rows, operand_k_step(d, 64)),
                   operand_advance(v_rows, operand_k_step(d, 64)), d > 0);
    }
    wgmma_commit();

    wgmma_wait<1>();  // S, and dQ of the step before
    if (step > 0 && lane == 0) {
      barrier_arrive(&shared.empty[(step - 1) % kQueryKernelStages]);
    }
    if (info.masked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Own keys lie at past_tokens + their row, so the causal rule reads the same for all.
        const int begin = max(info.row_begin, lower[i] - info.key_begin);
        const int end = min(info.row_end, past_tokens + row + 8 * i + 1 - info.key_begin);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = 8 * j + column0 + e;
            if (key < begin || key >= end) s[4 * j + 2 * i + e] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = exp2_approx(fmaf(s[i], args.scale_log2, -lse[i / 2 % 2]));
    }
    // Passes at once; but ptxas moves the exponentials behind the wait for dP if nothing but
    // arithmetic lies between, and then nothing runs beside that product.
    barrier_wait(&shared.full[stage], step / kQueryKernelStages & 1);
    wgmma_wait<0>();  // dP
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float minus = delta[i % 2];
      packed_ds[i] =
          pack_bf16(s[2 * i] * (dp[2 * i] - minus), s[2 * i + 1] * (dp[2 * i + 1] - minus));
    }
    const uint64_t k_columns = operand_mn_major(shared.k[stage], 64 * 128);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wgmma_rs<kDim, true>(dq, packed_ds[4 * i], packed_ds[4 * i + 1], packed_ds[4 * i + 2],
                           packed_ds[4 * i + 3], operand_advance(k_columns, i * 2048), 1);
    }
    wgmma_commit();
  }
  wgmma_wait<0>();

  const float scale = static_cast<float>(params.scale);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t r = row + 8 * i;
    if (r >= chunk) continue;
    if (params.last_wave) {
      auto* target = static_cast<__nv_bfloat16*>(params.dq) + unit.batch * params.dq_strides.batch +
                     unit.head * params.dq_strides.head + r * params.dq_strides.token + column0;
      // The q and d_o of a row that sees nothing may hold anything.
      const bool seeing = lse[i] != INFINITY;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(target + 8 * j) =
            seeing ? pack_bf16(dq[4 * j + 2 * i] * scale, dq[4 * j + 2 * i + 1] * scale) : 0;
      }
    } else {
      float* sum = static_cast<float*>(params.dq_acc) +
                   (static_cast<int64_t>(batch_head) * chunk + r) * kDim + column0;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        *reinterpret_cast<float2*>(sum + 8 * j) =
            make_float2(dq[4 * j + 2 * i], dq[4 * j + 2 * i + 1]);
      }
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kQueryKernelThreads, 1)
    query_kernel(const __grid_constant__ BackwardKernelArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  QueryShared<kDim>& shared = *reinterpret_cast<QueryShared<kDim>*>(memory);
  const int warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    barrier_init(&shared.q_full, 1);
    barrier_init(&shared.settled, 1);
    for (int i = 0; i < kQueryKernelStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], 8);  // a lane of each computing warp
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    registers_shrink<40>();
    if (threadIdx.x < 32) load_keys<kDim>(args, shared);
  } else {
    registers_grow<232>();
    // The same in all lanes, also to the compiler.
    compute_queries<kDim>(args, shared, __shfl_sync(0xffffffff, warpgroup - 1, 0));
  }
}

template <int kDim>
void launch_query_kernel(const BackwardKernelArgs& args) {
  constexpr int kBytes = sizeof(QueryShared<kDim>);
  static_assert(kBytes <= 227 * 1024);
  const Shape& shape = args.params.shape;
  const int64_t group = shape.query_heads / shape.kv_heads;
  const int64_t blocks = (shape.chunk + shape.page_size - 1) / shape.page_size;
  const int64_t units = shape.page_size == 2 * kQueryRows ? group : (group + 1) / 2;
  check_cuda(
      cudaFuncSetAttribute(query_kernel<kDim>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
      "cudaFuncSetAttribute");
  query_kernel<kDim>
      <<<static_cast<uint32_t>(shape.batch * shape.kv_heads * blocks * units), kQueryKernelThreads,
         kBytes, static_cast<cudaStream_t>(args.params.stream)>>>(args);
  check_launch("attention backward, dq");
}

}  // namespace oomb::attention::sm90
