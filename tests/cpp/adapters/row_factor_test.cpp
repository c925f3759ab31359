#include "adapters/row_factor.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace oomb::adapters {
namespace {

float widen(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

std::vector<uint16_t> factor_of(const std::vector<float>& halves, int64_t rank, float scale) {
  RowFactorParams params;
  params.rank = rank;
  params.rows = static_cast<int64_t>(halves.size()) / (2 * rank);
  params.halves = halves.data();
  params.scale = scale;
  std::vector<uint16_t> factor(static_cast<size_t>(params.rows * 3 * rank), 0xbeef);
  params.factor = factor.data();
  row_factor(params);
  return factor;
}

TEST(RowFactor, PartsAddUpToTheValue) {
  constexpr int64_t kRows = 37;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (const int64_t rank : {1, 3, 16}) {
    for (const float scale : {1.0f, 0.37f, -64.0f}) {
      std::vector<float> halves(static_cast<size_t>(kRows * 2 * rank));
      for (float& value : halves)
        value = std::ldexp(normal(random), static_cast<int>(random() % 40) - 20);
      const std::vector<uint16_t> factor = factor_of(halves, rank, scale);
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t i = 0; i < rank; ++i) {
          const auto at = [&](int64_t part) {
            return factor[static_cast<size_t>((row * 3 + part) * rank + i)];
          };
          const size_t left = static_cast<size_t>(row * 2 * rank + i);
          const double u =
              (static_cast<double>(halves[left]) + halves[left + static_cast<size_t>(rank)]) *
              scale;
          // What a sum and a product in float lose beside 2^-17, half of what u2 is rounded to.
          const double lost =
              std::abs(u) * (0x1p-17 + 0x1p-23) +
              0x1p-23 * std::abs(static_cast<double>(scale)) *
                  (std::abs(halves[left]) + std::abs(halves[left + static_cast<size_t>(rank)]));
          EXPECT_EQ(at(0), at(1));
          EXPECT_NEAR(widen(at(0)), u, std::abs(u) * 0x1p-8 + lost);
          EXPECT_NEAR(static_cast<double>(widen(at(0))) + widen(at(2)), u, lost);
        }
      }
    }
  }
}

TEST(RowFactor, RoundsToTheEvenOfTwoAsNear) {
  // 1 + 2^-8 lies between 1 and 1 + 2^-7; 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6.
  const std::vector<uint16_t> factor = factor_of({1.0f, 1.0f, 0x1p-8f, 3 * 0x1p-8f}, 2, 1.0f);
  EXPECT_EQ(widen(factor[0]), 1.0f);
  EXPECT_EQ(widen(factor[1]), 1.0f + 0x1p-6f);
  EXPECT_EQ(widen(factor[4]), 0x1p-8f);
  EXPECT_EQ(widen(factor[5]), -0x1p-8f);
}

TEST(RowFactor, KeepsWhatIsNoNumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<uint16_t> factor = factor_of({nan, 0.0f, infinity, 0.0f}, 1, 2.0f);
  EXPECT_TRUE(std::isnan(widen(factor[0])));
  EXPECT_EQ(widen(factor[3]), infinity);
}

TEST(RowFactor, TakesNoRows) { EXPECT_TRUE(factor_of({}, 4, 1.0f).empty()); }

}  // namespace
}  // namespace oomb::adapters
