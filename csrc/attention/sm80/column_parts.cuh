#pragma once

// Head dim 512: the sums of 16 rows are more than the registers of a warp hold, so two warps share
// the rows, each with half of the columns. Where a product runs over the head dim, each makes the
// part of its own half, and the two parts are added through shared memory:
//
//   warps 0 to 3: rows 0.., 16.., 32.., 48.. x columns 0 to 255
//   warps 4 to 7: the same rows              x columns 256 to 511
//
// The backward of small tiles (tile_size.h) has two warps of rows in place of four.
//
// Both warps then hold the same scores, to the bit: the sum of two parts knows no order.

#include <cstdint>

#include "attention/device/ptx.cuh"
#include "attention/sm80/key_tiles.cuh"

namespace oomb::attention::sm80 {

template <int kDim, int kRowWarps = 4>  // warps with rows of their own, 16 or more each
struct ColumnParts {
  static constexpr int kWarps = kRowWarps;
  static constexpr int kParts = kDim > 256 ? 2 : 1;
  static constexpr int kColumns = kDim / kParts;            // of a warp
  static constexpr int kThreads = kParts * kRowWarps * 32;  // of a block
  // What lies between two parts in a row of shared memory.
  static constexpr int kPartBytes = kColumns * kElementBytes;

  // Shared memory for the exchange of `tiles` accumulators of 16 x 8 per warp.
  static constexpr int exchange_bytes(int tiles) {
    return kParts == 1 ? 0 : kThreads / 32 * tiles * 512;
  }

  // 0 where a warp has all columns, known when the kernel is compiled.
  __device__ static int part() { return kParts == 1 ? 0 : threadIdx.x / (kRowWarps * 32); }
  // Which rows a warp has.
  __device__ static int row_warp() { return threadIdx.x / 32 % kRowWarps; }
};

// One warp's accumulators on their way to the warp that shares its rows. `exchange` holds kTiles
// of them per warp; a block's threads meet between two exchanges through the same place.
template <int kTiles, int kRowWarps = 4>
struct PartExchange {
  uint32_t own, other;

  __device__ explicit PartExchange(uint32_t exchange) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    own = exchange + warp * kTiles * 512 + lane * 16;
    other = exchange + (warp ^ kRowWarps) * kTiles * 512 + lane * 16;
  }

  template <int kCount>
  __device__ void send(const float (&parts)[kCount][4], int first = 0) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) device::store_four(own + (first + n) * 512, parts[n]);
  }

  // The two warps meet here.
  __device__ void meet() const { device::meet(1 + threadIdx.x / 32 % kRowWarps, 64); }

  template <int kCount>
  __device__ void add(float (&parts)[kCount][4], int first = 0) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      float received[4];
      device::load_four(received, other + (first + n) * 512);
#pragma unroll
      for (int c = 0; c < 4; ++c) parts[n][c] += received[c];
    }
  }
};

}  // namespace oomb::attention::sm80
