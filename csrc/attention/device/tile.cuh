#pragma once

// A [rows, kDim] tile of 16-bit elements in shared memory, as ldmatrix and cp.async like it.
//
// Row r takes kRowBytes (128, 256, 512 or 1024, the least that holds it), its 16-byte pieces in an
// order that depends on r: piece p lies at p ^ (r % 8). Eight rows of one piece then touch all 32
// banks once, and the address of piece p is (row base with r % 8 in its piece bits) ^ (p * 16): one
// XOR per ldmatrix.

#include <cstdint>

#include "attention/device/ptx.cuh"

namespace oomb::attention::device {

template <int kDim>
struct Tile {
  static_assert(kDim % 16 == 0 && kDim <= 512);
  static constexpr int kRowBytes = kDim <= 64 ? 128 : kDim <= 128 ? 256 : kDim <= 256 ? 512 : 1024;
  static constexpr int kPieces = kDim / 8;  // 16-byte pieces of a row

  static constexpr int bytes(int rows) { return rows * kRowBytes; }

  __device__ static uint32_t offset(int row, int piece) {
    return row * kRowBytes + ((piece ^ (row & 7)) << 4);
  }

  // Lane part of the addresses of 16x16 blocks. Add rows * kRowBytes (rows a multiple of 8) and
  // XOR with (16 * column block) * 2 bytes.
  //
  // block_a: matrices in the order (row 0, col 0), (8, 0), (0, 8), (8, 8): an A operand; with
  //          .trans, the B operand of k = rows, n = columns, two n-tiles at once.
  // block_b: (0, 0), (0, 8), (8, 0), (8, 8): the B operand of n = rows, k = columns, two n-tiles at
  //          once; with .trans, the A operand of the transposed block.
  __device__ static uint32_t block_a(int lane) { return offset(lane % 16, lane / 16); }
  __device__ static uint32_t block_b(int lane) {
    return offset(lane % 8 + (lane / 16) * 8, (lane / 8) % 2);
  }
};

}  // namespace oomb::attention::device
