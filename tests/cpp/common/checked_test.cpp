#include "common/checked.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace oomb {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

TEST(CheckedProductTest, IsTheProductWhereItFits) {
  EXPECT_EQ(checked_product("size", 3, 4, 5), 60);
  EXPECT_EQ(checked_product("size", kMostElements, 1), kMostElements);
  EXPECT_EQ(checked_product("size", 0, kMostElements), 0);
}

TEST(CheckedProductTest, RefusesWhatDoesNotFitWhereverItOverflows) {
  EXPECT_THROW(checked_product("size", kMostElements, 2), InvalidArgument);
  EXPECT_THROW(checked_product("size", kLargest, kLargest), InvalidArgument);
  EXPECT_THROW(checked_product("size", kLargest, 2, 0), InvalidArgument);  // before the zero
  // Twice past 2^64 and back to a small number.
  EXPECT_THROW(checked_product("size", int64_t{1} << 32, int64_t{1} << 32, 7), InvalidArgument);
  try {
    checked_product("head_dim", int64_t{1} << 40, int64_t{1} << 40);
    FAIL() << "expected a refusal";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "head_dim: expected sizes whose product is at most 2^60, got "
                 "1099511627776 x 1099511627776");
  }
}

}  // namespace
}  // namespace oomb
