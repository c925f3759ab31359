// Pinned memory: how far ahead, and at which pace, its thread makes it.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "memory/recorded_pinning.h"
#include "memory/slot_pool.h"
#include "memory/statistics_resource.h"

namespace oomb::memory {
namespace {

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

TEST(PinnedResource, APoolCountsWhatWasMadeAhead) {
  Record record;
  auto pinned =
      std::make_unique<PinnedResource>(pieces(8), std::make_unique<RecordingRegistrar>(record));
  PinnedResource& resource = *pinned;
  SlotPool pool(std::make_unique<StatisticsResource>(std::move(pinned)),
                {.slot_bytes = kPage, .max_slots = 8 * kPiece / kPage, .step_bytes = kPiece});
  pool.give_back(pool.take());
  const int64_t committed = pool.state().committed_bytes;
  ASSERT_LE(committed, 3 * kPiece) << "what is wanted and two pieces beyond";
  resource.prepare(7 * kPiece);
  wait_until_ready(resource, 7 * kPiece);
  EXPECT_EQ(pool.state().committed_bytes, committed);
  EXPECT_EQ(pool.state().ready_bytes, 7 * kPiece);
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
    const auto& [begin, end] = record.registrations[i - 1];
    EXPECT_GE(record.registrations[i].first, end + 80ms);
    EXPECT_LT(record.touches[i].first, end + 4 * (end - begin)) << "not after the pause";
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
