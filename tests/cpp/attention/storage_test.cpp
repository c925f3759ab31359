#include "attention/cpu/storage.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention/cpu/gradient_page.h"

namespace oomb::attention::cpu {
namespace {

// The value of a 16-bit pattern from the definition of its format.
double decode(uint32_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double fraction = bits & ((1u << fraction_bits) - 1);
  const double sign = (bits & 0x8000u) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

template <typename Storage>
void expect_all_patterns(int exponent_bits) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const Storage stored{static_cast<uint16_t>(bits)};
    const double value = decode(bits, exponent_bits);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(widen(stored)));
      EXPECT_TRUE(std::isnan(widen(narrow<Storage>(widen(stored)))));
      continue;
    }
    ASSERT_EQ(widen(stored), value) << bits;
    ASSERT_EQ(narrow<Storage>(widen(stored)).bits, bits);
  }
}

// Halfway between two neighbours the even one wins; anything else goes to the nearer.
template <typename Storage>
void expect_nearest_even(uint32_t first, uint32_t last) {
  for (uint32_t bits = first; bits < last; ++bits) {
    const double low = widen(Storage{static_cast<uint16_t>(bits)});
    const double high = widen(Storage{static_cast<uint16_t>(bits + 1)});
    const float middle = static_cast<float>((low + high) / 2);
    const uint32_t even = bits + (bits & 1u);
    ASSERT_EQ(narrow<Storage>(middle).bits, even) << bits;
    ASSERT_EQ(narrow<Storage>(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(narrow<Storage>(std::nextafter(middle, HUGE_VALF)).bits, bits + 1);
  }
}

TEST(StorageTest, BFloat16) {
  expect_all_patterns<BFloat16>(8);
  expect_nearest_even<BFloat16>(0x0080, 0x7f00);
}

TEST(StorageTest, Half) {
  expect_all_patterns<Half>(5);
  expect_nearest_even<Half>(0x0000, 0x7bff);
  EXPECT_EQ(narrow<Half>(65519.9f).bits, 0x7bff);
  EXPECT_EQ(narrow<Half>(65520.0f).bits, 0x7c00);
}

TEST(StochasticRoundingTest, WhatIsRepresentableStays) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const BFloat16 stored{static_cast<uint16_t>(bits)};
    if (std::isnan(widen(stored))) continue;
    EXPECT_EQ(round_stochastic(widen(stored), 0xffff).bits, bits);
    EXPECT_EQ(round_stochastic(widen(stored), 0).bits, bits);
  }
}

TEST(StochasticRoundingTest, GoesUpAsOftenAsTheValueIsNearTheUpperNeighbour) {
  const double low = 1, step = 0x1p-7;
  for (const double share : {0.25, 0.5, 0.9}) {
    const float value = static_cast<float>(low + share * step);
    int64_t up = 0;
    const int64_t draws = 40000;
    for (int64_t i = 0; i < draws; ++i) {
      const RoundingNoise noise(5, i % 3, i / 1000);
      up += widen(round_stochastic(value, noise(i))) > 1 ? 1 : 0;
    }
    const double deviation = std::sqrt(share * (1 - share) / static_cast<double>(draws));
    EXPECT_NEAR(static_cast<double>(up) / static_cast<double>(draws), share, 5 * deviation);
  }
}

TEST(StochasticRoundingTest, NoiseDiffersBySeedSequencePageAndElement) {
  const auto words = [](uint64_t seed, int64_t batch, int64_t page, int64_t element) {
    const RoundingNoise noise(seed, batch, page);
    uint64_t word = 0;
    for (int64_t i = 0; i < 4; ++i) word = word << 16 | noise(element + i);
    return word;
  };
  const uint64_t base = words(1, 2, 3, 4);
  EXPECT_EQ(words(1, 2, 3, 4), base);
  EXPECT_NE(words(2, 2, 3, 4), base);
  EXPECT_NE(words(1, 3, 3, 4), base);
  EXPECT_NE(words(1, 2, 4, 4), base);
  EXPECT_NE(words(1, 2, 3, 8), base);
}

// Adds the same rows to dK and dV of every page; the results by page and kind.
std::vector<std::vector<uint16_t>> rounded_pages(const std::vector<int32_t>& units) {
  const Shape shape{1, 2, 2, 8, 16, 8};
  const int64_t size = 2 * 8 * 16;
  std::vector<BFloat16> pool(static_cast<size_t>(4 * size), BFloat16{0});
  const GradientPageTable table({pool.data(), size * 2, units.data(), DType::kBFloat16, 9}, 2,
                                shape);
  const std::vector<float> rows(8 * 16, 1.0f + 0x1p-8f);
  std::vector<std::vector<uint16_t>> pages;
  for (const int64_t page : {0, 1}) {
    for (const auto kind : {GradientPageTable::kKey, GradientPageTable::kValue}) {
      for (int64_t head = 0; head < 2; ++head) {
        table.add(0, page, kind, head, 8, 1.0f, rows.data(), 16);
        std::vector<uint16_t>& bits = pages.emplace_back();
        const BFloat16* written = table.at<BFloat16>(0, page, kind) + head * 8 * 16;
        for (int64_t i = 0; i < 8 * 16; ++i) bits.push_back(written[i].bits);
      }
    }
  }
  return pages;
}

TEST(StochasticRoundingTest, PagesRoundTheSameWayInAnySlotAndUnlikeEachOther) {
  const auto pages = rounded_pages({0, 1, 2, 3});
  EXPECT_EQ(rounded_pages({3, 0, 1, 2}), pages);
  for (size_t i = 0; i < pages.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(pages[i], pages[j]) << i << ", " << j;
  }
}

}  // namespace
}  // namespace oomb::attention::cpu
