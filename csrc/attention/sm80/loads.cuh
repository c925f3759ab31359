#pragma once

// Copies of tiles from global to shared memory by all threads of a block.

#include <cstdint>

#include "attention/device/tile.cuh"
#include "attention/sm80/key_tiles.cuh"

namespace oomb::attention::sm80 {

// kRows rows of a [.., stride] matrix; rows from `valid` on become zeros.
template <int kDim, int kRows, int kCopyThreads = kThreads, typename T>
__device__ inline void load_rows(uint32_t tile, const T* source, int64_t stride, int valid,
                                 int thread = threadIdx.x) {
  using Tile = device::Tile<kDim>;
  constexpr int kCopies = kRows * Tile::kPieces / kCopyThreads;
  static_assert(kRows * Tile::kPieces % kCopyThreads == 0);
  if constexpr (kCopyThreads % Tile::kPieces == 0) {
    // A thread always copies the same piece of a row, so that only the row moves.
    constexpr int kStep = kCopyThreads / Tile::kPieces;
    static_assert(kStep % 8 == 0);
    const int row = thread / Tile::kPieces, piece = thread % Tile::kPieces;
    const uint32_t target = tile + Tile::offset(row, piece);
    const T* from = source + row * stride + piece * 8;
    if (valid >= kRows) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        device::copy_async(target + i * kStep * Tile::kRowBytes, from);
        from += kStep * stride;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const bool inside = row + i * kStep < valid;
        device::copy_async(target + i * kStep * Tile::kRowBytes, inside ? from : source, inside);
        from += kStep * stride;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int index = i * kCopyThreads + thread;
      const int row = index / Tile::kPieces, piece = index % Tile::kPieces;
      const bool inside = row < valid;
      device::copy_async(tile + Tile::offset(row, piece),
                         inside ? source + row * stride + piece * 8 : source, inside);
    }
  }
}

}  // namespace oomb::attention::sm80
