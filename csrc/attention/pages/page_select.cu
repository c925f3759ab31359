// The budget highest scores of each row, as ascending page numbers.
//
// One block per row. Scores become order-preserving unsigned keys; forced pages (sinks, recent)
// take the highest key. A radix select finds the budget-th highest key, eight bits a pass; a last
// pass writes the chosen pages. Every warp owns one contiguous piece of the row and visits it in
// order, so that "how many before me" is a ballot plus a scan over the warps: ties go to the lower
// page, and the result comes out sorted.

#include "attention/device/numeric.cuh"
#include "attention/pages/pages.h"
#include "common/cuda_check.h"
#include "common/math.h"

namespace oomb::attention::pages {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 256;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ uint32_t ordered_key(float score) {
  const uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ uint64_t ordered_key(double score) {
  const uint64_t bits = __double_as_longlong(score == 0.0 ? 0.0 : score);
  return bits >> 63 ? ~bits : bits | (1ull << 63);
}

// Exclusive sum over the warps of one value per warp; `total` gets the sum of all.
__device__ int64_t scan_warps(int64_t value, int64_t* scratch, int64_t* total) {
  const int warp = threadIdx.x / 32;
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[warp] = value;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += scratch[w];
    all += scratch[w];
  }
  *total = all;
  return before;
}

// One row, as this thread's warp sees it.
template <typename A>
struct Row {
  using Key = decltype(ordered_key(A{}));

  const A* scores;
  int64_t begin, end;  // this warp's piece
  int64_t rank = 0;    // candidates before the piece
  int64_t sinks = 0;   // candidates with rank < sinks or >= recents are forced
  int64_t recents = INT64_MAX;

  // Calls function(page, key, is_candidate) for all 32 lanes at a time.
  template <typename Function>
  __device__ void visit(Function&& function) const {
    const int lane = threadIdx.x % 32;
    int64_t before = rank;
    for (int64_t base = begin; base < end; base += 32) {
      const int64_t page = base + lane;
      const A score = page < end ? scores[page] : device::minus_infinity<A>();
      const bool candidate = score > device::minus_infinity<A>();
      const unsigned mask = __ballot_sync(kAllLanes, candidate);
      const int64_t mine = before + __popc(mask & ((1u << lane) - 1));
      Key key = ordered_key(score);
      if (mine < sinks || mine >= recents) key = ~Key{0};
      function(page, key, candidate);
      before += __popc(mask);
    }
  }
};

template <typename A>
__global__ void __launch_bounds__(kThreads) page_select_kernel(const PageSelectParams params) {
  using Key = typename Row<A>::Key;
  __shared__ int64_t scratch[kWarps];
  __shared__ unsigned histogram[kBins];
  __shared__ Key shared_prefix;
  __shared__ int64_t shared_needed;

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int64_t piece = align_up(ceil_div(params.num_pages, kWarps), 32);
  Row<A> row;
  row.scores = static_cast<const A*>(params.scores) + blockIdx.x * params.num_pages;
  row.begin = min(warp * piece, params.num_pages);
  row.end = min(row.begin + piece, params.num_pages);
  int32_t* selection = params.selection + blockIdx.x * params.budget;

  int64_t count = 0, candidates = 0;
  row.visit(
      [&](int64_t, Key, bool candidate) { count += __popc(__ballot_sync(kAllLanes, candidate)); });
  row.rank = scan_warps(count, scratch, &candidates);
  row.sinks = params.sink_pages;
  row.recents = candidates - params.recent_pages;

  // Radix select. Afterwards keys above `threshold` are chosen, and the first `needed` equal ones.
  Key threshold = 0;
  int64_t needed = params.budget;
  if (candidates > params.budget) {
    Key known = 0;  // mask of the bits decided so far
    for (int shift = sizeof(Key) * 8 - 8; shift >= 0; shift -= 8) {
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) histogram[bin] = 0;
      __syncthreads();
      row.visit([&](int64_t, Key key, bool candidate) {
        if (candidate && (key & known) == threshold) atomicAdd(&histogram[key >> shift & 255], 1u);
      });
      __syncthreads();
      if (threadIdx.x == 0) {
        int bin = kBins - 1;
        for (; bin > 0 && histogram[bin] < needed; --bin) needed -= histogram[bin];
        shared_prefix = threshold | static_cast<Key>(bin) << shift;
        shared_needed = needed;
      }
      __syncthreads();
      threshold = shared_prefix;
      needed = shared_needed;
      known |= Key{255} << shift;
    }
  }

  int64_t above = 0, equal = 0, total_above = 0, total_equal = 0;
  row.visit([&](int64_t, Key key, bool candidate) {
    above += __popc(__ballot_sync(kAllLanes, candidate && key > threshold));
    equal += __popc(__ballot_sync(kAllLanes, candidate && key == threshold));
  });
  above = scan_warps(above, scratch, &total_above);
  equal = scan_warps(equal, scratch, &total_equal);
  const unsigned below_lane = (1u << lane) - 1;
  row.visit([&](int64_t page, Key key, bool candidate) {
    const bool is_above = candidate && key > threshold;
    const bool is_equal = candidate && key == threshold;
    const unsigned above_mask = __ballot_sync(kAllLanes, is_above);
    const unsigned equal_mask = __ballot_sync(kAllLanes, is_equal);
    const int64_t above_before = above + __popc(above_mask & below_lane);
    const int64_t equal_before = equal + __popc(equal_mask & below_lane);
    if (is_above || (is_equal && equal_before < needed)) {
      selection[above_before + min(equal_before, needed)] = static_cast<int32_t>(page);
    }
    above += __popc(above_mask);
    equal += __popc(equal_mask);
  });
  const int64_t chosen = total_above + min(total_equal, needed);
  for (int64_t i = chosen + threadIdx.x; i < params.budget; i += kThreads) selection[i] = -1;
}

}  // namespace

void page_select(const PageSelectParams& params) {
  if (params.rows == 0 || params.budget == 0) return;
  const auto stream = static_cast<cudaStream_t>(params.stream);
  if (params.dtype == DType::kFloat64) {
    page_select_kernel<double><<<params.rows, kThreads, 0, stream>>>(params);
  } else {
    page_select_kernel<float><<<params.rows, kThreads, 0, stream>>>(params);
  }
  check_launch("page_select");
}

}  // namespace oomb::attention::pages
