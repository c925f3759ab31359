#include "sums/rounded_add.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace oomb::sums {
namespace {

uint16_t narrow(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }
float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

std::vector<uint16_t> added(std::vector<uint16_t> sum, const std::vector<float>& addend,
                            uint64_t seed) {
  RoundedAddParams params;
  params.elements = static_cast<int64_t>(sum.size());
  params.sum = sum.data();
  params.addend = addend.data();
  params.seed = seed;
  rounded_add(params);
  return sum;
}

TEST(RoundedAdd, IsExactOnAverage) {
  // 1/8 of the distance between the neighbours of 1: to nearest it would always be lost.
  constexpr int kElements = 1 << 20;
  const float step = 0x1p-7f;
  const std::vector<uint16_t> sum(kElements, narrow(1.0f));
  const std::vector<float> addend(kElements, step / 8);
  double mean = 0;
  for (const uint16_t bits : added(sum, addend, 3)) {
    const float value = widen(bits);
    ASSERT_TRUE(value == 1.0f || value == 1.0f + step);
    mean += value / kElements;
  }
  // Five standard deviations of the mean.
  EXPECT_NEAR(mean, 1 + step / 8, 5 * step * std::sqrt(7.0 / 64 / kElements));
}

TEST(RoundedAdd, KeepsWhatNeedsNoRounding) {
  const std::vector<uint16_t> sum = {narrow(1.5f), narrow(-2.0f), narrow(0.0f), narrow(0x1p-100f)};
  const std::vector<float> addend = {0.5f, -2.0f, 0.0f, 0.0f};
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto result = added(sum, addend, seed);
    EXPECT_EQ(widen(result[0]), 2.0f);
    EXPECT_EQ(widen(result[1]), -4.0f);
    EXPECT_EQ(widen(result[2]), 0.0f);
    EXPECT_EQ(widen(result[3]), 0x1p-100f);
  }
}

TEST(RoundedAdd, KeepsInfinityAndNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<uint16_t> sum(4, narrow(1.0f));
  const std::vector<float> addend = {kInfinity, -kInfinity, std::nanf(""), 3e38f};
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto result = added(sum, addend, seed);
    EXPECT_EQ(widen(result[0]), kInfinity);
    EXPECT_EQ(widen(result[1]), -kInfinity);
    EXPECT_TRUE(std::isnan(widen(result[2])));
    EXPECT_GT(widen(result[3]), 2.9e38f);
  }
}

TEST(RoundedAdd, NoiseIsAFunctionOfSeedAndElement) {
  const std::vector<uint16_t> sum(1000, narrow(1.0f));
  const std::vector<float> addend(1000, 0x1p-8f);  // half way
  EXPECT_EQ(added(sum, addend, 7), added(sum, addend, 7));
  EXPECT_NE(added(sum, addend, 7), added(sum, addend, 8));
  const std::vector<uint16_t> fewer(sum.begin(), sum.begin() + 333);
  const auto all = added(sum, addend, 7);
  const auto part = added(fewer, {addend.begin(), addend.begin() + 333}, 7);
  EXPECT_EQ(part, std::vector<uint16_t>(all.begin(), all.begin() + 333));
}

TEST(RoundedAdd, NeighboursAreRoundedIndependently) {
  const std::vector<uint16_t> sum(1 << 18, narrow(1.0f));
  const std::vector<float> addend(sum.size(), 0x1p-8f);
  const auto result = added(sum, addend, 11);
  for (const size_t distance : {1, 2, 3, 64}) {
    double equal = 0;
    for (size_t i = 0; i + distance < result.size(); ++i)
      equal += result[i] == result[i + distance];
    const double pairs = static_cast<double>(result.size() - distance);
    EXPECT_NEAR(equal / pairs, 0.5, 5 * 0.5 / std::sqrt(pairs)) << distance;
  }
}

}  // namespace
}  // namespace oomb::sums
