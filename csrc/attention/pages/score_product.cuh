#pragma once

#include <cstdint>

#include "attention/device/numeric.cuh"

namespace oomb::attention::pages {

// A 32 x 32 tile of left . right^T by 16 x 16 threads without tensor cores. Thread (y, x) holds
// rows y, y + 16 and columns x, x + 16. Rows past the valid ones count as zero.
template <typename A>
struct ProductTile {
  static constexpr int kSize = 32;
  static constexpr int kThreads = 256;

  struct Shared {
    A left[kSize][kSize + 1];
    A right[kSize][kSize + 1];
  };

  template <typename R>
  __device__ static void multiply(A (&result)[2][2], Shared& shared, const A* left,
                                  int64_t left_stride, int64_t left_rows, const R* right,
                                  int64_t right_stride, int64_t right_rows, int64_t depth) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (auto& row : result) row[0] = row[1] = 0;
    for (int64_t base = 0; base < depth; base += kSize) {
      __syncthreads();
      for (int i = threadIdx.x; i < kSize * kSize; i += kThreads) {
        const int row = i / kSize, column = i % kSize;
        const bool inside = base + column < depth;
        shared.left[row][column] =
            inside && row < left_rows ? left[row * left_stride + base + column] : A(0);
        shared.right[row][column] =
            inside && row < right_rows
                ? static_cast<A>(device::load(right[row * right_stride + base + column]))
                : A(0);
      }
      __syncthreads();
      for (int d = 0; d < kSize; ++d) {
        const A a0 = shared.left[y][d], a1 = shared.left[y + 16][d];
        const A b0 = shared.right[x][d], b1 = shared.right[x + 16][d];
        result[0][0] += a0 * b0;
        result[0][1] += a0 * b1;
        result[1][0] += a1 * b0;
        result[1][1] += a1 * b1;
      }
    }
  }
};

}  // namespace oomb::attention::pages
