// Writes one chunk's keys and values into their page slots, and the mean key of each page.
//
// One block per (page, kv head, sequence). Its threads form a grid of rows x columns over the
// page's [P, D] tile, a column being kVec neighbouring elements:
//
//            columns (D / kVec)
//          +--------------------+
//   groups | thread 0, 1, 2, .. |   each group copies every groups-th row of K and of V and keeps
//          | ..                 |   a running sum of its K columns; the groups' sums are then added
//          +--------------------+   in a fixed order

#include "attention/device/numeric.cuh"
#include "attention/pages/pages.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::pages {
namespace {

using device::Acc;

constexpr int kThreads = 256;

template <typename T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  T values[kVec];
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) page_write_kernel(const PageWriteParams params) {
  using A = Acc<T>;
  using Vector = Pack<T, kVec>;
  __shared__ A sums[kThreads * kVec];

  const int64_t page = params.page_begin + blockIdx.x;
  const int64_t head = blockIdx.y;
  const int64_t batch = blockIdx.z;
  const int64_t slot = params.slots[batch * params.slots_stride + page];
  if (slot < 0) return;

  const int page_size = static_cast<int>(params.shape.page_size);
  const int head_dim = static_cast<int>(params.shape.head_dim);
  const int64_t kv_heads = params.shape.kv_heads;
  int64_t real = params.shape.chunk;
  if (params.num_rows != nullptr && params.num_rows[batch] < real) real = params.num_rows[batch];
  const int64_t first_row = page * page_size;
  int rows = 0;  // real rows of this page
  if (real > first_row) rows = static_cast<int>(min(real - first_row, int64_t{page_size}));

  const T* k = static_cast<const T*>(params.k) + batch * params.k_strides.batch +
               head * params.k_strides.head + first_row * params.k_strides.token;
  const T* v = static_cast<const T*>(params.v) + batch * params.v_strides.batch +
               head * params.v_strides.head + first_row * params.v_strides.token;
  const int64_t tile = int64_t{page_size} * head_dim;
  T* k_page =
      reinterpret_cast<T*>(static_cast<char*>(params.kv_pool) + slot * params.kv_slot_bytes) +
      head * tile;
  T* v_page = k_page + kv_heads * tile;

  const int columns = head_dim / kVec;
  const int groups = kThreads / columns;
  const int group = threadIdx.x / columns;
  const int column = (threadIdx.x % columns) * kVec;
  A sum[kVec] = {};
  if (group < groups) {
    for (int row = group; row < page_size; row += groups) {
      Vector key = {}, value = {};
      if (row < rows) {
        key = *reinterpret_cast<const Vector*>(k + row * params.k_strides.token + column);
        value = *reinterpret_cast<const Vector*>(v + row * params.v_strides.token + column);
      }
      *reinterpret_cast<Vector*>(k_page + int64_t{row} * head_dim + column) = key;
      *reinterpret_cast<Vector*>(v_page + int64_t{row} * head_dim + column) = value;
      for (int i = 0; i < kVec; ++i) sum[i] += device::load(key.values[i]);
    }
    for (int i = 0; i < kVec; ++i) sums[group * head_dim + column + i] = sum[i];
  }
  if (params.summary == nullptr) return;
  __syncthreads();
  T* summary = static_cast<T*>(params.summary) +
               ((batch * params.summary_stride + page) * kv_heads + head) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += kThreads) {
    A total = 0;
    for (int g = 0; g < groups; ++g) total += sums[g * head_dim + d];
    summary[d] = device::store<T>(rows > 0 ? total / A(rows) : A(0));
  }
}

bool aligned(const void* pointer, const Strides& strides, int64_t element_bytes) {
  const auto multiple = [&](int64_t stride) { return stride * element_bytes % 16 == 0; };
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && multiple(strides.batch) &&
         multiple(strides.head) && multiple(strides.token);
}

}  // namespace

void page_write(const PageWriteParams& params) {
  const int64_t pages = params.page_end - params.page_begin;
  if (pages <= 0 || params.shape.batch == 0) return;
  const int64_t bytes = size_of(params.dtype);
  const bool wide = params.shape.head_dim * bytes % 16 == 0 &&
                    aligned(params.k, params.k_strides, bytes) &&
                    aligned(params.v, params.v_strides, bytes) && params.kv_slot_bytes % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(params.kv_pool) % 16 == 0;
  // A row has a thread for each of its columns.
  expect(wide || params.shape.head_dim <= kThreads, "k, v",
         "rows aligned to 16 bytes where head_dim exceeds 256", "others");
  const dim3 grid(pages, params.shape.kv_heads, params.shape.batch);
  const auto stream = static_cast<cudaStream_t>(params.stream);
  device::with_type(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (wide) {
      page_write_kernel<T, 16 / sizeof(T)><<<grid, kThreads, 0, stream>>>(params);
    } else {
      page_write_kernel<T, 1><<<grid, kThreads, 0, stream>>>(params);
    }
  });
  check_launch("page_write");
}

}  // namespace oomb::attention::pages
