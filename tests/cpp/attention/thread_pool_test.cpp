#include "attention/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

namespace oomb::attention::cpu {
namespace {

TEST(ThreadPoolTest, EveryUnitRunsOnceOnItsThread) {
  for (const int64_t threads : {1, 2, 5}) {
    for (const int64_t units : {0, 1, 4, 37}) {
      std::vector<int64_t> runs(static_cast<size_t>(units), 0), owner(runs);
      parallel_for(units, threads, [&](int64_t unit, int64_t thread) {
        ++runs[static_cast<size_t>(unit)];
        owner[static_cast<size_t>(unit)] = thread;
      });
      for (int64_t unit = 0; unit < units; ++unit) {
        EXPECT_EQ(runs[static_cast<size_t>(unit)], 1);
        if (units > 1) {
          EXPECT_EQ(owner[static_cast<size_t>(unit)], unit % threads);
        }
      }
    }
  }
}

TEST(ThreadPoolTest, AnExceptionReachesTheCallerAndThePoolGoesOn) {
  for (const int64_t bad : {0, 1, 5}) {
    const auto fail = [&](int64_t unit, int64_t) {
      if (unit == bad) throw std::runtime_error("unit");
    };
    EXPECT_THROW(parallel_for(8, 3, fail), std::runtime_error);
    std::atomic<int64_t> count = 0;
    parallel_for(8, 3, [&](int64_t, int64_t) { ++count; });
    EXPECT_EQ(count, 8);
  }
}

TEST(ThreadPoolTest, CallersFromSeveralThreadsTakeTurns) {
  std::atomic<int64_t> count = 0;
  std::vector<std::thread> callers;
  for (int64_t caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 50; ++i) {
        parallel_for(6, 2 + caller % 2, [&](int64_t, int64_t) { ++count; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(count, 4 * 50 * 6);
}

TEST(ThreadPoolTest, AChildOfForkHasItsOwnThreadsAndEnds) {
  parallel_for(4, 2, [](int64_t, int64_t) {});
  const auto child = [] {
    std::atomic<int64_t> count = 0;
    parallel_for(4, 2, [&](int64_t, int64_t) { ++count; });
    std::exit(count == 4 ? 0 : 1);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(std::exit(0), ::testing::ExitedWithCode(0), "") << "without a call in the child";
}

}  // namespace
}  // namespace oomb::attention::cpu
