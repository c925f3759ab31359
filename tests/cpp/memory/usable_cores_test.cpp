#include "memory/usable_cores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

namespace oomb::memory {
namespace {

TEST(UsableCores, AreSomeOfTheMachines) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace
}  // namespace oomb::memory
