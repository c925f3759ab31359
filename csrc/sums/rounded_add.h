#pragma once

// Adding to a bfloat16 sum with stochastic rounding: the sums of parameter gradients, where two
// bytes each are all that there is room for.

#include <cstdint>

#include "common/dtype.h"

namespace oomb::sums {

// sum[i] = round(sum[i] + addend[i]), the addition in float.
struct RoundedAddParams {
  int64_t elements = 0;                  // below 2^33
  void* sum = nullptr;                   // [elements] bfloat16
  const void* addend = nullptr;          // [elements] addend_dtype
  DType addend_dtype = DType::kFloat32;  // or kBFloat16
  uint64_t seed = 0;       // the noise is a function of the seed and the element alone
  void* stream = nullptr;  // a cudaStream_t; the CPU has none
  int device = 0;          // of the stream and the arrays, on GPUs
};

void rounded_add(const RoundedAddParams& params);

namespace cuda {
void rounded_add(const RoundedAddParams& params);
}

}  // namespace oomb::sums
