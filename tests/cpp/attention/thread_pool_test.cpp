#include "attention/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

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

// The child has a copy of a lock that nobody will ever give back.
TEST(ThreadPoolTest, AChildForkedDuringACallOfAnotherThreadHasItsOwnThreads) {
  std::atomic<int64_t> inside = 0;
  std::atomic<bool> over = false;
  std::thread caller([&] {
    parallel_for(2, 2, [&](int64_t, int64_t) {
      ++inside;
      while (!over) std::this_thread::yield();
    });
  });
  while (inside < 2) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::atomic<int64_t> count = 0;
    parallel_for(4, 2, [&](int64_t, int64_t) { ++count; });
    _exit(count == 4 ? 0 : 1);
  }
  over = true;
  caller.join();
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// Its threads go with the process; nobody waits for a task that does not end.
TEST(ThreadPoolTest, AProcessEndsWhileAnotherThreadIsInACall) {
  const auto end = [] {
    alarm(20);
    std::atomic<int64_t> inside = 0;
    std::thread([&] {
      parallel_for(2, 2, [&](int64_t, int64_t) {
        ++inside;
        pause();
      });
    }).detach();
    while (inside < 2) std::this_thread::yield();
    std::exit(0);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace oomb::attention::cpu
