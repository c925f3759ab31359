#pragma once

// Tile sizes of the plain kernels. A block of kWidth x kWidth threads works on kTile queries by
// kTile keys; thread (y, x) holds tile rows y, y + kWidth.. and columns x, x + kWidth..

#include "attention/device/numeric.cuh"
#include "attention/params.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::plain {

template <typename T, int kTile_, int kWidth_, int kMaxDim_>
struct Config {
  using Element = T;
  using A = device::Acc<T>;
  static constexpr int kTile = kTile_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kMaxDim = kMaxDim_;
  static constexpr int kThreads = kWidth * kWidth;
  static constexpr int kRows = kTile / kWidth;       // tile rows (and columns) of one thread
  static constexpr int kColumns = kMaxDim / kWidth;  // head-dim elements of one thread, per row
  static_assert(32 % kWidth == 0, "the threads of a row must share a warp");
};

// Query tiles never cross a query block, since each block has its own page list; without lists the
// whole chunk counts as one block.
struct QueryTiles {
  int64_t block_size;
  int64_t blocks;
  int64_t parts;  // tiles per block

  OOMB_HOST_DEVICE QueryTiles(const Shape& shape, const PastPages& past, int tile) {
    block_size = past.selection != nullptr ? shape.page_size : shape.chunk;
    blocks = ceil_div(shape.chunk, block_size);
    parts = ceil_div(block_size, tile);
  }
  OOMB_HOST_DEVICE int64_t count() const { return blocks * parts; }
};

// One tile of queries: rows [first, first + rows) of the chunk.
struct QueryTile {
  int64_t block = 0;
  int first = 0;
  int rows = 0;

  __device__ QueryTile(const QueryTiles& tiles, const Shape& shape, int tile, int64_t index) {
    block = index / tiles.parts;
    const int64_t begin = block * tiles.block_size + index % tiles.parts * tile;
    const int64_t end = min(min(begin + tile, (block + 1) * tiles.block_size), shape.chunk);
    first = static_cast<int>(begin);
    rows = static_cast<int>(max(int64_t{0}, end - begin));
  }
};

// Rows of the chunk's own keys that a query tile goes through: causal, and without padding, which
// is not even read.
__device__ inline int own_key_end(const Visibility& visibility, int num_past, int64_t batch,
                                  const QueryTile& query) {
  const int end = query.first + query.rows;
  return visibility.num_keys == nullptr ? end : min(end, visibility.num_keys[batch] - num_past);
}

// Rows [0, rows) of a [.., stride] matrix into a shared [kTile, head_dim + 1] tile; the rest is
// zero.
template <typename C>
__device__ void load_tile(typename C::A* tile, const typename C::Element* source, int64_t stride,
                          int rows, int head_dim) {
  for (int row = threadIdx.x / 32; row < C::kTile; row += C::kThreads / 32) {
    for (int d = threadIdx.x % 32; d < head_dim; d += 32) {
      tile[row * (head_dim + 1) + d] =
          row < rows ? device::load(source[row * stride + d]) : typename C::A(0);
    }
  }
}

// What a scaled score is under a soft cap; a cap of 0 is none.
template <typename A>
__device__ A capped(A score, A cap) {
  return cap > A(0) ? cap * tanh(score / cap) : score;
}

// result[i][j] = left row y + i * kWidth . right row x + j * kWidth
template <typename C>
__device__ void multiply_tiles(typename C::A (&result)[C::kRows][C::kRows],
                               const typename C::A* left, const typename C::A* right,
                               int head_dim) {
  const int x = threadIdx.x % C::kWidth, y = threadIdx.x / C::kWidth;
  for (auto& row : result) {
    for (auto& value : row) value = 0;
  }
  for (int d = 0; d < head_dim; ++d) {
    typename C::A a[C::kRows], b[C::kRows];
#pragma unroll
    for (int i = 0; i < C::kRows; ++i) {
      a[i] = left[(y + i * C::kWidth) * (head_dim + 1) + d];
      b[i] = right[(x + i * C::kWidth) * (head_dim + 1) + d];
    }
#pragma unroll
    for (int i = 0; i < C::kRows; ++i) {
#pragma unroll
      for (int j = 0; j < C::kRows; ++j) result[i][j] += a[i] * b[j];
    }
  }
}

// Calls launch(Config) with tiles that fit into the 99 KB of shared memory that every GPU since
// sm_80 has.
template <typename Launch>
void with_config(DType dtype, int64_t head_dim, Launch&& launch) {
  device::with_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 8) {
      if (head_dim <= 128) return launch(Config<T, 16, 16, 128>{});
      return launch(Config<T, 8, 8, 256>{});
    } else {
      if (head_dim <= 128) return launch(Config<T, 32, 16, 128>{});
      if (head_dim <= 256) return launch(Config<T, 16, 16, 256>{});
      return launch(Config<T, 8, 8, 512>{});
    }
  });
}

template <typename Kernel>
void allow_shared_memory(Kernel kernel, int64_t bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "cudaFuncSetAttribute");
}

}  // namespace oomb::attention::plain
