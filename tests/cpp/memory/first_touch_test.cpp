#include "memory/first_touch.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <vector>

namespace oomb::memory {
namespace {

constexpr int64_t kPage = 4096;

// Pages of a fresh mapping that are in memory after the first `touched` bytes were taken.
int64_t resident_pages(int64_t bytes, int64_t touched, int threads) {
  void* range = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_NE(range, MAP_FAILED);
  madvise(range, static_cast<size_t>(bytes), MADV_NOHUGEPAGE);
  take_pages(static_cast<std::byte*>(range), touched, threads);
  std::vector<unsigned char> resident(static_cast<size_t>(bytes / kPage));
  EXPECT_EQ(mincore(range, static_cast<size_t>(bytes), resident.data()), 0);
  munmap(range, static_cast<size_t>(bytes));
  return std::count_if(resident.begin(), resident.end(), [](auto page) { return page & 1; });
}

TEST(FirstTouch, TakesEveryPageAndNoOther) {
  constexpr int64_t kMib = int64_t{1} << 20;
  for (const int threads : {1, 2, 5, 64}) {
    for (const int64_t touched : {int64_t{0}, kPage, 8 * kMib, 8 * kMib + kPage, 37 * kMib}) {
      EXPECT_EQ(resident_pages(40 * kMib, touched, threads), touched / kPage)
          << threads << " threads";
    }
  }
}

// Sanitizers need addresses of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(FirstTouch, DoesWithTheThreadsThereAre) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // no stacks left of other tests' threads
  constexpr int64_t kBytes = int64_t{16} << 20;
  const auto touch_without_threads = [] {
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    // The range and a little more, but no stack of a thread.
    const auto limit = static_cast<rlim_t>(pages * kPage + kBytes + (int64_t{2} << 20));
    const rlimit addresses = {limit, limit};
    setrlimit(RLIMIT_AS, &addresses);
    std::exit(resident_pages(kBytes, kBytes, 8) == kBytes / kPage ? 0 : 1);
  };
  EXPECT_EXIT(touch_without_threads(), ::testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
}  // namespace oomb::memory
