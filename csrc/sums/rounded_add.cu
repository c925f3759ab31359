// Memory-bound: a thread loads eight neighbours of both arrays at once, 16 bytes of the sum. What
// does not lie on 16 bytes, and the tail, goes one by one.

#include <cstdint>

#include "common/cuda_check.h"
#include "common/rounding.h"
#include "sums/rounded_add.h"

namespace oomb::sums {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int64_t kMaxBlocks = 132 * 16;

__device__ float widen(uint32_t bits) { return __uint_as_float(bits << 16); }

__device__ void load(const float* addend, float (&values)[kVector]) {
  const float4 low = reinterpret_cast<const float4*>(addend)[0];
  const float4 high = reinterpret_cast<const float4*>(addend)[1];
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

__device__ void load(const uint16_t* addend, float (&values)[kVector]) {
  const uint4 words = *reinterpret_cast<const uint4*>(addend);
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = widen(pairs[i] & 0xffffu);
    values[2 * i + 1] = widen(pairs[i] >> 16);
  }
}

__device__ float load_one(const float* addend) { return *addend; }
__device__ float load_one(const uint16_t* addend) { return widen(*addend); }

// Two neighbours of the sum as they lie in memory, and what is added to them.
__device__ uint32_t added(uint32_t old, float x, float y, uint32_t noise) {
  const uint32_t low = noisy_bits(widen(old & 0xffffu) + x, noise & 0xffffu) >> 16;
  return low | (noisy_bits(widen(old >> 16) + y, noise >> 16) & 0xffff0000u);
}

template <typename Addend>
__global__ void __launch_bounds__(kThreads)
    rounded_add_kernel(uint16_t* sum, const Addend* addend, int64_t elements, int64_t vectors,
                       CounterNoise noise) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = first; i < vectors; i += step) {
    uint4* place = reinterpret_cast<uint4*>(sum) + i;
    const uint4 old = *place;
    float values[kVector];
    load(addend + i * kVector, values);
    const auto pair = static_cast<uint32_t>(i * (kVector / 2));
    *place = make_uint4(added(old.x, values[0], values[1], noise.pair(pair)),
                        added(old.y, values[2], values[3], noise.pair(pair + 1)),
                        added(old.z, values[4], values[5], noise.pair(pair + 2)),
                        added(old.w, values[6], values[7], noise.pair(pair + 3)));
  }
  for (int64_t i = vectors * kVector + first; i < elements; i += step) {
    const uint32_t both = noise.pair(static_cast<uint32_t>(i / 2));
    const uint32_t own = i % 2 == 0 ? both & 0xffffu : both >> 16;
    sum[i] = static_cast<uint16_t>(noisy_bits(widen(sum[i]) + load_one(addend + i), own) >> 16);
  }
}

template <typename Addend>
void launch(const RoundedAddParams& params) {
  const auto place =
      reinterpret_cast<uintptr_t>(params.sum) | reinterpret_cast<uintptr_t>(params.addend);
  const int64_t vectors = place % 16 == 0 ? params.elements / kVector : 0;
  const int64_t items = vectors > 0 ? vectors : params.elements;
  const int64_t blocks = ceil_div(items, int64_t{kThreads});
  rounded_add_kernel<Addend><<<static_cast<uint32_t>(blocks < kMaxBlocks ? blocks : kMaxBlocks),
                               kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(
      static_cast<uint16_t*>(params.sum), static_cast<const Addend*>(params.addend),
      params.elements, vectors, CounterNoise(spread(params.seed)));
  check_launch("rounded_add");
}

}  // namespace

void cuda::rounded_add(const RoundedAddParams& params) {
  if (params.elements == 0) return;
  const DeviceGuard guard(params.device);
  (params.addend_dtype == DType::kFloat32 ? launch<float> : launch<uint16_t>)(params);
}

}  // namespace oomb::sums
