#pragma once

// Adding to gradient pages. One thread owns an element within a launch, so that a plain
// read-modify-write is enough.

#include <cuda_bf16.h>

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::device {

// A good 32-bit hash of a 64-bit counter (the finaliser of splitmix64).
__device__ inline uint32_t hash(uint64_t counter) {
  counter += 0x9e3779b97f4a7c15ull;
  counter = (counter ^ (counter >> 30)) * 0xbf58476d1ce4e5b9ull;
  counter = (counter ^ (counter >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((counter ^ (counter >> 31)) >> 32);
}

// Rounds up with the probability that the dropped bits say, so that the expected value is exact.
// The random bits come from a counter of logical places, never of the slot: moving a page changes
// nothing. Infinities and NaN pass through the ordinary conversion.
__device__ inline __nv_bfloat16 round_stochastically(float value, uint64_t counter) {
  uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return __float2bfloat16_rn(value);
  bits += hash(counter) >> 16;
  return __ushort_as_bfloat16(static_cast<unsigned short>(bits >> 16));
}

// What identifies one element of a gradient page for rounding.
//   kind 0 dK, 1 dV; element: offset within [Hkv, P, D]
__device__ inline uint64_t rounding_counter(uint64_t seed, int64_t batch, int64_t page, int kind,
                                            int64_t element) {
  const uint64_t place = (static_cast<uint64_t>(batch) << 48) ^ (static_cast<uint64_t>(page) << 1) ^
                         static_cast<uint64_t>(kind);
  return (seed * 0xd1342543de82ef95ull) ^ (place * 0x2545f4914f6cdd1dull) ^
         (static_cast<uint64_t>(element) * 0x9e3779b97f4a7c15ull);
}

// One page's dK or dV of one sequence; null when no gradient is wanted.
struct GradientPage {
  void* data = nullptr;
  uint64_t seed = 0;
  int64_t batch = 0;
  int64_t page = 0;
  int kind = 0;
  DType dtype = DType::kFloat32;

  __device__ GradientPage(const GradientPages& grads, int64_t table_stride, int64_t batch,
                          int64_t page, int kind)
      : seed(grads.rounding_seed), batch(batch), page(page), kind(kind), dtype(grads.dtype) {
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

  // Two neighbouring elements, the first of them even. Not for kFloat64.
  __device__ void add_pair(int64_t element, float x, float y) const {
    if (data == nullptr) return;
    if (dtype == DType::kFloat32) {
      float2* place = reinterpret_cast<float2*>(static_cast<float*>(data) + element);
      const float2 sum = *place;
      *place = make_float2(sum.x + x, sum.y + y);
    } else {
      __nv_bfloat162* place =
          reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(data) + element);
      const float2 sum = __bfloat1622float2(*place);
      *place = __nv_bfloat162(
          round_stochastically(sum.x + x, rounding_counter(seed, batch, page, kind, element)),
          round_stochastically(sum.y + y, rounding_counter(seed, batch, page, kind, element + 1)));
    }
  }

 private:
  __device__ void add_bfloat16(int64_t element, float value) const {
    __nv_bfloat16* place = static_cast<__nv_bfloat16*>(data) + element;
    *place = round_stochastically(__bfloat162float(*place) + value,
                                  rounding_counter(seed, batch, page, kind, element));
  }
};

}  // namespace oomb::attention::device
