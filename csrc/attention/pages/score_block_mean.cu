// block_mean: a matrix product of the blocks' mean queries with the page summaries. With one score
// for all heads the kv heads are simply part of the contracted dimension.

#include "attention/device/numeric.cuh"
#include "attention/pages/score.h"
#include "attention/pages/score_candidates.cuh"
#include "attention/pages/score_product.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::pages {
namespace {

using device::Acc;

// Grid: (tiles of pages, tiles of query blocks, batch * score heads).
template <typename T>
__global__ void __launch_bounds__(256)
    block_mean_kernel(const PageScoreParams p, const Acc<T>* __restrict__ means, int64_t pages,
                      int64_t blocks) {
  using A = Acc<T>;
  using Product = ProductTile<A>;
  __shared__ typename Product::Shared shared;
  const int64_t batch = blockIdx.z / p.score_heads, head = blockIdx.z % p.score_heads;
  const int64_t first_page = blockIdx.x * int64_t{Product::kSize};
  const int64_t first_block = blockIdx.y * int64_t{Product::kSize};
  const int64_t row = p.shape.kv_heads * p.shape.head_dim;
  const int64_t depth = row / p.score_heads;

  A tile[2][2];
  Product::multiply(tile, shared, means + (batch * blocks + first_block) * row + head * depth, row,
                    blocks - first_block,
                    static_cast<const T*>(p.summary) +
                        (batch * p.summary_stride + first_page) * row + head * depth,
                    row, pages - first_page, depth);

  A* scores = static_cast<A*>(p.scores);
  for (int i = 0; i < 2; ++i) {
    const int64_t block = first_block + threadIdx.x / 16 + 16 * i;
    if (block >= blocks) continue;
    const Candidates candidates = candidates_of(p, batch, block);
    for (int j = 0; j < 2; ++j) {
      const int64_t page = first_page + threadIdx.x % 16 + 16 * j;
      if (page >= pages) continue;
      const bool candidate = page >= candidates.begin && page < candidates.end;
      scores[((batch * blocks + block) * p.score_heads + head) * pages + page] =
          candidate ? tile[i][j] : device::minus_infinity<A>();
    }
  }
}

int64_t workspace_bytes(const PageScoreParams& params) {
  const Shape& shape = params.shape;
  return shape.batch * num_blocks(params) * shape.kv_heads * shape.head_dim *
         accumulator_bytes(params);
}

void run(const PageScoreParams& params) {
  const void* means = params.workspace;
  block_means(params, params.workspace);
  const int64_t pages = num_pages(params), blocks = num_blocks(params);
  const dim3 grid(ceil_div(pages, 32), ceil_div(blocks, 32),
                  params.shape.batch * params.score_heads);
  const auto stream = static_cast<cudaStream_t>(params.stream);
  device::with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    block_mean_kernel<T>
        <<<grid, 256, 0, stream>>>(params, static_cast<const Acc<T>*>(means), pages, blocks);
  });
  check_launch("score_block_mean");
}

}  // namespace

extern const Score kBlockMean = {workspace_bytes, run};

}  // namespace oomb::attention::pages
