#include "common/math.h"

#include <gtest/gtest.h>

#include "common/dtype.h"

namespace oomb {
namespace {

TEST(CeilDiv, RoundsUp) {
  EXPECT_EQ(ceil_div(0, 128), 0);
  EXPECT_EQ(ceil_div(1, 128), 1);
  EXPECT_EQ(ceil_div(128, 128), 1);
  EXPECT_EQ(ceil_div(129, 128), 2);
}

TEST(CeilDiv, IsNotLimitedTo32Bits) {
  EXPECT_EQ(ceil_div((int64_t{1} << 40) + 1, 2), (int64_t{1} << 39) + 1);
}

TEST(AlignUp, GivesTheNextMultiple) {
  EXPECT_EQ(align_up(0, 16), 0);
  EXPECT_EQ(align_up(1, 16), 16);
  EXPECT_EQ(align_up(16, 16), 16);
  EXPECT_EQ(align_up((int64_t{1} << 33) + 1, 256), (int64_t{1} << 33) + 256);
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kFloat64), 8);
  EXPECT_EQ(size_of(DType::kFloat32), 4);
  EXPECT_EQ(size_of(DType::kFloat16), 2);
  EXPECT_EQ(size_of(DType::kBFloat16), 2);
  EXPECT_STREQ(name_of(DType::kBFloat16), "bfloat16");
}

}  // namespace
}  // namespace oomb
