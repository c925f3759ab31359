#pragma once

// Rounding to bfloat16: to nearest, and stochastically. There a value becomes one of its two
// neighbours, each as often as it is near to it, so that the expected value is exact: a thousand
// small additions are not lost, as they are when each is rounded to nearest.

#include <bit>
#include <cstdint>

#include "common/math.h"

namespace oomb {

// The bits of the nearest bfloat16, of two as near the even one; NaN stays NaN. Always inlined:
// files compiled for other processors call it too.
[[gnu::always_inline]] OOMB_HOST_DEVICE constexpr uint16_t nearest_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Spreads every bit of a word over all of it: odd multiplications carry upwards, shifts bring down.
OOMB_HOST_DEVICE constexpr uint64_t spread(uint64_t word) {
  word = (word ^ word >> 31) * 0x9e3779b97f4a7c15ull;
  word = (word ^ word >> 29) * 0xd6e8feb86659fd93ull;
  return word ^ word >> 32;
}

// Random bits that are a function of a key and a place alone. The key is spread once; then a pair
// of elements costs two multiplications of 32 bits.
class CounterNoise {
 public:
  CounterNoise() = default;
  OOMB_HOST_DEVICE explicit constexpr CounterNoise(uint64_t key)
      : first_(static_cast<uint32_t>(key)), second_(static_cast<uint32_t>(key >> 32)) {}

  // For elements 2 * pair and 2 * pair + 1: 16 bits each, the first one's below.
  OOMB_HOST_DEVICE constexpr uint32_t pair(uint32_t pair) const {
    uint32_t word = pair ^ first_;
    word = (word ^ word >> 16) * 0x21f0aaadu;
    word = ((word ^ word >> 15) + second_) * 0x735a2d97u;
    return word ^ word >> 15;
  }

 private:
  uint32_t first_ = 0;
  uint32_t second_ = 0;
};

// A value rounded, in the upper half of a word; its lower half is left over. Infinities stay what
// they are whatever is added; NaN would not.
//   noise: 16 random bits
OOMB_HOST_DEVICE constexpr uint32_t noisy_bits(float value, uint32_t noise) {
  return value == value ? std::bit_cast<uint32_t>(value) + noise : 0x7fff0000u;
}

}  // namespace oomb
