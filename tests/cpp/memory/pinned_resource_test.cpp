#include "memory/pinned_resource.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/bytes.h"
#include "common/error.h"

namespace oomb::memory {
namespace {

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
void wait_until(Condition condition) {
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

PinnedResource make(Record& record, PinnedOptions options) {
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

PinnedOptions pieces(int64_t count) {
  return {.capacity = count * kPiece,
          .piece_bytes = kPiece,
          .slot_bytes = kPage,
          .huge_pages = false,
          .threads_in_hurry = 3,
          .threads_beside = 1,
          .read_room = [] { return HeadRoom{.available = kGiB, .total = kGiB}; }};
}

void wait_until_ready(const PinnedResource& resource, int64_t bytes) {
  wait_until([&] { return resource.ready() >= bytes; });
  ASSERT_EQ(resource.ready(), bytes);
}

int64_t resident_pages(const PinnedResource& resource) {
  const auto bytes = static_cast<size_t>(resource.capacity());
  std::vector<unsigned char> resident(bytes / kPage);
  EXPECT_EQ(mincore(resource.base(), bytes, resident.data()), 0);
  return std::count_if(resident.begin(), resident.end(), [](auto page) { return page & 1; });
}

TEST(PinnedResource, RegistersPieceByPieceFromTheFront) {
  Record record;
  PinnedOptions options = pieces(3);
  options.capacity += 2 * kPage;  // the last piece is short
  PinnedResource resource = make(record, options);
  resource.commit(1);
  EXPECT_GE(resource.committed(), kPiece);
  resource.commit(options.capacity);
  EXPECT_EQ(resource.committed(), options.capacity);
  std::memset(resource.base(), 0x5A, static_cast<size_t>(options.capacity));
  std::byte* next = resource.base();
  for (const auto& [begin, bytes] : record.registered) {
    EXPECT_EQ(begin, next);
    next += bytes;
  }
  EXPECT_EQ(next, resource.base() + options.capacity);
}

TEST(PinnedResource, NoSlotLiesAcrossTwoPieces) {
  for (const int64_t slot : {kPage, 3 * kPage, 5 * kPage, kPiece, 3 * kPage / 2}) {
    Record record;
    PinnedOptions options = pieces(4);
    options.slot_bytes = slot;
    PinnedResource resource = make(record, options);
    resource.commit(resource.capacity());
    for (const auto& [begin, bytes] : record.registered) {
      EXPECT_EQ((begin - resource.base()) % slot, 0) << slot;
      EXPECT_LE(bytes, std::max(kPiece, 2 * slot)) << slot;
    }
  }
}

TEST(PinnedResource, GoesAheadAsFarAsItWasTold) {
  Record record;
  PinnedResource resource = make(record, pieces(8));
  resource.prepare(3 * kPiece - 1);
  wait_until_ready(resource, 3 * kPiece);
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(resource.ready(), 3 * kPiece);
  EXPECT_EQ(resource.committed(), 0);
  resource.commit(kPage);
  EXPECT_EQ(resource.committed(), 3 * kPiece) << "all that is ready";
  resource.prepare(100 * kPiece);
  wait_until_ready(resource, 8 * kPiece);
}

TEST(PinnedResource, StopsWhereItIsToldThatNoMoreIsWanted) {
  Record record;
  record.registration = 5ms;
  PinnedResource resource = make(record, pieces(60));
  resource.prepare(resource.capacity());
  resource.commit(2 * kPiece);
  resource.prepare(0);
  const int64_t ready = resource.ready();
  std::this_thread::sleep_for(60ms);
  EXPECT_LE(resource.ready(), ready + kPiece) << "the one under way";
  EXPECT_GE(resource.committed(), 2 * kPiece);
}

TEST(PinnedResource, StopsInAPauseToo) {
  Record record;
  record.registration = 30ms;
  PinnedResource resource = make(record, pieces(4));
  resource.prepare(resource.capacity());
  wait_until_ready(resource, kPiece);
  resource.prepare(0);
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(resource.ready(), kPiece);
  EXPECT_EQ(record.threads_of_touches().size(), 2u);
  EXPECT_EQ(resident_pages(resource), kPiece / kPage) << "what was touched in vain is given back";
  resource.commit(resource.capacity());
  EXPECT_EQ(record.bytes(), resource.capacity());
}

TEST(PinnedResource, BeyondWhatWasForetoldItStaysAhead) {
  Record record;
  PinnedResource resource = make(record, pieces(10));
  resource.prepare(2 * kPiece);
  wait_until_ready(resource, 2 * kPiece);
  resource.commit(3 * kPiece);
  wait_until_ready(resource, 5 * kPiece);
}

TEST(PinnedResource, TouchesWhileItRegistersForWhoWaitsForMore) {
  Record record;
  record.first_waits_for = 2;
  PinnedResource resource = make(record, pieces(3));
  resource.commit(resource.capacity());
}

TEST(PinnedResource, TouchesInThePausesAsLongAsNobodyWaits) {
  Record record;
  record.registration = 20ms;
  record.touch = 5ms;
  PinnedResource resource = make(record, pieces(4));
  resource.prepare(4 * kPiece);
  wait_until_ready(resource, 4 * kPiece);
  EXPECT_FALSE(record.touched_while_registering());
  for (size_t i = 1; i < 4; ++i) {
    const auto pause_begins = record.registrations[i - 1].second;
    EXPECT_GE(record.registrations[i].first - pause_begins, 80ms);
    EXPECT_LT(record.touches[i].first - pause_begins, 60ms) << "not after the pause";
  }
  EXPECT_EQ(record.threads_of_touches(), std::vector<int>(4, 1));
}

TEST(PinnedResource, TouchingIsThePauseForWhoWaitsForOnePiece) {
  Record record;
  record.registration = 10ms;
  record.touch = 1ms;
  PinnedResource resource = make(record, pieces(12));
  resource.prepare(resource.capacity());
  for (int64_t piece = 1; piece <= 12; ++piece) resource.commit(piece * kPiece);
  EXPECT_FALSE(record.touched_while_registering());
  const auto seconds = record.registrations.back().second - record.registrations.front().first;
  EXPECT_LT(seconds, 11 * 5 * 10ms) << "pauses take as long";
}

// Who takes piece after piece need not wait at the moment at which the next touching begins.
TEST(PinnedResource, OvertakenItHurriesOn) {
  Record record;
  record.first_registration = 500ms;
  record.registration = 1ms;
  record.touch = 10ms;
  PinnedResource resource = make(record, pieces(20));
  resource.prepare(resource.capacity());
  for (int64_t piece = 1; piece <= 20; ++piece) {
    resource.commit(piece * kPiece);
    std::this_thread::sleep_for(7ms);  // more than a pause
  }
  const std::vector<int> threads = record.threads_of_touches();
  ASSERT_EQ(threads.size(), 20u);
  // The first was under way when it was overtaken.
  EXPECT_EQ(std::count(threads.begin() + 1, threads.end(), 3), 19);
  EXPECT_FALSE(record.touched_while_registering());
  EXPECT_LT(record.registrations[1].first - record.registrations[0].second, 1500ms)
      << "a pause takes 2 s";
}

TEST(PinnedResource, WhatIsForetoldNextIsMadeWithoutHurry) {
  Record record;
  PinnedResource resource = make(record, pieces(12));
  resource.commit(4 * kPiece);
  wait_until_ready(resource, 6 * kPiece);
  resource.prepare(resource.capacity());
  wait_until_ready(resource, resource.capacity());
  EXPECT_EQ(record.threads_of_touches(), (std::vector<int>{3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1}));
}

TEST(PinnedResource, HurriesForAllOfALargeCommit) {
  Record record;
  PinnedResource resource = make(record, pieces(40));
  resource.commit(resource.capacity());
  EXPECT_EQ(record.threads_of_touches(), std::vector<int>(40, 3));
}

TEST(PinnedResource, WhatWasReadyBeforeAFailureStaysAndGrowthGoesOn) {
  for (const bool foretold : {false, true}) {
    for (int refused = 0; refused < 6; ++refused) {
      Record record;
      record.refuse_at = static_cast<size_t>(refused);
      record.touch = 5ms;
      PinnedResource resource = make(record, pieces(6));
      if (foretold) resource.prepare(6 * kPiece);
      int64_t committed = 0;
      try {
        for (; committed < 6; ++committed) resource.commit((committed + 1) * kPiece);
        FAIL() << "piece " << refused << " is refused";
      } catch (const OutOfMemory& error) {
        EXPECT_EQ(error.needed_bytes(), kPiece);
        EXPECT_NE(std::string(error.what()).find("not today"), std::string::npos);
      }
      EXPECT_EQ(committed, refused);
      EXPECT_EQ(resource.committed(), refused * kPiece);
      EXPECT_EQ(record.bytes(), refused * kPiece);
      EXPECT_EQ(resident_pages(resource), refused * kPiece / kPage);
      if (refused > 0) std::memset(resource.base(), 1, static_cast<size_t>(refused * kPiece));
      record.refuse_at = 6;
      resource.commit(6 * kPiece);
      EXPECT_EQ(record.bytes(), 6 * kPiece);
    }
  }
}

TEST(PinnedResource, WhatWasRefusedAheadIsAskedForAgain) {
  Record record;
  record.refuse_at = 2;
  PinnedResource resource = make(record, pieces(6));
  resource.prepare(6 * kPiece);
  wait_until_ready(resource, 2 * kPiece);
  wait_until([&] { return record.calls >= 3; });
  resource.commit(2 * kPiece);
  EXPECT_EQ(resource.committed(), 2 * kPiece);
  record.refuse_at = 6;
  try {
    resource.commit(6 * kPiece);
  } catch (const OutOfMemory&) {  // the refusal came while it waited
    resource.commit(6 * kPiece);
  }
  EXPECT_EQ(resource.committed(), 6 * kPiece);
}

TEST(PinnedResource, LeavesOthersTheirRoom) {
  Record record;
  PinnedOptions options = pieces(6);
  std::atomic<int64_t> taken = 0;
  options.read_room = [&] {
    return HeadRoom{.available = 512 * kMiB + 3 * kPiece - taken, .total = kGiB};
  };
  options.touch = [&](std::byte*, int64_t bytes, int) { taken += bytes; };
  PinnedResource resource = make(record, options);
  resource.commit(3 * kPiece);
  try {
    resource.commit(4 * kPiece);
    FAIL() << "there is no room";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.needed_bytes(), kPiece);
    EXPECT_EQ(error.available_bytes(), 512 * kMiB);
  }
}

TEST(PinnedResource, SlowHugePagesAreNotAskedForAgain) {
  for (const bool slow : {false, true}) {
    Record record;
    record.touch = slow ? 100ms : 0ms;  // 63 ms are slow
    PinnedOptions options = pieces(1);
    options.huge_pages = true;
    options.piece_bytes = 8 * kMiB;
    options.capacity = 16 * kMiB;
    PinnedResource resource = make(record, options);
    EXPECT_TRUE(resource.asks_for_huge_pages());
    resource.commit(1);
    EXPECT_EQ(resource.asks_for_huge_pages(), !slow);
    resource.commit(options.capacity);
    EXPECT_EQ(resource.asks_for_huge_pages(), !slow);
    resource.release();
    EXPECT_TRUE(resource.asks_for_huge_pages());
  }
}

TEST(PinnedResource, ReleaseDoesNotWaitForAPause) {
  Record record;
  record.first_registration = 500ms;  // a pause of 2 s
  PinnedResource resource = make(record, pieces(4));
  resource.prepare(resource.capacity());
  wait_until_ready(resource, kPiece);
  const auto start = Clock::now();
  resource.release();
  EXPECT_LT(Clock::now() - start, 1500ms);
  EXPECT_EQ(record.bytes(), 0);
}

TEST(PinnedResource, ReleaseUnregistersEverythingAtAnyTime) {
  Record record;
  record.registration = 1ms;
  PinnedResource resource = make(record, pieces(12));
  for (int round = 0; round < 8; ++round) {
    resource.prepare(12 * kPiece);
    if (round % 2 == 0) resource.commit((round + 1) * kPiece);
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    resource.release();
    EXPECT_EQ(record.bytes(), 0);
    EXPECT_EQ(resource.ready(), 0);
    EXPECT_EQ(resource.committed(), 0);
    EXPECT_EQ(resident_pages(resource), 0);
  }
  resource.commit(12 * kPiece);
  EXPECT_EQ(resource.base()[12 * kPiece - 1], std::byte{0});
}

TEST(PinnedResource, DestructionUnregistersWhatIsAhead) {
  Record record;
  {
    PinnedResource resource = make(record, pieces(12));
    resource.prepare(12 * kPiece);
    resource.commit(kPiece);
  }
  EXPECT_EQ(record.bytes(), 0);
}

TEST(PinnedResource, ThreadsByTheCores) {
  struct Row {
    int cores, in_hurry, beside;
  };
  for (const Row& row : {Row{1, 1, 1}, Row{2, 2, 2}, Row{4, 4, 4}, Row{8, 8, 4}, Row{16, 16, 8},
                         Row{24, 20, 12}, Row{64, 60, 32}, Row{192, 64, 32}}) {
    EXPECT_EQ(threads_in_hurry(row.cores), row.in_hurry) << row.cores;
    EXPECT_EQ(threads_beside(row.cores), row.beside) << row.cores;
  }
}

}  // namespace
}  // namespace oomb::memory
