#pragma once

// What tensors and pages store, and its conversion from and to the type computed in. Everything is
// force-inlined: units compiled for different instruction sets must not share these bodies.

#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/error.h"
#include "common/rounding.h"

namespace oomb::attention::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <typename Storage>
using RealOf = std::conditional_t<std::is_same_v<Storage, double>, double, float>;

[[gnu::always_inline]] inline double widen(double value) { return value; }
[[gnu::always_inline]] inline float widen(float value) { return value; }

[[gnu::always_inline]] inline float widen(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

[[gnu::always_inline]] inline float widen(Half value) {
  // Exponent and fraction moved to float's place, then its bias corrected by a multiplication,
  // which also normalises subnormal numbers. Infinity and NaN get float's largest exponent.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t bits = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : finite;
  return std::bit_cast<float>(bits | sign);
}

template <typename Storage>
[[gnu::always_inline]] inline Storage narrow(RealOf<Storage> value) {
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    return BFloat16{nearest_bits(value)};
  } else if constexpr (std::is_same_v<Storage, Half>) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
      half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {
      // Subnormal: adding 0.5 leaves the fraction, rounded to 2^-24, in the lowest bits.
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
      half = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return Half{static_cast<uint16_t>(sign | half)};
  } else {
    return value;
  }
}

// Calls body.template operator()<Storage>() with the storage type of dtype.
template <typename Body>
void dispatch_storage(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat64: return body.template operator()<double>();
    case DType::kFloat32: return body.template operator()<float>();
    case DType::kBFloat16: return body.template operator()<BFloat16>();
    case DType::kFloat16: return body.template operator()<Half>();
  }
  throw InvalidArgument("dtype: expected float64, float32, bfloat16 or float16, got unknown");
}

}  // namespace oomb::attention::cpu
