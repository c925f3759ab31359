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
  if constexpr (kCopyThreads % (4 * Tile::kPieces) == 0) {
    // A thread always copies the same piece of a row, so that only the row moves.
    constexpr int kStep = kCopyThreads / Tile::kPieces;
    const int row = thread / Tile::kPieces, piece = thread % Tile::kPieces;
    const uint32_t first = tile + Tile::offset(row, piece);
    // Four rows on, the piece's place has another bit 2.
    const auto target = [&](int i) {
      return (first ^ (i * kStep % 8 * 16)) + i * kStep * Tile::kRowBytes;
    };
    const T* from = source + row * stride + piece * 8;
    if (valid >= kRows) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        device::copy_async(target(i), from);
        from += kStep * stride;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const bool inside = row + i * kStep < valid;
        device::copy_async(target(i), inside ? from : source, inside);
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
