// Memory that a tier does not have or does not get, with copies that happen at once.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/error.h"
#include "paging/managed_tiers.h"
#include "paging/page_manager.h"

namespace oomb::paging {
namespace {

// The device was to give 64 slots and gives 20.
TEST(Shortage, GoesOnWithTheDeviceMemoryThereIs) {
  ManagedTiers f(64);
  const int32_t rounds = 6;
  std::vector<Visit> visits(rounds - 1, Visit{0, VisitKind::kRead, 0, 40});
  visits.push_back({0, VisitKind::kAccumulate, 0, 40});
  f.manager.begin_call(plan(1, {40}, visits));
  f.manager.create_gradients(0, 0, 40);
  f.tiers.device_failures->most_bytes = 20 * kSlotBytes;
  f.write(0, 0, 40);
  for (int32_t t = 0; t < rounds; ++t) f.visit(t);
  EXPECT_GT(f.tiers.device_failures->failures, 0);
  EXPECT_EQ(f.manager.usable_slots(), 20);
  EXPECT_EQ(f.manager.max_create(), 20);
  EXPECT_EQ(f.manager.statistics().device_peak_bytes, 20 * kSlotBytes);
  EXPECT_GE(f.manager.statistics().d2h_bytes, (80 - 20) * kSlotBytes);
  f.manager.end_call();
  f.tiers.device_failures->most_bytes = -1;
  f.manager.begin_call(plan(1, {40}, {{0, VisitKind::kRead, 0, 40}}));
  f.write(0, 0, 40);
  EXPECT_EQ(f.manager.mapped_device_slots(), 40) << "the next call finds memory again";
}

// Keys and values fit; their gradients are more than the device gives.
TEST(Shortage, CutsWavesForTheDeviceMemoryThereIs) {
  ManagedTiers f(64);
  f.manager.begin_call(plan(1, {12}, {{0, VisitKind::kAccumulate, 0, 12}}));
  f.manager.create_gradients(0, 0, 12);
  f.tiers.device_failures->most_bytes = 12 * kSlotBytes;
  f.write(0, 0, 12);
  EXPECT_EQ(f.tiers.device_failures->failures, 0);
  f.visit(0);
  EXPECT_GT(f.tiers.device_failures->failures, 0);
}

TEST(Shortage, SaysThatTheDeviceGaveNoMoreWhereNothingCanGo) {
  ManagedTiers f(8, 0);
  f.manager.begin_call(plan(1, {8}, {{0, VisitKind::kRead, 0, 8}}));
  f.tiers.device_failures->most_bytes = 3 * kSlotBytes;
  f.write(0, 0, 3);
  const std::string text = message_of([&] { f.manager.create(0, 3, 4, nullptr); });
  EXPECT_EQ(text, "injected failure");
  f.manager.check_integrity();
  f.tiers.device_failures->most_bytes = -1;
  f.write(0, 3, 8);
}

// Steps of 8 slots, of which the device gives one and a half.
TEST(Shortage, TakesTheLastOfTheDeviceWhereTheHostIsFull) {
  for (const int64_t host_slots : {4, 0}) {
    testing::TestTiers tiers(
        {.slot_bytes = kSlotBytes, .device_slots = 16, .host_slots = host_slots, .step_slots = 8},
        instant);
    PageManager& manager = *tiers.manager;
    tiers.device_failures->most_bytes = 12 * kSlotBytes;
    manager.begin_call(plan(1, {16}, {{0, VisitKind::kRead, 0, 16}}));
    for (int64_t page = 0; page < 12; ++page) {
      manager.create(0, page, page + 1, nullptr);
      manager.commit(0, page, page + 1, nullptr);
    }
    EXPECT_EQ(manager.mapped_device_slots(), 12 - host_slots);
    manager.check_integrity();
  }
}

// As many slots in both tiers as pages and their gradients take, and two for the page on its way.
TEST(Shortage, ExchangesPagesOfTiersThatAreFull) {
  for (const int64_t device_slots : {4, 11, 30}) {
    ManagedTiers f(device_slots, 40 + 2 - device_slots);
    std::vector<Visit> visits(3, Visit{0, VisitKind::kRead, 0, 20});
    visits.insert(visits.end(), 3, Visit{0, VisitKind::kAccumulate, 0, 20});
    f.manager.begin_call(plan(1, {20}, visits));
    f.manager.create_gradients(0, 0, 20);
    f.write(0, 0, 20);
    for (int32_t t = 0; t < 6; ++t) {
      f.visit(t);
      f.manager.check_integrity();
    }
    EXPECT_GT(f.manager.statistics().h2d_bytes, 0);
    f.manager.end_call();
  }
}

TEST(Shortage, SaysThatNeitherTierHasRoom) {
  ManagedTiers f(8, 2);
  f.manager.begin_call(plan(1, {8}, {{0, VisitKind::kRead, 0, 8}}));
  f.tiers.device_failures->most_bytes = 3 * kSlotBytes;
  f.write(0, 0, 5);
  const std::string text = message_of([&] { f.manager.create(0, 5, 6, nullptr); });
  EXPECT_CONTAINS(text, "injected failure");
  EXPECT_CONTAINS(text, "host_memory");
  f.manager.check_integrity();
}

TEST(Shortage, TooSmallACapNamesTheSmallestThatWorks) {
  ManagedTiers f(5);
  const CallPlan backward = plan(1, {4, 4}, {{0, VisitKind::kAccumulate, 0, 4}}, 2);
  const std::string message = message_of([&] { f.manager.begin_call(backward); });
  EXPECT_EQ(PageManager::smallest_device_slots(2, 2, true), 6);
  EXPECT_CONTAINS(message, "device_memory");
  EXPECT_CONTAINS(message, std::to_string(6 * kSlotBytes));
  EXPECT_THROW(f.manager.begin_call(backward), OutOfMemory);

  ManagedTiers smallest(6);
  smallest.manager.begin_call(backward);
  smallest.write(0, 0, 4);
  smallest.manager.create_gradients(0, 0, 4);
  smallest.visit(0);
}

TEST(Shortage, AcquiringMoreThanFitsFailsAndChangesNothing) {
  ManagedTiers f(4);
  f.manager.begin_call(plan(1, {8}, {{0, VisitKind::kRead, 0, 8}}));
  f.write(0, 0, 8);
  const std::string message = message_of([&] { f.manager.acquire(0, 0, 8, nullptr); });
  EXPECT_CONTAINS(message, "device_memory");
  f.manager.check_integrity();
  f.visit(0);
}

TEST(Shortage, FullHostTierNamesItsSetting) {
  ManagedTiers f(4, 2);
  f.manager.begin_call(plan(1, {8}, {{0, VisitKind::kRead, 0, 8}}));
  const std::string message = message_of([&] { f.write(0, 0, 8); });
  EXPECT_CONTAINS(message, "host_memory");
  EXPECT_CONTAINS(message, std::to_string(2 * kSlotBytes));
  f.manager.check_integrity();
}

// To ask for host memory may take long where there is none.
TEST(Shortage, HostThatRefusesIsNotAskedForEveryPage) {
  ManagedTiers f(64);
  f.manager.begin_call(plan(2, {64}, {{0, VisitKind::kRead, 0, 64}}));
  f.tiers.host_failures->most_bytes = 4 * kSlotBytes;
  const std::string message = message_of([&] {
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int64_t page = 0; page < 64; ++page) {
        f.tiers.host_failures->failures = 0;
        f.write(layer, page, page + 1);
      }
    }
  });
  EXPECT_CONTAINS(message, "injected failure");
  EXPECT_GE(f.tiers.host_failures->failures, 1);
  EXPECT_LE(f.tiers.host_failures->failures, 2);  // as often as the device is asked for room
  f.manager.check_integrity();
}

}  // namespace
}  // namespace oomb::paging
