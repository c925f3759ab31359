#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define OOMB_HOST_DEVICE __host__ __device__
#else
#define OOMB_HOST_DEVICE
#endif

namespace oomb {

OOMB_HOST_DEVICE constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

OOMB_HOST_DEVICE constexpr int64_t align_up(int64_t value, int64_t alignment) {
  return ceil_div(value, alignment) * alignment;
}

}  // namespace oomb
