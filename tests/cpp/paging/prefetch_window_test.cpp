#include "paging/prefetch_window.h"

#include <gtest/gtest.h>

namespace oomb::paging {
namespace {

constexpr int64_t kSlotBytes = int64_t{256} << 10;
constexpr int64_t kTier = 16384;  // 4 GiB

LoadPace pace_of(double latency, double slot_seconds) {
  LoadPace pace;
  for (int i = 0; i < 20; ++i) {
    const int64_t slots = 20 + 50 * (i % 4);
    pace.add(slots, latency + slot_seconds * static_cast<double>(slots));
  }
  return pace;
}

int64_t slots_after(const LoadPace& pace, double visit_seconds, int visits = 200) {
  PrefetchWindow window(kTier, kSlotBytes, 1);
  for (int i = 0; i < visits; ++i) window.advance(1, i * visit_seconds, pace);
  return window.slots();
}

TEST(LoadPace, TellsLatencyFromBandwidth) {
  const LoadPace pace = pace_of(1e-3, 5e-6);
  EXPECT_NEAR(pace.slot_seconds(), 5e-6, 1e-9);
  EXPECT_NEAR(pace.batch_seconds(), 1e-3 + 5e-6 * 95, 1e-4);
  EXPECT_FALSE(LoadPace().known());
}

TEST(LoadPace, FollowsALinkThatChanges) {
  LoadPace pace = pace_of(0, 5e-6);
  for (int i = 0; i < 300; ++i) pace.add(20 + i % 100, 10e-6 * static_cast<double>(20 + i % 100));
  EXPECT_NEAR(pace.slot_seconds(), 10e-6, 1e-8);
}

TEST(LoadPace, TakesBatchesOfOneSizeAsTheyCome) {
  LoadPace pace;
  for (int i = 0; i < 20; ++i) pace.add(64, 1e-3);
  EXPECT_NEAR(pace.slot_seconds(), 1e-3 / 64, 1e-9);
}

TEST(PrefetchWindow, HoldsWhatTheLinkMovesMeanwhile) {
  // A batch takes 475 us, the longest visits 3 ms: 695 slots at 5 us.
  EXPECT_NEAR(static_cast<double>(slots_after(pace_of(0, 5e-6), 2e-3)), 695, 20);
  EXPECT_LT(slots_after(pace_of(0, 20e-6), 2e-3), 300);
  EXPECT_GT(slots_after(pace_of(1e-3, 5e-6), 2e-3), 850);
}

TEST(PrefetchWindow, StaysWithinItsBounds) {
  EXPECT_EQ(slots_after(pace_of(0, 1e-7), 1), kTier / 4);
  EXPECT_EQ(slots_after(pace_of(0, 1), 1e-3), 96) << "a batch of the usual size, and nothing more";
  EXPECT_EQ(PrefetchWindow(8, kSlotBytes, 3).slots(), 0) << "room for two waves only";
  PrefetchWindow tight(8, kSlotBytes, 3);
  for (int i = 0; i < 100; ++i) tight.advance(1, i, pace_of(0, 5e-6));
  EXPECT_EQ(tight.slots(), 0);
}

TEST(PrefetchWindow, IsFixedUntilBothTimesAreKnown) {
  const int64_t usual = PrefetchWindow(kTier, kSlotBytes, 1).slots();
  EXPECT_EQ(usual, kTier / 8);
  EXPECT_EQ(slots_after(LoadPace(), 2e-3), usual);
  EXPECT_EQ(slots_after(pace_of(0, 5e-6), 2e-3, 10), usual);
}

}  // namespace
}  // namespace oomb::paging
