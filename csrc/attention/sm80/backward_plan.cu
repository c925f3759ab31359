#include "attention/device/visibility.cuh"
#include "attention/sm80/backward_plan.h"
#include "attention/sm80/block_place.cuh"
#include "attention/sm80/one_pass.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::sm80 {
namespace {

constexpr int kTileRows = 64;
constexpr int kClasses = 32;  // of degrees, for ordering the work

// One warp per tile. Grid: (tiles / 8, batch).
__global__ void __launch_bounds__(256)
    ranges_kernel(const BackwardParams p, const BackwardPlan plan) {
  const int64_t tile = blockIdx.x * int64_t{8} + threadIdx.x / 32;
  if (tile >= plan.query_tiles) return;
  const int num_past = static_cast<int>(p.past.num_tokens);
  int begin = INT32_MAX, last = 0, end = INT32_MAX;
  for (int i = threadIdx.x % 32; i < kTileRows; i += 32) {
    const int row = static_cast<int>(tile) * kTileRows + i;
    if (row >= p.shape.chunk) break;
    const auto keys = device::visible_keys(p.shape, p.visibility, num_past, blockIdx.y, row);
    begin = min(begin, keys.begin);
    last = max(last, keys.begin);
    end = min(end, keys.end);
  }
  begin = __reduce_min_sync(0xffffffffu, begin);
  last = __reduce_max_sync(0xffffffffu, last);
  end = __reduce_min_sync(0xffffffffu, end);
  if (threadIdx.x % 32 == 0) {
    plan.ranges[blockIdx.y * plan.query_tiles + tile] = RowRange{begin, last, end, 0};
  }
}

// One thread per list entry. Grid: (entries of one sequence, batch).
__global__ void __launch_bounds__(256)
    transpose_kernel(const BackwardParams p, const BackwardPlan plan) {
  const int64_t lists = p.past.selection_heads;
  const int64_t index = blockIdx.x * int64_t{256} + threadIdx.x;
  const int64_t entries = plan.query_blocks * lists * p.past.budget;
  if (index >= entries) return;
  const int64_t page = p.past.selection[blockIdx.y * entries + index];
  if (page < p.past.page_begin || page >= p.past.page_end) return;
  const int64_t block = index / (lists * p.past.budget);
  const int64_t list = index / p.past.budget % lists;
  const int64_t row = (blockIdx.y * lists + list) * plan.pages + page - p.past.page_begin;
  atomicOr(plan.blocks + row * plan.words + block / 32, 1u << (block % 32));
}

// Collects the pages to work on, those with most query blocks first. The order within a class is
// left to chance: pages are independent of each other. Grid: (lists, batch).
__global__ void __launch_bounds__(1024)
    collect_kernel(const BackwardParams p, const BackwardPlan plan) {
  __shared__ int places[kClasses];
  const int64_t list = blockIdx.y * p.past.selection_heads + blockIdx.x;
  const uint32_t* blocks = plan.blocks + list * plan.pages * plan.words;
  int32_t* work = plan.work + list * plan.capacity;

  // -1: nothing to do; 0: the highest degrees.
  const auto class_of = [&](int64_t index) {
    int degree = 0;
    for (int64_t w = 0; w < plan.words; ++w) degree += __popc(blocks[index * plan.words + w]);
    if (degree == 0) return -1;
    const int64_t entry = blockIdx.y * p.past.table_stride + p.past.page_begin + index;
    if (!plan.in_one_pass && p.grads.dkv_table[entry * 2] < 0 &&
        p.grads.dkv_table[entry * 2 + 1] < 0)
      return -1;
    return static_cast<int>((plan.query_blocks - degree) * kClasses / plan.query_blocks);
  };

  if (threadIdx.x < kClasses) places[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < plan.pages; i += blockDim.x) {
    const int c = class_of(i);
    if (c >= 0) atomicAdd(&places[c], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int c = 0; c < kClasses; ++c) {
      const int count = places[c];
      places[c] = sum;
      sum += count;
    }
    plan.counts[list] = sum;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < plan.pages; i += blockDim.x) {
    const int c = class_of(i);
    if (c >= 0) work[atomicAdd(&places[c], 1)] = static_cast<int32_t>(p.past.page_begin + i);
  }
}

// One thread per row of the chunk and head.
__global__ void __launch_bounds__(256) lse_kernel(const float* lse, float* scaled, int64_t rows) {
  const int64_t row = blockIdx.x * int64_t{256} + threadIdx.x;
  if (row >= rows) return;
  scaled[row] = lse[row] == -INFINITY ? INFINITY : lse[row] * kLog2E;
}

}  // namespace

BackwardPlan::BackwardPlan(const BackwardParams& params, void* workspace) {
  const auto take = [&](int64_t count, int64_t size) {
    char* place = workspace == nullptr ? nullptr : static_cast<char*>(workspace) + bytes;
    bytes += align_up(count * size, 256);
    return place;
  };
  const int64_t batch = params.shape.batch;
  query_tiles = ceil_div(params.shape.chunk, kTileRows);
  query_blocks = ceil_div(params.shape.chunk, params.shape.page_size);
  pages = params.past.page_end - params.past.page_begin;
  const Visibility& visibility = params.visibility;
  if (visibility.window > 0 || visibility.first_key != nullptr || visibility.num_keys != nullptr) {
    ranges = reinterpret_cast<RowRange*>(take(batch * query_tiles, sizeof(RowRange)));
  }
  in_one_pass = one_pass(params);
  const bool wanted = in_one_pass || params.grads.dkv_table != nullptr;
  if (params.past.selection != nullptr && pages > 0 && wanted) {
    const int64_t lists = batch * params.past.selection_heads;
    words = ceil_div(query_blocks, 32);
    const int64_t listed = query_blocks * params.past.budget;
    capacity = listed < pages ? listed : pages;
    blocks = reinterpret_cast<uint32_t*>(take(lists * pages * words, sizeof(uint32_t)));
    work = reinterpret_cast<int32_t*>(take(lists * capacity, sizeof(int32_t)));
    counts = reinterpret_cast<int32_t*>(take(lists, sizeof(int32_t)));
  }
  if (!in_one_pass) return;
  const int64_t rows = batch * params.shape.query_heads * params.shape.chunk;
  lse = reinterpret_cast<float*>(take(rows, sizeof(float)));
  if (params.deterministic) {
    next_unit = reinterpret_cast<int32_t*>(take(1, sizeof(int32_t)));
    turns = reinterpret_cast<int32_t*>(
        take(batch * params.shape.query_heads * query_tiles, sizeof(int32_t)));
  }
  dq = static_cast<float*>(params.dq_acc);
  if (dq == nullptr) {
    dq = reinterpret_cast<float*>(take(rows * params.shape.head_dim, sizeof(float)));
  }
}

void make_plan(const BackwardParams& params, const BackwardPlan& plan) {
  const auto stream = static_cast<cudaStream_t>(params.stream);
  const int64_t batch = params.shape.batch;
  if (plan.ranges != nullptr) {
    const dim3 grid(ceil_div(plan.query_tiles, 8), batch);
    ranges_kernel<<<grid, 256, 0, stream>>>(params, plan);
    check_launch("attention_backward row ranges (sm80)");
  }
  if (plan.blocks != nullptr) {
    const int64_t lists = params.past.selection_heads;
    check_cuda(cudaMemsetAsync(plan.blocks, 0,
                               batch * lists * plan.pages * plan.words * sizeof(uint32_t), stream),
               "cudaMemsetAsync");
    const dim3 entries(ceil_div(plan.query_blocks * lists * params.past.budget, 256), batch);
    transpose_kernel<<<entries, 256, 0, stream>>>(params, plan);
    check_launch("attention_backward page lists (sm80)");
    collect_kernel<<<dim3(lists, batch), 1024, 0, stream>>>(params, plan);
    check_launch("attention_backward work list (sm80)");
  }
  if (!plan.in_one_pass) return;
  const int64_t heads = batch * params.shape.query_heads, rows = heads * params.shape.chunk;
  lse_kernel<<<ceil_div(rows, 256), 256, 0, stream>>>(static_cast<const float*>(params.lse),
                                                      plan.lse, rows);
  check_launch("attention_backward lse (sm80)");
  const auto clear = [stream](void* place, int64_t size) {
    check_cuda(cudaMemsetAsync(place, 0, size, stream), "cudaMemsetAsync");
  };
  if (params.first_wave) clear(plan.dq, rows * params.shape.head_dim * sizeof(float));
  if (plan.turns != nullptr) {
    clear(plan.next_unit, sizeof(int32_t));
    clear(plan.turns, heads * plan.query_tiles * sizeof(int32_t));
  }
}

}  // namespace oomb::attention::sm80
