// token_softmax for any shape: per token a softmax over the candidate pages, summed over the
// block's tokens. No score per token is stored: the first pass keeps a running maximum and sum per
// token, the second computes the products again.

#include "attention/device/numeric.cuh"
#include "attention/pages/score.h"
#include "attention/pages/score_candidates.cuh"
#include "attention/pages/score_product.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::pages {
namespace {

using device::Acc;

// Tokens [first, first + 32) of one query block.
struct TokenTile {
  int64_t block;
  int64_t first;
  int64_t rows;
};

__device__ TokenTile token_tile(const PageScoreParams& p, int64_t block, int64_t part) {
  TokenTile tile{block, block * p.shape.page_size + part * 32, 0};
  const int64_t end = min((block + 1) * p.shape.page_size, p.shape.chunk);
  tile.rows = min(int64_t{32}, end - tile.first);
  return tile;
}

// Grid: (query blocks * parts of 32 tokens, kv heads, batch).
template <typename T>
__global__ void __launch_bounds__(256)
    token_lse_kernel(const PageScoreParams p, const Acc<T>* __restrict__ sums,
                     Acc<T>* __restrict__ lse, int64_t parts) {
  using A = Acc<T>;
  using Product = ProductTile<A>;
  __shared__ typename Product::Shared shared;
  const TokenTile tokens = token_tile(p, blockIdx.x / parts, blockIdx.x % parts);
  if (tokens.rows <= 0) return;
  const int64_t batch = blockIdx.z, head = blockIdx.y, head_dim = p.shape.head_dim;
  const Candidates candidates = candidates_of(p, batch, tokens.block);
  const int64_t first_row = (batch * p.shape.kv_heads + head) * p.shape.chunk + tokens.first;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;

  A highest[2], total[2] = {};
  highest[0] = highest[1] = device::minus_infinity<A>();
  for (int64_t page = candidates.begin; page < candidates.end; page += 32) {
    A tile[2][2];
    Product::multiply(tile, shared, sums + first_row * head_dim, head_dim, tokens.rows,
                      static_cast<const T*>(p.summary) +
                          ((batch * p.summary_stride + page) * p.shape.kv_heads + head) * head_dim,
                      p.shape.kv_heads * head_dim, candidates.end - page, head_dim);
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) {
        if (page + x + 16 * j >= candidates.end) continue;
        const A score = tile[i][j];
        if (score > highest[i]) {
          total[i] = total[i] * exp(highest[i] - score) + A(1);
          highest[i] = score;
        } else {
          total[i] += exp(score - highest[i]);
        }
      }
    }
  }

  // The 16 threads of a row hold partial results; thread x == 0 merges them in order.
  for (int i = 0; i < 2; ++i) {
    __syncthreads();
    shared.left[y][x] = highest[i];
    shared.right[y][x] = total[i];
    __syncthreads();
    if (x != 0 || y + 16 * i >= tokens.rows) continue;
    A top = device::minus_infinity<A>(), sum = 0;
    for (int t = 0; t < 16; ++t) top = max(top, shared.left[y][t]);
    for (int t = 0; t < 16; ++t) {
      if (shared.right[y][t] > 0) sum += shared.right[y][t] * exp(shared.left[y][t] - top);
    }
    lse[first_row + y + 16 * i] = top + log(sum);
  }
}

// Grid: (tiles of 32 pages, query blocks, batch * score heads).
template <typename T>
__global__ void __launch_bounds__(256)
    token_softmax_kernel(const PageScoreParams p, const Acc<T>* __restrict__ sums,
                         const Acc<T>* __restrict__ lse, int64_t pages) {
  using A = Acc<T>;
  using Product = ProductTile<A>;
  __shared__ typename Product::Shared shared;
  const int64_t batch = blockIdx.z / p.score_heads, score_head = blockIdx.z % p.score_heads;
  const int64_t block = blockIdx.y, head_dim = p.shape.head_dim, kv_heads = p.shape.kv_heads;
  const int64_t page = blockIdx.x * int64_t{32};
  const Candidates candidates = candidates_of(p, batch, block);
  const int64_t real = real_rows(p, batch);
  const int x = threadIdx.x % 16, y = threadIdx.x / 16;

  A column[2] = {};
  const int64_t heads = kv_heads / p.score_heads;
  for (int64_t head = score_head * heads; head < (score_head + 1) * heads; ++head) {
    for (int64_t part = 0; part * 32 < p.shape.page_size; ++part) {
      const TokenTile tokens = token_tile(p, block, part);
      const int64_t rows = min(tokens.rows, real - tokens.first);
      if (rows <= 0) break;
      const int64_t first_row = (batch * kv_heads + head) * p.shape.chunk + tokens.first;
      A tile[2][2];
      Product::multiply(tile, shared, sums + first_row * head_dim, head_dim, rows,
                        static_cast<const T*>(p.summary) +
                            ((batch * p.summary_stride + page) * kv_heads + head) * head_dim,
                        kv_heads * head_dim, pages - page, head_dim);
      for (int i = 0; i < 2; ++i) {
        if (y + 16 * i >= rows) continue;
        const A row_lse = lse[first_row + y + 16 * i];
        for (int j = 0; j < 2; ++j) column[j] += exp(tile[i][j] - row_lse);
      }
    }
  }

  __syncthreads();
  shared.left[y][x] = column[0];
  shared.left[y][x + 16] = column[1];
  __syncthreads();
  if (threadIdx.x >= 32 || page + threadIdx.x >= pages) return;
  A score = 0;
  for (int t = 0; t < 16; ++t) score += shared.left[t][threadIdx.x];
  const int64_t target = page + threadIdx.x;
  const bool candidate = target >= candidates.begin && target < candidates.end;
  static_cast<A*>(
      p.scores)[((batch * gridDim.y + block) * p.score_heads + score_head) * pages + target] =
      candidate ? score : device::minus_infinity<A>();
}

// Two passes over the pages: log-sum-exp of every token's scores, then the pages' sums of
// exp(score - lse). lse: [B, Hkv, C], accumulator type.
void score_token_softmax(const PageScoreParams& params, const void* sums, void* lse) {
  const int64_t pages = num_pages(params), blocks = num_blocks(params);
  const int64_t parts = ceil_div(params.shape.page_size, 32);
  const auto stream = static_cast<cudaStream_t>(params.stream);
  device::with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Acc<T>;
    const dim3 token_grid(blocks * parts, params.shape.kv_heads, params.shape.batch);
    token_lse_kernel<T><<<token_grid, 256, 0, stream>>>(params, static_cast<const A*>(sums),
                                                        static_cast<A*>(lse), parts);
    check_launch("score_token_lse");
    const dim3 page_grid(ceil_div(pages, 32), blocks, params.shape.batch * params.score_heads);
    token_softmax_kernel<T><<<page_grid, 256, 0, stream>>>(params, static_cast<const A*>(sums),
                                                           static_cast<const A*>(lse), pages);
    check_launch("score_token_softmax");
  });
}

// Queries summed over heads, then the softmax's statistics.
struct Workspace {
  int64_t sums = 0;
  int64_t statistics = 0;
};

Workspace workspace_of(const PageScoreParams& params) {
  const Shape& shape = params.shape;
  const int64_t tokens = shape.batch * shape.kv_heads * shape.chunk;
  const bool matrix = matrix_path_takes(params);
  const int64_t element = matrix ? size_of(params.dtype) : accumulator_bytes(params);
  return {.sums = align_up(tokens * shape.head_dim * element, 256),
          .statistics = tokens * (matrix ? token_softmax_splits(params) * 8 : element)};
}

int64_t workspace_bytes(const PageScoreParams& params) {
  const Workspace workspace = workspace_of(params);
  return workspace.sums + workspace.statistics;
}

void run(const PageScoreParams& params) {
  const bool matrix = matrix_path_takes(params);
  void* statistics = static_cast<char*>(params.workspace) + workspace_of(params).sums;
  group_sums(params, params.workspace, matrix);
  if (matrix) {
    score_token_softmax_matrix(params, params.workspace, statistics);
  } else {
    score_token_softmax(params, params.workspace, statistics);
  }
}

}  // namespace

extern const Score kTokenSoftmax = {workspace_bytes, run};

}  // namespace oomb::attention::pages
