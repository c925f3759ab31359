#include "common/error.h"

#include <gtest/gtest.h>

namespace oomb {
namespace {

TEST(Expect, PassesSilently) { EXPECT_NO_THROW(expect(true, "page_size", "a power of two", 7)); }

TEST(Expect, NamesTheArgumentWhatWasExpectedAndWhatCame) {
  try {
    expect(false, "page_size", "a power of two", 7);
    FAIL() << "nothing thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "page_size: expected a power of two, got 7");
  }
}

TEST(OutOfMemory, CarriesTheSizes) {
  const OutOfMemory error("pool", 100, 40);
  EXPECT_EQ(error.needed_bytes(), 100);
  EXPECT_EQ(error.available_bytes(), 40);
  EXPECT_STREQ(error.what(), "pool");
}

TEST(Error, IsTheBaseOfAll) {
  EXPECT_THROW(throw InvalidArgument("x"), Error);
  EXPECT_THROW(throw OutOfMemory("x", 1, 0), Error);
  EXPECT_THROW(throw CudaError("x"), Error);
}

}  // namespace
}  // namespace oomb
