// Queries summed over the heads that share a kv head, per token or averaged over a block.

#include "attention/device/numeric.cuh"
#include "attention/pages/score.h"
#include "attention/pages/score_candidates.cuh"
#include "common/cuda_check.h"

namespace oomb::attention::pages {
namespace {

using device::Acc;

constexpr int kThreads = 256;
constexpr int kMeansThreads = 1024;  // there are few blocks, and each reads a long way

template <typename T>
__device__ Acc<T> sum_over_group(const PageScoreParams& p, int64_t batch, int64_t kv_head,
                                 int64_t row, int64_t d) {
  const int64_t group = p.shape.query_heads / p.shape.kv_heads;
  const T* q = static_cast<const T*>(p.q) + batch * p.q_strides.batch +
               kv_head * group * p.q_strides.head + row * p.q_strides.token + d;
  Acc<T> sum = 0;
  for (int64_t h = 0; h < group; ++h) sum += device::load(q[h * p.q_strides.head]);
  return sum;
}

// One element per thread. Grid: (elements of [C, D], kv heads, batch).
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    group_sums_kernel(const PageScoreParams p, Out* __restrict__ sums) {
  const int64_t index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t row = index / p.shape.head_dim;
  if (row >= p.shape.chunk) return;
  const Acc<T> sum = sum_over_group<T>(p, blockIdx.z, blockIdx.y, row, index % p.shape.head_dim);
  const int64_t head = blockIdx.z * p.shape.kv_heads + blockIdx.y;
  sums[head * p.shape.chunk * p.shape.head_dim + index] = device::store<Out>(sum);
}

// One block per (query block, kv head, sequence). Threads: row groups x D; each sums its rows head
// by head, so that loads of several rows are under way at once.
template <typename T>
__global__ void __launch_bounds__(kMeansThreads)
    block_means_kernel(const PageScoreParams p, Acc<T>* __restrict__ means) {
  using A = Acc<T>;
  __shared__ A partial[kMeansThreads];
  const int head_dim = static_cast<int>(p.shape.head_dim);
  const int width = min(head_dim, kMeansThreads);
  const int groups = kMeansThreads / width;
  const int group = threadIdx.x / width;
  const int64_t heads = p.shape.query_heads / p.shape.kv_heads;
  const int64_t first = blockIdx.x * p.shape.page_size;
  const int64_t last = min(first + p.shape.page_size, real_rows(p, blockIdx.z));
  const int64_t count = (last - first) * heads;
  const int64_t block = blockIdx.z * int64_t{gridDim.x} + blockIdx.x;
  for (int base = 0; base < head_dim; base += width) {
    const int d = base + threadIdx.x % width;
    A sum = 0;
    if (group < groups && d < head_dim) {
      for (int64_t head = blockIdx.y * heads; head < (blockIdx.y + 1) * heads; ++head) {
        const T* q = static_cast<const T*>(p.q) + blockIdx.z * p.q_strides.batch +
                     head * p.q_strides.head + d;
#pragma unroll 8
        for (int64_t row = first + group; row < last; row += groups) {
          sum += device::load(q[row * p.q_strides.token]);
        }
      }
    }
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0 && d < head_dim) {
      for (int g = 1; g < groups; ++g) sum += partial[g * width + threadIdx.x];
      means[(block * p.shape.kv_heads + blockIdx.y) * head_dim + d] =
          count > 0 ? sum / static_cast<A>(count) : A(0);
    }
    __syncthreads();
  }
}

}  // namespace

void block_means(const PageScoreParams& params, void* means) {
  const dim3 grid(num_blocks(params), params.shape.kv_heads, params.shape.batch);
  const auto stream = static_cast<cudaStream_t>(params.stream);
  device::with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    block_means_kernel<T><<<grid, kMeansThreads, 0, stream>>>(params, static_cast<Acc<T>*>(means));
  });
  check_launch("block_means");
}

void group_sums(const PageScoreParams& params, void* sums, bool input_type) {
  const dim3 grid(ceil_div(params.shape.chunk * params.shape.head_dim, kThreads),
                  params.shape.kv_heads, params.shape.batch);
  const auto stream = static_cast<cudaStream_t>(params.stream);
  device::with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (input_type) {
      group_sums_kernel<T, T><<<grid, kThreads, 0, stream>>>(params, static_cast<T*>(sums));
    } else {
      group_sums_kernel<T, Acc<T>>
          <<<grid, kThreads, 0, stream>>>(params, static_cast<Acc<T>*>(sums));
    }
  });
  check_launch("group_sums");
}

}  // namespace oomb::attention::pages
