#include "memory/first_touch.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "common/math.h"

namespace oomb::memory {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kStretch = int64_t{2} << 20;  // a huge page

void take(std::byte* begin, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kPage) {
    *static_cast<volatile std::byte*>(begin + at) = std::byte{0};
  }
}

}  // namespace

void take_pages(std::byte* begin, int64_t bytes, int threads) {
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    for (int64_t at = next.fetch_add(kStretch); at < bytes; at = next.fetch_add(kStretch)) {
      take(begin + at, std::min(kStretch, bytes - at));
    }
  };
  const int64_t useful = std::min<int64_t>(threads, ceil_div(bytes, kStretch));
  std::vector<std::jthread> team;
  try {
    for (int64_t i = 1; i < useful; ++i) team.emplace_back(work);
  } catch (const std::system_error&) {
    // There are no more threads to be had: those that run do it all.
  }
  work();
}

}  // namespace oomb::memory
