#pragma once

// What the backward's computing warpgroups do with rows of keys: hide what a query may not see, and
// put sums of dK and dV where they belong, the own chunk or a gradient page.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/device/gradient_page.cuh"
#include "attention/sm90/backward_plan.h"
#include "attention/sm90/backward_shared.cuh"
#include "attention/sm90/ptx/backward_ops.h"
#include "attention/sm90/ptx/wgmma.h"

namespace oomb::attention::sm90 {

// A thread's place in its warpgroup. Read anew where it is needed: kept across the loop, the
// addresses that follow from it would take registers that the accumulators need.
struct Place {
  int lane;
  int warp;

  __device__ __forceinline__ Place() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    lane = thread % 32;
    warp = thread / 32 % 4;
  }
  __device__ int row() const { return warp * 16 + lane / 4; }  // the second is 8 further
  __device__ int column() const { return lane % 4 * 2; }       // and 8 j further
};

// Scores of 64 keys x 64 queries become probabilities; `lse` of the queries is in base 2.
template <int kRows>
__device__ __forceinline__ void make_probabilities(float (&s)[32], const float (&lse)[kRows],
                                                   const BackwardKernelArgs& args, int column0) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(&lse[8 * j + column0]);
    s[4 * j] = exp2_approx(fmaf(s[4 * j], args.scale_log2, -pair.x));
    s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], args.scale_log2, -pair.y));
    s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], args.scale_log2, -pair.x));
    s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], args.scale_log2, -pair.y));
  }
}

// Hides what a query may not see from 64 keys x 64 queries; `first` is the first key's row in the
// unit's tile of kKeys rows.
template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&s)[32], const BackwardKernelArgs& args,
                                            const StepInfo& info, const Unit& unit, int first) {
  const Place place;
  const int row0 = first + place.row();
  const int column0 = place.column();
  const Visibility& visibility = args.params.visibility;
  const int chunk = static_cast<int>(args.params.shape.chunk);
  const int past_tokens = static_cast<int>(args.params.past.num_tokens);
  const int range_begin = info.key_range & 0xff;
  const int range_end = info.key_range >> 8 & 0xff;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = info.row + 8 * j + column0 + e;
      int begin = range_begin;
      int end = range_end;
      if (info.key_range & kCausal) end = min(end, row - unit.tile * kKeys + 1);
      if (info.key_range & kLower) {
        int lower = 0;
        if (visibility.first_key != nullptr) {
          lower =
              visibility.first_key[static_cast<int64_t>(unit.batch) * chunk + min(row, chunk - 1)];
        }
        if (visibility.window > 0) {
          lower = static_cast<int>(
              max(static_cast<int64_t>(lower), past_tokens + row - visibility.window + 1));
        }
        begin = max(begin, lower - unit.key_begin);
      }
      if (row0 < begin || row0 >= end) s[4 * j + e] = -INFINITY;
      if (row0 + 8 < begin || row0 + 8 >= end) s[4 * j + 2 + e] = -INFINITY;
    }
  }
}

// While one lives, a warp adds to its rows of a gradient page. Where some query blocks close the
// launch, it waits for its turn first: until all query blocks before the unit's have been added.
class PageTurn {
 public:
  //   warpgroup 0 or 1, of those that add to the unit's pages
  __device__ PageTurn(const BackwardKernelArgs& args, const Unit& unit, int warpgroup)
      : end_(unit.block_end) {
    if (args.tiling.closing_blocks == 0) return;
    const int head = unit.batch * static_cast<int>(args.params.shape.kv_heads) + unit.kv_head;
    const int tile = head * args.tiling.past_tiles + unit.tile - args.tiling.tile_begin;
    added_ = args.workspace.page_turns + (tile * 2 + warpgroup) * 4 + Place().warp;
    if (Place().lane == 0) {
      while (load_acquire(added_) != unit.block_begin) {
      }
    }
    __syncwarp();
  }
  PageTurn(const PageTurn&) = delete;
  PageTurn& operator=(const PageTurn&) = delete;
  __device__ ~PageTurn() {
    if (added_ == nullptr) return;
    __syncwarp();
    if (Place().lane == 0) store_release(added_, end_);
  }

 private:
  const int end_;
  int32_t* added_ = nullptr;
};

// 64 rows of dK or dV that a warpgroup holds: those of the unit's tile from `first` on.
template <int kDim>
struct GradientRows {
  const BackwardParams& params;
  const Unit& unit;
  const int first;

  // Into dk or dv of the own chunk. Tiles have kKeys rows.
  template <int kKeys>
  __device__ __forceinline__ void write_own(void* data, const Strides& strides,
                                            const float (&values)[kDim / 2], float scale) const {
    const Place at;
    const int row0 = first + at.row();
    const int column0 = at.column();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t token = unit.tile * kKeys + row0 + 8 * i;
      if (token >= params.shape.chunk) continue;
      auto* row = static_cast<__nv_bfloat16*>(data) + unit.batch * strides.batch +
                  unit.kv_head * strides.head + token * strides.token;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        *reinterpret_cast<uint32_t*>(row + 8 * j + column0) =
            pack_bf16(values[4 * j + 2 * i] * scale, values[4 * j + 2 * i + 1] * scale);
      }
    }
  }

  // Onto the gradient page of a past tile. kind 0: dK, 1: dV.
  __device__ __forceinline__ void add_page(int kind, const float (&values)[kDim / 2],
                                           float scale) const {
    const int page_size = static_cast<int>(params.shape.page_size);
    // All rows of a warpgroup lie in one page.
    const int page = (unit.key_begin + first) / page_size;
    if (first >= unit.row_end || first + 64 <= unit.row_begin) return;
    const device::GradientPage target(params.grads, params.past.table_stride, unit.batch, page,
                                      kind, unit.block_begin);
    if (target.data == nullptr) return;
    if (target.dtype == DType::kFloat32) {
      add_floats(target, values, scale);
    } else {
      add_bfloat16s(target, values, scale);
    }
  }

 private:
  // Calls visit(i, element) for the two rows of this thread, with its first element in the page.
  template <typename Visit>
  __device__ __forceinline__ void visit_rows(const Visit& visit) const {
    const Place at;
    const int page_size = static_cast<int>(params.shape.page_size);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + at.row() + 8 * i;
      if (row >= unit.row_end) continue;
      visit(i,
            (unit.kv_head * page_size + (unit.key_begin + row) % page_size) * kDim + at.column());
    }
  }

  __device__ __forceinline__ void add_floats(const device::GradientPage& page,
                                             const float (&values)[kDim / 2], float scale) const {
    visit_rows([&](int i, int element) {
      float* target = static_cast<float*>(page.data) + element;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        reduce_add_pair(target + 8 * j, values[4 * j + 2 * i] * scale,
                        values[4 * j + 2 * i + 1] * scale);
      }
    });
  }

  __device__ __forceinline__ void add_bfloat16s(const device::GradientPage& page,
                                                const float (&values)[kDim / 2],
                                                float scale) const {
    visit_rows([&](int i, int element) {
      // All loads of a row first, so that it waits for one flight.
      uint32_t* target = static_cast<uint32_t*>(page.data) + element / 2;
      uint32_t old[kDim / 8];
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) old[j] = target[4 * j];
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        target[4 * j] = page.added_pair(old[j], values[4 * j + 2 * i] * scale,
                                        values[4 * j + 2 * i + 1] * scale, element + 8 * j);
      }
    });
  }
};

}  // namespace oomb::attention::sm90
