#include "common/bytes.h"

#include <gtest/gtest.h>

#include <limits>

namespace oomb {
namespace {

TEST(HumanBytes, SmallSizesAreExact) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1), "1 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
}

TEST(HumanBytes, UsesTheLargestUnitBelowTheValue) {
  EXPECT_EQ(human_bytes(kKiB), "1.00 KiB");
  EXPECT_EQ(human_bytes(kKiB + kKiB / 2), "1.50 KiB");
  EXPECT_EQ(human_bytes(256 * kKiB), "256.00 KiB");
  EXPECT_EQ(human_bytes(40 * kGiB), "40.00 GiB");
  EXPECT_EQ(human_bytes(3 * 1024 * kGiB), "3.00 TiB");
}

TEST(HumanBytes, KeepsTheSignAndTheExtremes) {
  EXPECT_EQ(human_bytes(-2 * kMiB), "-2.00 MiB");
  EXPECT_EQ(human_bytes(std::numeric_limits<int64_t>::max()), "8192.00 PiB");
  EXPECT_EQ(human_bytes(std::numeric_limits<int64_t>::min()), "-8192.00 PiB");
}

}  // namespace
}  // namespace oomb
