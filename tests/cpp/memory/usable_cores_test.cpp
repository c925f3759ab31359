#include "memory/usable_cores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

namespace oomb::memory {
namespace {

int with_quota(const std::string& text) {
  const std::string file = ::testing::TempDir() + "cpu.max";
  std::ofstream(file) << text;
  return usable_cores(file);
}

TEST(UsableCores, AreThoseOfTheMachineWithinTheQuota) {
  const int there = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  for (const char* none : {"", "max 100000\n", "-1 100000", "200000 0"}) {
    EXPECT_EQ(with_quota(none), there) << none;
  }
  EXPECT_EQ(usable_cores("/nowhere/cpu.max"), there);
  EXPECT_EQ(with_quota("100000 100000\n"), 1);
  EXPECT_EQ(with_quota("1000 100000\n"), 1) << "a hundredth of a core";
  EXPECT_EQ(with_quota("290000 100000\n"), std::min(2, there));
  EXPECT_EQ(with_quota(std::to_string(100000 * (there + 5)) + " 100000\n"), there);
}

}  // namespace
}  // namespace oomb::memory
