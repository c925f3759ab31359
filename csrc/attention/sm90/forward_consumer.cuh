#pragma once

// A consumer of the forward: a warpgroup that owns 64 rows of one head.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/sm90/forward_args.h"
#include "attention/sm90/forward_shared.cuh"
#include "attention/sm90/ptx/barrier.h"
#include "attention/sm90/ptx/ldmatrix.h"
#include "attention/sm90/ptx/wgmma.h"

namespace oomb::attention::sm90 {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// The same value in all four lanes: addition commutes.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Lane q of a quad gives words [i] of columns 8i + 2q and gets the four words of columns 8q .. 8q
// + 7.
__device__ __forceinline__ void quad_transpose(uint32_t (&x)[4], int32_t quad) {
#pragma unroll
  for (int step = 1; step <= 2; ++step) {
    const bool upper = quad & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + step], step);
      if (upper) {
        x[i] = got;
      } else {
        x[i + step] = got;
      }
    }
  }
}

template <int kHeadDim, int kPageSize>
struct Consumer {
  using Shared = ForwardShared<kHeadDim, kPageSize>;
  using Config = ForwardConfig<kHeadDim, kPageSize>;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kScores = kTileKeys / 2;  // registers of S per thread
  static constexpr int kOutputs = kHeadDim / 2;

  const ForwardArgs& args;
  Shared& shared;
  const int32_t consumer;
  const int32_t thread;  // in the warpgroup
  Ring<Shared::kStages> k_ring, v_ring;

  // Registers that wgmma works on; rows a = thread's first, b = 8 further down.
  uint32_t q[Config::kQueriesInRegisters ? kHeadDim / 16 : 1][4];
  float s[kScores];
  uint32_t p[kTileKeys / 4];
  float acc[kOutputs];
  float max_a, max_b, sum_a, sum_b;
  int32_t first_a, first_b, end_a, end_b;  // visible keys of the own chunk; past: end_past
  int32_t end_past;

  __device__ __forceinline__ Consumer(const ForwardArgs& args, Shared& shared, int32_t consumer)
      : args(args), shared(shared), consumer(consumer), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ int32_t quad() const { return thread % 4; }

  // One arrival per warp, after all its lanes are done.
  __device__ __forceinline__ void release(uint64_t* barrier) {
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(barrier);
  }

  // Taking turns: named barrier 1 + i admits consumer i to the tensor cores.
  __device__ __forceinline__ void turn_begin() { named_barrier_wait(1 + consumer, 256); }
  __device__ __forceinline__ void turn_end() {
    named_barrier_arrive(consumer + 1 == Config::kConsumers ? 1 : 2 + consumer, 256);
  }

  __device__ __forceinline__ TileNote wait_tile() {
    barrier_wait(&shared.k_full[k_ring.stage()], k_ring.phase());
    const TileNote note = shared.notes[k_ring.stage()];
    return {__shfl_sync(kAllLanes, note.key, 0), __shfl_sync(kAllLanes, note.flags, 0)};
  }

  __device__ __forceinline__ void load_queries() {
    const uint32_t warp_rows = shared_address(shared.q[consumer]) + thread / 32 * 16 * 128;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      load_operand_a(q[step], warp_rows + step / 4 * kTaskRows * 128, step % 4 * 16, thread % 32);
    }
    release(&shared.q_empty);
  }

  __device__ __forceinline__ void issue_scores() {
    const uint64_t k =
        operand_advance(operand_k_major(shared.k[0]), k_ring.stage() * Shared::kTileBytes);
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      const uint64_t k_step = operand_advance(k, operand_k_step(d, kTileKeys));
      if constexpr (Config::kQueriesInRegisters) {
        const auto& a = q[d / 16];
        wgmma_rs<kTileKeys>(s, a[0], a[1], a[2], a[3], k_step, d > 0);
      } else {
        const uint64_t rows =
            operand_advance(operand_k_major(shared.q[0]), consumer * (Shared::kTaskElements * 2));
        wgmma_ss<kTileKeys>(s, operand_advance(rows, operand_k_step(d, kTaskRows)), k_step, d > 0);
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_output() {
    const uint64_t v = operand_advance(operand_mn_major(shared.v[0], kTileKeys * 128),
                                       v_ring.stage() * Shared::kTileBytes);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      wgmma_rs<kHeadDim, true>(acc, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                               operand_advance(v, step * 2048), 1);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void scores_done() {
    release(&shared.k_empty[k_ring.stage()]);
    k_ring.advance();
  }

  __device__ __forceinline__ void output_done() {
    release(&shared.v_empty[v_ring.stage()]);
    v_ring.advance();
  }

  // Hides keys outside a row's range.
  __device__ __forceinline__ void mask(const TileNote& note) {
    const int32_t base = note.key + 2 * quad();
    const bool own = note.flags & kOwn;
    const int32_t from_a = first_a - base, to_a = (own ? end_a : end_past) - base;
    const int32_t from_b = first_b - base, to_b = (own ? end_b : end_past) - base;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int column = i / 4 * 8 + i % 2;
      const bool visible =
          i % 4 < 2 ? column >= from_a && column < to_a : column >= from_b && column < to_b;
      if (!visible) s[i] = -INFINITY;
    }
  }

  // s becomes exp(scale (s - max)); max and sum move on; the factors for acc are returned.
  template <bool kMayBeEmpty>
  __device__ __forceinline__ void softmax(float& factor_a, float& factor_b) {
    float top_a = fmaxf(s[0], s[1]), top_b = fmaxf(s[2], s[3]);
#pragma unroll
    for (int i = 4; i < kScores; i += 4) {
      top_a = fmaxf(top_a, fmaxf(s[i], s[i + 1]));
      top_b = fmaxf(top_b, fmaxf(s[i + 2], s[i + 3]));
    }
    const float old_a = max_a, old_b = max_b;
    max_a = fmaxf(old_a, quad_max(top_a));
    max_b = fmaxf(old_b, quad_max(top_b));
    float base_a = max_a, base_b = max_b;
    if constexpr (kMayBeEmpty) {
      if (base_a == -INFINITY) base_a = 0;
      if (base_b == -INFINITY) base_b = 0;
    }
    factor_a = exp2_approx(__fmul_rn(__fsub_rn(old_a, base_a), args.scale_log2));
    factor_b = exp2_approx(__fmul_rn(__fsub_rn(old_b, base_b), args.scale_log2));
    const float shift_a = __fmul_rn(-base_a, args.scale_log2);
    const float shift_b = __fmul_rn(-base_b, args.scale_log2);
    float part_a[2] = {0, 0}, part_b[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        s[i + j] = exp2_approx(__fmaf_rn(s[i + j], args.scale_log2, shift_a));
        s[i + 2 + j] = exp2_approx(__fmaf_rn(s[i + 2 + j], args.scale_log2, shift_b));
        part_a[j] = __fadd_rn(part_a[j], s[i + j]);
        part_b[j] = __fadd_rn(part_b[j], s[i + 2 + j]);
      }
    }
    sum_a = __fmaf_rn(sum_a, factor_a, quad_sum(__fadd_rn(part_a[0], part_a[1])));
    sum_b = __fmaf_rn(sum_b, factor_b, quad_sum(__fadd_rn(part_b[0], part_b[1])));
  }

  __device__ __forceinline__ void rescale_and_pack(float factor_a, float factor_b) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
    // The maximum of a row rarely moves after its first tiles, and a product with 1 changes
    // nothing.
    if constexpr (Config::kTestFactors) {
      if (__all_sync(kAllLanes, factor_a == 1 && factor_b == 1)) return;
    }
#pragma unroll
    for (int i = 0; i < kOutputs; i += 4) {
      acc[i] = __fmul_rn(acc[i], factor_a);
      acc[i + 1] = __fmul_rn(acc[i + 1], factor_a);
      acc[i + 2] = __fmul_rn(acc[i + 2], factor_b);
      acc[i + 3] = __fmul_rn(acc[i + 3], factor_b);
    }
  }

  // A tile with no P V to overlap with.
  __device__ __forceinline__ void first_step(const TileNote& note) {
    turn_begin();
    wgmma_fence();
    issue_scores();
    turn_end();
    wgmma_wait<0>();
    pin_registers(s);
    scores_done();
    if (note.flags & kMasked) mask(note);
    float factor_a, factor_b;
    softmax<true>(factor_a, factor_b);
    rescale_and_pack(factor_a, factor_b);
  }

  // S of this tile together with P V of the one before.
  template <bool kMaskedTile>
  __device__ __forceinline__ void step(const TileNote& note) {
    turn_begin();
    wgmma_fence();
    issue_scores();
    barrier_wait(&shared.v_full[v_ring.stage()], v_ring.phase());
    issue_output();
    turn_end();
    wgmma_wait<1>();
    pin_registers(s);
    scores_done();
    if constexpr (kMaskedTile) mask(note);
    float factor_a, factor_b;
    softmax<kMaskedTile>(factor_a, factor_b);
    pin_registers(s);
    wgmma_wait<0>();
    pin_registers(acc);
    pin_registers(s);
    output_done();
    rescale_and_pack(factor_a, factor_b);
  }

  // P V of the last tile.
  __device__ __forceinline__ void last_output() {
    barrier_wait(&shared.v_full[v_ring.stage()], v_ring.phase());
    wgmma_fence();
    issue_output();
    wgmma_wait<0>();
    pin_registers(acc);
    output_done();
  }

  // A tile that these rows do not see: only keeps the rings and turns in step.
  __device__ __forceinline__ void skip() {
    turn_begin();
    turn_end();
    scores_done();
    barrier_wait(&shared.v_full[v_ring.stage()], v_ring.phase());
    output_done();
  }

  __device__ __forceinline__ void tiles() {
    const int seen = kSeen << consumer;
    TileNote note = wait_tile();
    while (true) {
      while (!(note.flags & (seen | kEnd))) {
        skip();
        note = wait_tile();
      }
      if (note.flags & kEnd) break;
      first_step(note);
      note = wait_tile();
      while (note.flags & seen) {
        while ((note.flags & (seen | kMasked)) == (seen | kMasked)) {
          step<true>(note);
          note = wait_tile();
        }
        while ((note.flags & (seen | kMasked)) == seen) {
          step<false>(note);
          note = wait_tile();
        }
      }
      // Before skipped tiles too: a stage of V held back could starve the producer.
      last_output();
    }
    scores_done();  // of the end note
    if constexpr (!Config::kQueriesInRegisters) release(&shared.q_empty);
  }

  __device__ __forceinline__ void begin(const Unit<Config>& unit, int32_t head, int32_t row_a,
                                        int32_t row_b) {
    const int32_t key_end = visible_key_end(args, unit.batch);
    end_past = min(key_end, args.num_past);
    end_a = min(key_end, args.num_past + row_a + 1);
    end_b = min(key_end, args.num_past + row_b + 1);
    first_a = row_a < args.chunk ? first_visible_key(args, unit.batch, row_a) : 0;
    first_b = row_b < args.chunk ? first_visible_key(args, unit.batch, row_b) : 0;

    max_a = max_b = -INFINITY;
    sum_a = sum_b = 0;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) acc[i] = 0;
    if (args.first_wave) return;
    const int64_t rows = (int64_t{unit.batch} * args.query_heads + head) * args.chunk;
    if (row_a < args.chunk) load_state(rows + row_a, 0, max_a, sum_a);
    if (row_b < args.chunk) load_state(rows + row_b, 2, max_b, sum_b);
  }

  __device__ __forceinline__ void load_state(int64_t row, int offset, float& max, float& sum) {
    max = args.max[row];
    sum = args.sum[row];
    const float2* from = reinterpret_cast<const float2*>(args.acc + row * kHeadDim) + quad();
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      const float2 pair = from[4 * i];
      acc[4 * i + offset] = pair.x;
      acc[4 * i + offset + 1] = pair.y;
    }
  }

  __device__ __forceinline__ void store_state(int64_t row, int offset, float max, float sum) {
    if (quad() == 0) {
      args.max[row] = max;
      args.sum[row] = sum;
    }
    float2* to = reinterpret_cast<float2*>(args.acc + row * kHeadDim) + quad();
#pragma unroll
    for (int i = 0; i < kOutputs / 4; ++i) {
      to[4 * i] = {acc[4 * i + offset], acc[4 * i + offset + 1]};
    }
  }

  // All lanes take part; `inside` says whether the row exists.
  __device__ __forceinline__ void store_output(const Unit<Config>& unit, int32_t head, int32_t row,
                                               bool inside, int offset, float max, float sum) {
    const float factor = sum > 0 ? 1 / sum : 0;
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(args.o) + unit.batch * args.o_strides.batch +
                        head * args.o_strides.head + row * args.o_strides.token;
#pragma unroll
    for (int block = 0; block < kHeadDim / 32; ++block) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * block + i) + offset;
        words[i] = pack_bf16(acc[at] * factor, acc[at + 1] * factor);
      }
      quad_transpose(words, quad());
      if (inside) {
        *reinterpret_cast<uint4*>(to + 32 * block + 8 * quad()) = {words[0], words[1], words[2],
                                                                   words[3]};
      }
    }
    if (inside && quad() == 0) {
      const int64_t rows = (int64_t{unit.batch} * args.query_heads + head) * args.chunk;
      args.lse[rows + row] = sum > 0 ? max * args.scale + logf(sum) : -INFINITY;
    }
  }

  __device__ __forceinline__ void end(const Unit<Config>& unit, int32_t head, int32_t row_a,
                                      int32_t row_b) {
    if (args.last_wave) {
      store_output(unit, head, row_a, row_a < args.chunk, 0, max_a, sum_a);
      store_output(unit, head, row_b, row_b < args.chunk, 2, max_b, sum_b);
      return;
    }
    const int64_t rows = (int64_t{unit.batch} * args.query_heads + head) * args.chunk;
    if (row_a < args.chunk) store_state(rows + row_a, 0, max_a, sum_a);
    if (row_b < args.chunk) store_state(rows + row_b, 2, max_b, sum_b);
  }

  __device__ __forceinline__ void run() {
    if (consumer == Config::kConsumers - 1) turn_end();  // admits the first
    for (int32_t turn = 0;; ++turn) {
      const int32_t index = unit_of_turn(turn);
      if (index >= args.units) break;
      const Unit<Config> unit(args, index);
      const Task task = unit.task(args, consumer);
      const int32_t row_a = task.row + thread / 32 * 16 + thread % 32 / 4;
      begin(unit, task.head, row_a, row_a + 8);
      barrier_wait(&shared.q_full, turn % 2);
      if constexpr (Config::kQueriesInRegisters) load_queries();
      tiles();
      end(unit, task.head, row_a, row_a + 8);
    }
  }
};

}  // namespace oomb::attention::sm90
