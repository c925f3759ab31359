// token_softmax with tensor cores: 16-bit inputs, page size 64 or 128, head dim 64, 128 or, where
// the GPU has the shared memory, 256 (bounds of keys of 128).
//
// Pass 1, tokens on the rows: a warp keeps its tokens' group-summed queries in registers, page
// summaries stream through shared memory. Every lane keeps its own running maximum and sum over the
// columns it sees, so that the loop has no shuffle; lanes are merged at the end. The pages are
// split over several blocks, at places that depend on the shape alone; pass 2 merges the splits in
// order.
//
// Pass 2, pages on the rows: the same product transposed, so that the sum over tokens stays in a
// lane's registers. One block walks the kv heads in order and adds up in shared memory: no atomics.
//
// Group sums are rounded to the inputs' type, as the summaries they meet are.

#include <cfloat>

#include "attention/device/device_attribute.h"
#include "attention/device/numeric.cuh"
#include "attention/device/ptx.cuh"
#include "attention/device/tile.cuh"
#include "attention/pages/score.h"
#include "attention/pages/score_candidates.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::pages {
namespace {

using device::Tile;

constexpr int kThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLowest = -FLT_MAX / 4;  // "no score yet": finite, so that differences are too

// Rows [first, end) of a global [.., row_stride] matrix into a tile; rows past the end become zero.
template <int kDim, int kRows, typename T>
__device__ void load_rows(uint32_t tile, const T* source, int64_t row_stride, int64_t valid_rows) {
  constexpr int kPieces = Tile<kDim>::kPieces;
  static_assert(kRows * kPieces % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int index = i * kThreads + threadIdx.x;
    const int row = index / kPieces, piece = index % kPieces;
    const bool valid = row < valid_rows;
    device::copy_async(tile + Tile<kDim>::offset(row, piece),
                       source + (valid ? row : 0) * row_stride + piece * 8, valid);
  }
}

template <int kDim, int kBlock>
struct PassOne {
  static constexpr int kPages = kDim * kBlock > 128 * 128 ? 32 : 64;  // of one tile
  static constexpr int kStageBytes = Tile<kDim>::bytes(kPages);
  static constexpr int kBlockBytes = Tile<kDim>::bytes(kBlock);  // its tokens come first
  static constexpr int kSharedBytes = kBlockBytes > 2 * kStageBytes ? kBlockBytes : 2 * kStageBytes;
};

// Grid: (query blocks, kv heads * batch, splits).
template <typename T, int kDim, int kBlock>
__global__ void __launch_bounds__(kThreads, 2)
    token_stats_kernel(const PageScoreParams p, const T* __restrict__ sums,
                       float2* __restrict__ partials, int64_t pages_per_split) {
  using Pass = PassOne<kDim, kBlock>;
  using Rows = Tile<kDim>;
  constexpr int kRowTiles = kBlock / 64;  // of 16 tokens, per warp
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t shared = device::shared_address(shared_memory);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t batch = blockIdx.y / p.shape.kv_heads, head = blockIdx.y % p.shape.kv_heads;
  const int64_t first_row = blockIdx.x * int64_t{kBlock};
  const int64_t rows = p.shape.chunk - first_row;
  const int64_t stat_row = (batch * p.shape.kv_heads + head) * p.shape.chunk + first_row;

  load_rows<kDim, kBlock>(shared, sums + stat_row * kDim, kDim, rows);
  device::commit_copies();
  device::wait_copies<0>();
  __syncthreads();
  uint32_t queries[kRowTiles][kDim / 16][4];
  for (int m = 0; m < kRowTiles; ++m) {
    const uint32_t base =
        shared + Rows::block_a(lane) + (warp * kRowTiles + m) * 16 * Rows::kRowBytes;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) device::load_matrices(queries[m][k], base ^ (k * 32));
  }
  __syncthreads();

  Candidates range = candidates_of(p, batch, blockIdx.x);
  range.begin = max(range.begin, blockIdx.z * pages_per_split);
  range.end = min(range.end, (blockIdx.z + 1) * pages_per_split);
  const int64_t page_stride = p.shape.kv_heads * kDim;
  const T* summary = static_cast<const T*>(p.summary) +
                     (batch * p.summary_stride + range.begin) * page_stride + head * kDim;
  const int64_t num_pages = range.end - range.begin;

  float highest[kRowTiles][2], total[kRowTiles][2];
  for (int m = 0; m < kRowTiles; ++m) {
    for (int r = 0; r < 2; ++r) highest[m][r] = kLowest, total[m][r] = 0.0f;
  }
  if (num_pages > 0) load_rows<kDim, Pass::kPages>(shared, summary, page_stride, num_pages);
  device::commit_copies();
  int stage = 0;
  for (int64_t page = 0; page < num_pages; page += Pass::kPages, stage ^= 1) {
    device::wait_copies<0>();
    __syncthreads();
    const int64_t next = page + Pass::kPages;
    if (next < num_pages) {
      load_rows<kDim, Pass::kPages>(shared + (stage ^ 1) * Pass::kStageBytes,
                                    summary + next * page_stride, page_stride, num_pages - next);
    }
    device::commit_copies();

    float scores[kRowTiles][Pass::kPages / 8][4] = {};
    const uint32_t base = shared + stage * Pass::kStageBytes + Rows::block_b(lane);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int n = 0; n < Pass::kPages / 16; ++n) {
        uint32_t b[4];
        device::load_matrices(b, (base ^ (k * 32)) + n * 16 * Rows::kRowBytes);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          device::multiply<T>(scores[m][2 * n], queries[m][k], b[0], b[1]);
          device::multiply<T>(scores[m][2 * n + 1], queries[m][k], b[2], b[3]);
        }
      }
    }
    if (next > num_pages) {
      const int valid = static_cast<int>(num_pages - page) - (lane % 4) * 2;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Pass::kPages / 8; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (n * 8 + c % 2 >= valid) scores[m][n][c] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = scores[m][0][2 * r];
#pragma unroll
        for (int n = 0; n < Pass::kPages / 8; ++n) {
          top = fmaxf(top, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
        }
        top = fmaxf(top * kLog2E, highest[m][r]);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < Pass::kPages / 8; ++n) {
          sum += device::exp2_fast(fmaf(scores[m][n][2 * r], kLog2E, -top));
          sum += device::exp2_fast(fmaf(scores[m][n][2 * r + 1], kLog2E, -top));
        }
        total[m][r] = fmaf(total[m][r], device::exp2_fast(highest[m][r] - top), sum);
        highest[m][r] = top;
      }
    }
  }

  // Merge the four lanes of each row.
  partials += blockIdx.z * p.shape.batch * p.shape.kv_heads * p.shape.chunk + stat_row;
  for (int m = 0; m < kRowTiles; ++m) {
    for (int r = 0; r < 2; ++r) {
      float top = highest[m][r];
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      float sum = total[m][r] * device::exp2_fast(highest[m][r] - top);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = (warp * kRowTiles + m) * 16 + r * 8 + lane / 4;
      if (lane % 4 == 0 && row < rows) partials[row] = make_float2(top, sum);
    }
  }
}

template <int kDim, int kBlock>
struct PassTwo {
  static constexpr int kPages = 128;  // of one tile
  static constexpr int kRange = 512;  // pages of one thread block
  static constexpr int kQueryBytes = Tile<kDim>::bytes(kBlock);
  static constexpr int kStageBytes = Tile<kDim>::bytes(kPages);
  static constexpr int kLse = kQueryBytes + 2 * kStageBytes;
  static constexpr int kScores = kLse + kBlock * 4;
  static constexpr int kSharedBytes = kScores + kRange * 4;
};

// Grid: (ranges of pages, query blocks, batch * score heads).
template <typename T, int kDim, int kBlock>
__global__ void __launch_bounds__(kThreads, 2)
    token_sums_kernel(const PageScoreParams p, const T* __restrict__ sums,
                      const float2* __restrict__ partials, int splits, int64_t pages) {
  using Pass = PassTwo<kDim, kBlock>;
  using Rows = Tile<kDim>;
  constexpr int kTokens = 64;  // of one step
  extern __shared__ __align__(1024) char shared_memory[];
  const uint32_t queries = device::shared_address(shared_memory);
  const uint32_t stages = queries + Pass::kQueryBytes;
  float* lse = reinterpret_cast<float*>(shared_memory + Pass::kLse);
  float* scores = reinterpret_cast<float*>(shared_memory + Pass::kScores);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t batch = blockIdx.z / p.score_heads, score_head = blockIdx.z % p.score_heads;
  const int64_t block = blockIdx.y, kv_heads = p.shape.kv_heads;
  const int64_t range_begin = blockIdx.x * int64_t{Pass::kRange};
  const int64_t range_end = min(range_begin + Pass::kRange, pages);
  const Candidates candidates = candidates_of(p, batch, block);
  const int64_t begin = max(candidates.begin, range_begin);
  const int64_t end = min(candidates.end, range_end);
  const int64_t first_row = block * kBlock;
  const int64_t real = real_rows(p, batch) - first_row;
  const int64_t page_stride = kv_heads * kDim;
  const int64_t state_stride = p.shape.batch * kv_heads * p.shape.chunk;

  for (int i = threadIdx.x; i < Pass::kRange; i += kThreads) scores[i] = 0.0f;
  const int64_t heads = kv_heads / p.score_heads;
  for (int64_t head = score_head * heads; head < (score_head + 1) * heads && begin < end; ++head) {
    const int64_t row0 = (batch * kv_heads + head) * p.shape.chunk + first_row;
    const T* summary = static_cast<const T*>(p.summary) +
                       (batch * p.summary_stride + begin) * page_stride + head * kDim;
    __syncthreads();
    // Padding may hold anything: zeros stand in its place.
    load_rows<kDim, kBlock>(queries, sums + row0 * kDim, kDim, real);
    load_rows<kDim, Pass::kPages>(stages, summary, page_stride, end - begin);
    device::commit_copies();
    for (int row = threadIdx.x; row < kBlock; row += kThreads) {
      float top = kLowest, sum = 0.0f;
      if (row < real) {
        for (int s = 0; s < splits; ++s)
          top = fmaxf(top, partials[s * state_stride + row0 + row].x);
        for (int s = 0; s < splits; ++s) {
          const float2 part = partials[s * state_stride + row0 + row];
          sum += part.y * exp2f(part.x - top);
        }
      }
      lse[row] = sum > 0.0f ? top + log2f(sum) : INFINITY;
    }
    int stage = 0;
    for (int64_t page = begin; page < end; page += Pass::kPages, stage ^= 1) {
      device::wait_copies<0>();
      __syncthreads();
      const int64_t next = page + Pass::kPages;
      if (next < end) {
        load_rows<kDim, Pass::kPages>(stages + (stage ^ 1) * Pass::kStageBytes,
                                      summary + (next - begin) * page_stride, page_stride,
                                      end - next);
      }
      device::commit_copies();

      float row_sums[2][2] = {};
      const uint32_t key_base =
          stages + stage * Pass::kStageBytes + Rows::block_a(lane) + warp * 32 * Rows::kRowBytes;
      const uint32_t query_base = queries + Rows::block_b(lane);
#pragma unroll 1
      for (int token = 0; token < kBlock; token += kTokens) {
        float tile[2][kTokens / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
          uint32_t keys[2][4];
          device::load_matrices(keys[0], key_base ^ (k * 32));
          device::load_matrices(keys[1], (key_base ^ (k * 32)) + 16 * Rows::kRowBytes);
#pragma unroll
          for (int n = 0; n < kTokens / 16; ++n) {
            uint32_t b[4];
            device::load_matrices(b, (query_base ^ (k * 32)) + (token + n * 16) * Rows::kRowBytes);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              device::multiply<T>(tile[m][2 * n], keys[m], b[0], b[1]);
              device::multiply<T>(tile[m][2 * n + 1], keys[m], b[2], b[3]);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
          const float2 column =
              *reinterpret_cast<const float2*>(lse + token + n * 8 + lane % 4 * 2);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              row_sums[m][r] += device::exp2_fast(fmaf(tile[m][n][2 * r], kLog2E, -column.x));
              row_sums[m][r] += device::exp2_fast(fmaf(tile[m][n][2 * r + 1], kLog2E, -column.y));
            }
          }
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float sum = row_sums[m][r];
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          const int64_t target = page + warp * 32 + m * 16 + r * 8 + lane / 4;
          if (lane % 4 == 0 && target < end) scores[target - range_begin] += sum;
        }
      }
    }
  }

  __syncthreads();
  float* out = static_cast<float*>(p.scores) +
               ((batch * gridDim.y + block) * p.score_heads + score_head) * pages;
  for (int64_t page = range_begin + threadIdx.x; page < range_end; page += kThreads) {
    out[page] = page >= begin && page < end ? scores[page - range_begin] : -INFINITY;
  }
}

template <typename T, int kDim, int kBlock>
void launch(const PageScoreParams& params, const void* sums, void* partials) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const int64_t pages = num_pages(params), blocks = num_blocks(params);
  const int64_t splits = token_softmax_splits(params);

  const auto stats = token_stats_kernel<T, kDim, kBlock>;
  constexpr int kStatsBytes = PassOne<kDim, kBlock>::kSharedBytes;
  check_cuda(cudaFuncSetAttribute(stats, cudaFuncAttributeMaxDynamicSharedMemorySize, kStatsBytes),
             "cudaFuncSetAttribute");
  const dim3 stats_grid(blocks, params.shape.kv_heads * params.shape.batch, splits);
  stats<<<stats_grid, kThreads, kStatsBytes, stream>>>(
      params, static_cast<const T*>(sums), static_cast<float2*>(partials), ceil_div(pages, splits));
  check_launch("score_token_stats");

  const auto totals = token_sums_kernel<T, kDim, kBlock>;
  constexpr int kTotalsBytes = PassTwo<kDim, kBlock>::kSharedBytes;
  check_cuda(
      cudaFuncSetAttribute(totals, cudaFuncAttributeMaxDynamicSharedMemorySize, kTotalsBytes),
      "cudaFuncSetAttribute");
  const dim3 totals_grid(ceil_div(pages, PassTwo<kDim, kBlock>::kRange), blocks,
                         params.shape.batch * params.score_heads);
  totals<<<totals_grid, kThreads, kTotalsBytes, stream>>>(params, static_cast<const T*>(sums),
                                                          static_cast<const float2*>(partials),
                                                          static_cast<int>(splits), pages);
  check_launch("score_token_sums");
}

template <typename T>
void launch(const PageScoreParams& params, const void* sums, void* partials) {
  const bool small = params.shape.page_size == 64;
  switch (params.shape.head_dim) {
    case 64:
      return small ? launch<T, 64, 64>(params, sums, partials)
                   : launch<T, 64, 128>(params, sums, partials);
    case 128:
      return small ? launch<T, 128, 64>(params, sums, partials)
                   : launch<T, 128, 128>(params, sums, partials);
    default:
      return small ? launch<T, 256, 64>(params, sums, partials)
                   : launch<T, 256, 128>(params, sums, partials);
  }
}

int shared_bytes(const PageScoreParams& params) {
  if (params.shape.head_dim <= 128) return PassTwo<128, 128>::kSharedBytes;
  return params.shape.page_size == 64 ? PassTwo<256, 64>::kSharedBytes
                                      : PassTwo<256, 128>::kSharedBytes;
}

}  // namespace

bool matrix_path_takes(const PageScoreParams& params) {
  const int64_t dim = params.shape.head_dim, page_size = params.shape.page_size;
  return size_of(params.dtype) == 2 && (dim == 64 || dim == 128 || dim == 256) &&
         (page_size == 64 || page_size == 128) &&
         reinterpret_cast<uintptr_t>(params.summary) % 16 == 0 &&
         device::device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= shared_bytes(params);
}

// Enough blocks for two rounds of a large GPU, whatever GPU it is: the result must not depend on
// it.
int64_t token_softmax_splits(const PageScoreParams& params) {
  const int64_t rows = num_blocks(params) * params.shape.kv_heads * params.shape.batch;
  const int64_t tiles = ceil_div(num_pages(params), 64);
  return max(int64_t{1}, min(min(ceil_div(512, rows), int64_t{16}), tiles));
}

void score_token_softmax_matrix(const PageScoreParams& params, const void* sums, void* partials) {
  if (params.dtype == DType::kFloat16) {
    launch<__half>(params, sums, partials);
  } else {
    launch<__nv_bfloat16>(params, sums, partials);
  }
}

}  // namespace oomb::attention::pages
