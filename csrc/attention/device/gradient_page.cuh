#pragma once

// Adding to gradient pages. One thread owns an element within a launch, or several do in turn, so
// that a plain read-modify-write is enough.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/params.h"
#include "common/rounding.h"

namespace oomb::attention::device {

// Two values rounded, as they lie in memory.
//   noise: 16 random bits for each
__device__ inline uint32_t round_pair(float x, float y, uint32_t noise) {
  return __byte_perm(noisy_bits(x, noise & 0xffffu), noisy_bits(y, noise >> 16), 0x7632);
}

// Random bits of logical places, never of slots: moving a page changes nothing.
class RoundingNoise {
 public:
  RoundingNoise() = default;

  //   kind 0 dK, 1 dV
  //   part which of several additions to the page in one launch
  __device__ RoundingNoise(uint64_t seed, int64_t batch, int64_t page, int kind, int part = 0) {
    const uint64_t place = static_cast<uint64_t>(batch) << 48 ^ static_cast<uint64_t>(part) << 32 ^
                           static_cast<uint64_t>(page) << 1 ^ static_cast<uint64_t>(kind);
    noise_ = CounterNoise(spread(spread(place) ^ seed));
  }

  // For elements 2 * pair and 2 * pair + 1 of the page [Hkv, P, D].
  __device__ uint32_t pair(uint32_t pair) const { return noise_.pair(pair); }

 private:
  CounterNoise noise_;
};

// One page's dK or dV of one sequence; null when no gradient is wanted.
struct GradientPage {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  RoundingNoise noise;

  __device__ GradientPage(const GradientPages& grads, int64_t table_stride, int64_t batch,
                          int64_t page, int kind, int part = 0)
      : dtype(grads.dtype) {
    if (dtype == DType::kBFloat16) {
      noise = RoundingNoise(grads.rounding_seed, batch, page, kind, part);
    }
    if (grads.dkv_table == nullptr) return;
    const int64_t unit = grads.dkv_table[(batch * table_stride + page) * 2 + kind];
    if (unit >= 0) data = static_cast<char*>(grads.dkv_pool) + unit * grads.dkv_unit_bytes;
  }

  __device__ void add(int64_t element, double value) const {
    switch (dtype) {
      case DType::kFloat64: static_cast<double*>(data)[element] += value; break;
      case DType::kFloat32: static_cast<float*>(data)[element] += static_cast<float>(value); break;
      default: add_bfloat16(element, static_cast<float>(value)); break;
    }
  }

  __device__ void add(int64_t element, float value) const {
    switch (dtype) {
      case DType::kFloat64: static_cast<double*>(data)[element] += value; break;
      case DType::kFloat32: static_cast<float*>(data)[element] += value; break;
      default: add_bfloat16(element, value); break;
    }
  }

  // A thread's part of a row of a product: for n < kPairs, values(n), a float2, is added to
  // elements first + 8 * n and the one after. All loads come first, so that the row waits for one
  // flight. `first` is even. Not for kFloat64.
  template <int kPairs, typename Values>
  __device__ __forceinline__ void add_pairs(int64_t first, const Values& values) const {
    if (data == nullptr) return;
    if (dtype == DType::kFloat32) {
      float2* place = static_cast<float2*>(data) + first / 2;
      float2 old[kPairs];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) old[n] = place[4 * n];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const float2 value = values(n);
        place[4 * n] = make_float2(old[n].x + value.x, old[n].y + value.y);
      }
    } else {
      uint32_t* place = static_cast<uint32_t*>(data) + first / 2;
      uint32_t old[kPairs];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) old[n] = place[4 * n];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const float2 value = values(n);
        place[4 * n] = added_pair(old[n], value.x, value.y, first + 8 * n);
      }
    }
  }

  // Two neighbouring elements of a bfloat16 page, as they lie in memory, and what is added to them.
  __device__ uint32_t added_pair(uint32_t old, float x, float y, int64_t element) const {
    return round_pair(__uint_as_float(old << 16) + x, __uint_as_float(old & 0xffff0000u) + y,
                      noise.pair(static_cast<uint32_t>(element / 2)));
  }

 private:
  __device__ void add_bfloat16(int64_t element, float value) const {
    __nv_bfloat16* place = static_cast<__nv_bfloat16*>(data) + element;
    const uint32_t both = noise.pair(static_cast<uint32_t>(element / 2));
    const uint32_t own = element % 2 == 0 ? both & 0xffffu : both >> 16;
    *place = __ushort_as_bfloat16(
        static_cast<unsigned short>(noisy_bits(__bfloat162float(*place) + value, own) >> 16));
  }
};

}  // namespace oomb::attention::device
