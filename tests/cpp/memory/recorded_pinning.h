#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/bytes.h"
#include "common/error.h"
#include "memory/pinned_resource.h"

namespace oomb::memory {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int64_t kPage = 4096;
constexpr int64_t kPiece = 16 * kPage;

// What the registrars and touches of a test have seen, of several threads.
struct Record {
  std::mutex mutex;
  std::map<std::byte*, int64_t> registered;  // now
  using Span = std::pair<Clock::time_point, Clock::time_point>;
  std::vector<Span> registrations;
  std::vector<Span> touches;
  std::vector<int> threads;            // of each touch
  std::atomic<size_t> refuse_at = 99;  // no more pieces than this
  std::atomic<int> calls = 0;
  std::atomic<int> first_waits_for = 0;  // so many touches
  std::chrono::milliseconds registration{0};
  std::chrono::milliseconds first_registration{0};
  std::chrono::milliseconds touch{0};

  int64_t bytes() {
    const std::lock_guard lock(mutex);
    int64_t sum = 0;
    for (const auto& [begin, bytes] : registered) sum += bytes;
    return sum;
  }
  size_t pieces() {
    const std::lock_guard lock(mutex);
    return registered.size();
  }
  std::vector<int> threads_of_touches() {
    const std::lock_guard lock(mutex);
    return threads;
  }
  bool touched_while_registering() const {
    return std::ranges::any_of(touches, [&](const Span& touch) {
      return std::ranges::any_of(registrations, [&](const Span& registration) {
        return touch.first < registration.second && registration.first < touch.second;
      });
    });
  }
};

template <typename Condition>
inline void wait_until(Condition condition) {
  const auto until = Clock::now() + 20s;
  while (!condition() && Clock::now() < until) std::this_thread::sleep_for(1ms);
  ASSERT_TRUE(condition());
}

class RecordingRegistrar final : public Registrar {
 public:
  explicit RecordingRegistrar(Record& record) : record_(record) {}

  void add(std::byte* begin, int64_t bytes) override {
    const auto start = Clock::now();
    const bool first = record_.calls++ == 0;
    if (record_.pieces() >= record_.refuse_at) throw CudaError("not today");
    if (first) {
      wait_until(
          [&] { return std::ssize(record_.threads_of_touches()) >= record_.first_waits_for; });
    }
    std::this_thread::sleep_for(
        std::max(record_.registration, first ? record_.first_registration : 0ms));
    const std::lock_guard lock(record_.mutex);
    ASSERT_TRUE(record_.registered.emplace(begin, bytes).second);
    record_.registrations.emplace_back(start, Clock::now());
  }
  void remove(std::byte* begin) noexcept override {
    const std::lock_guard lock(record_.mutex);
    EXPECT_EQ(record_.registered.erase(begin), 1u);
  }

 private:
  Record& record_;
};

inline PinnedResource make(Record& record, PinnedOptions options) {
  const auto touch = options.touch;
  options.touch = [&record, touch](std::byte* begin, int64_t bytes, int threads) {
    const auto start = Clock::now();
    touch(begin, bytes, threads);
    std::this_thread::sleep_for(record.touch);
    const std::lock_guard lock(record.mutex);
    record.touches.emplace_back(start, Clock::now());
    record.threads.push_back(threads);
  };
  return PinnedResource(std::move(options), std::make_unique<RecordingRegistrar>(record));
}

inline PinnedOptions pieces(int64_t count) {
  return {.capacity = count * kPiece,
          .piece_bytes = kPiece,
          .slot_bytes = kPage,
          .huge_pages = false,
          .threads_in_hurry = 3,
          .threads_beside = 1,
          .read_room = [] { return HeadRoom{.available = kGiB, .total = kGiB}; }};
}

inline void wait_until_ready(const PinnedResource& resource, int64_t bytes) {
  wait_until([&] { return resource.ready() >= bytes; });
  ASSERT_EQ(resource.ready(), bytes);
}

inline int64_t resident_pages(const PinnedResource& resource) {
  const auto bytes = static_cast<size_t>(resource.capacity());
  std::vector<unsigned char> resident(bytes / kPage);
  EXPECT_EQ(mincore(resource.base(), bytes, resident.data()), 0);
  return std::count_if(resident.begin(), resident.end(), [](auto page) { return page & 1; });
}

}  // namespace oomb::memory
