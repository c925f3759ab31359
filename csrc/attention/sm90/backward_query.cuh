#pragma once

// dQ where it is not summed on the way: with page lists, in deterministic mode and with pages of
// 64, and at head dim 256. Units of the main kernel that are at work together share query blocks in
// no useful order, so that adding dQ up in a fixed order would make them wait for each other; and
// with units of 64 keys the sums would cost twice the traffic. Instead this kernel walks a query
// block's pages once more, as the forward does, and recomputes S and dP:
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
#include "attention/sm90/backward_query_loader.cuh"
#include "attention/sm90/ptx/backward_ops.h"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/wgmma.h"
#include "common/cuda_check.h"

namespace oomb::attention::sm90 {

inline constexpr int kQueryKernelThreads = 384;

template <int kDim>
__device__ __forceinline__ void compute_queries(const BackwardKernelArgs& args,
                                                QueryShared<kDim>& shared, int half) {
  using Shared = QueryShared<kDim>;
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
      const int k_stage = step % Shared::kKeyStages;
      const int v_stage = step % Shared::kValueStages;
      barrier_wait(&shared.k_full[k_stage], step / Shared::kKeyStages & 1);
      if (shared.keys[k_stage].key_begin < 0) return;
      barrier_wait(&shared.v_full[v_stage], step / Shared::kValueStages & 1);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.k_empty[k_stage]);
        barrier_arrive(&shared.v_empty[v_stage]);
      }
    }
  }

  barrier_wait(&shared.q_full, 0);
  const uint64_t q_rows = operand_k_major(shared.q[half]);
  const uint64_t do_rows = operand_k_major(shared.d_o[half]);

  for (int step = 0;; ++step) {
    const int k_stage = step % Shared::kKeyStages;
    const int v_stage = step % Shared::kValueStages;
    barrier_wait(&shared.k_full[k_stage], step / Shared::kKeyStages & 1);
    const KeyInfo& info = shared.keys[k_stage];
    if (info.key_begin < 0) break;

    // Declared here, so that none of them lives on into the next step.
    float s[32];
    float dp[32];
    uint32_t packed_ds[16];
    const uint64_t k_rows = operand_k_major(shared.k[k_stage]);
    const uint64_t v_rows = operand_k_major(shared.v[v_stage]);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      wgmma_ss<64>(s, operand_advance(q_rows, operand_k_step(d, 64)),
                   operand_advance(k_rows, operand_k_step(d, 64)), d > 0);
    }
    wgmma_commit();
    // Sums of 128 registers leave no room for dP beside the dS of the step before.
    const auto keys_done = [&] {
      if (step > 0 && lane == 0) {
        barrier_arrive(&shared.k_empty[(step - 1) % Shared::kKeyStages]);
      }
    };
    if constexpr (kDim == 256) {
      wgmma_wait<1>();  // dQ of the step before
      keys_done();
    }
    barrier_wait(&shared.v_full[v_stage], step / Shared::kValueStages & 1);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      wgmma_ss<64>(dp, operand_advance(do_rows, operand_k_step(d, 64)),
                   operand_advance(v_rows, operand_k_step(d, 64)), d > 0);
    }
    wgmma_commit();

    wgmma_wait<1>();  // S, and dQ of the step before
    if constexpr (kDim != 256) keys_done();
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
    barrier_wait(&shared.k_full[k_stage], step / Shared::kKeyStages & 1);
    wgmma_wait<0>();  // dP
    if (lane == 0) barrier_arrive(&shared.v_empty[v_stage]);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float minus = delta[i % 2];
      packed_ds[i] =
          pack_bf16(s[2 * i] * (dp[2 * i] - minus), s[2 * i + 1] * (dp[2 * i + 1] - minus));
    }
    const uint64_t k_columns = operand_mn_major(shared.k[k_stage], 64 * 128);
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
    // To the empty ones a lane of each computing warp arrives.
    for (int i = 0; i < QueryShared<kDim>::kKeyStages; ++i) {
      barrier_init(&shared.k_full[i], 1);
      barrier_init(&shared.k_empty[i], 8);
    }
    for (int i = 0; i < QueryShared<kDim>::kValueStages; ++i) {
      barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.v_empty[i], 8);
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
