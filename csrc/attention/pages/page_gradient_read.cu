// Adds the gradient that later chunks left on a chunk's pages to the gradient of its own keys and
// values. One block per (page, kv head, sequence); memory-bound.

#include "attention/device/numeric.cuh"
#include "attention/pages/pages.h"
#include "common/cuda_check.h"

namespace oomb::attention::pages {
namespace {

constexpr int kThreads = 256;

template <typename T, typename G>
__global__ void __launch_bounds__(kThreads)
    page_gradient_read_kernel(const PageGradientReadParams params) {
  using A = device::Acc<T>;
  const int64_t page = params.page_begin + blockIdx.x;
  const int64_t head = blockIdx.y;
  const int64_t batch = blockIdx.z;
  const int page_size = static_cast<int>(params.shape.page_size);
  const int head_dim = static_cast<int>(params.shape.head_dim);
  const int64_t first_row = page * page_size;
  const int elements =
      static_cast<int>(min(params.shape.chunk - first_row, int64_t{page_size})) * head_dim;
  const A scale = static_cast<A>(params.scale);

  for (int kind = 0; kind < 2; ++kind) {
    const int64_t unit = params.grads.dkv_table[(batch * params.table_stride + page) * 2 + kind];
    if (unit < 0) continue;
    const G* gradient = reinterpret_cast<const G*>(static_cast<const char*>(params.grads.dkv_pool) +
                                                   unit * params.grads.dkv_unit_bytes) +
                        head * page_size * head_dim;
    const Strides& strides = kind == 0 ? params.dk_strides : params.dv_strides;
    T* target = static_cast<T*>(kind == 0 ? params.dk : params.dv) + batch * strides.batch +
                head * strides.head + first_row * strides.token;
    for (int i = threadIdx.x; i < elements; i += kThreads) {
      T* place = target + (i / head_dim) * strides.token + i % head_dim;
      *place = device::store<T>(device::load(*place) +
                                scale * static_cast<A>(device::load(gradient[i])));
    }
  }
}

}  // namespace

void page_gradient_read(const PageGradientReadParams& params) {
  const int64_t pages = params.page_end - params.page_begin;
  if (pages <= 0 || params.shape.batch == 0) return;
  const dim3 grid(pages, params.shape.kv_heads, params.shape.batch);
  const auto stream = static_cast<cudaStream_t>(params.stream);
  device::with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    device::with_type(params.grads.dtype, [&](auto gradient_tag) {
      using G = typename decltype(gradient_tag)::type;
      page_gradient_read_kernel<T, G><<<grid, kThreads, 0, stream>>>(params);
    });
  });
  check_launch("page_gradient_read");
}

}  // namespace oomb::attention::pages
