#pragma once

// Element types of the kernels: what each accumulates in, conversions, and the run-time choice.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/error.h"

namespace oomb::attention::device {

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using Acc = typename Accumulator<T>::type;

__device__ inline float load(float value) { return value; }
__device__ inline double load(double value) { return value; }
__device__ inline float load(__half value) { return __half2float(value); }
__device__ inline float load(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ inline T store(Acc<T> value);
template <>
__device__ inline float store<float>(float value) {
  return value;
}
template <>
__device__ inline double store<double>(double value) {
  return value;
}
template <>
__device__ inline __half store<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 store<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <typename A>
__device__ inline A minus_infinity() {
  return -static_cast<A>(INFINITY);
}

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls function(TypeTag<T>{}) with the C++ type of `dtype`.
template <typename Function>
void with_type(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat64: return function(TypeTag<double>{});
    case DType::kFloat32: return function(TypeTag<float>{});
    case DType::kFloat16: return function(TypeTag<__half>{});
    case DType::kBFloat16: return function(TypeTag<__nv_bfloat16>{});
  }
  throw InvalidArgument(concat("dtype: expected float64, float32, float16 or bfloat16, got ",
                               static_cast<int>(dtype)));
}

}  // namespace oomb::attention::device
