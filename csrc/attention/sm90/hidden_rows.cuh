#pragma once

// A row that nobody sees may hold anything: the rest of a slot that was never written, the padding
// of a batch. Its probabilities are 0, but 0 x NaN is NaN, and in P V, dS K, P^T dO and dS^T Q the
// products of all rows are added up. So whoever loads such rows overwrites them with zeros before
// the tile is announced, and whole tiles cost nothing:
//
//   whole tile         copy -> full barrier
//   with hidden rows   copy -> settled barrier; the loader waits, overwrites, arrives at the full
//   one

#include <cstdint>

#include "attention/sm90/ptx/barrier.h"

namespace oomb::attention::sm90 {

// Zeroes one row of a tile of `kRows` rows as the copy engine writes it: boxes of 64 columns, rows
// of 128 bytes (their swizzle stays within a row). `lanes` threads share the work.
template <int kRows, int kDim>
__device__ __forceinline__ void zero_row(void* tile, int row, int lane, int lanes) {
  constexpr int kPieces = kDim / 64 * 8;  // of 16 bytes
#pragma unroll 1
  for (int i = lane; i < kPieces; i += lanes) {
    char* box = static_cast<char*>(tile) + i / 8 * (kRows * 128);
    *reinterpret_cast<uint4*>(box + row * 128 + i % 8 * 16) = uint4{0, 0, 0, 0};
  }
}

// Zeroes the rows outside [begin, end). One warp. Afterwards any lane may announce the tile.
template <int kRows, int kDim>
__device__ __forceinline__ void zero_rows_outside(void* tile, int begin, int end) {
  constexpr int kLanes = kDim / 64 * 8;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = lane / kLanes; row < kRows; row += 32 / kLanes) {
    if (row < begin || row >= end) zero_row<kRows, kDim>(tile, row, lane % kLanes, kLanes);
  }
  fence_async_shared();
  __syncwarp();
}

}  // namespace oomb::attention::sm90
