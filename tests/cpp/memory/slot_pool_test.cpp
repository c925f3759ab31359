#include "memory/slot_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "common/error.h"
#include "memory/host_resource.h"
#include "support/failing_resource.h"

namespace oomb::memory {
namespace {

constexpr int64_t kSlotBytes = 65536;  // what resources grow by, so that every step is felt

struct Fixture {
  explicit Fixture(int64_t max_slots, std::optional<uint64_t> shuffle_seed = std::nullopt,
                   SlotOrder order = SlotOrder::kFreedFirst)
      : pool(std::make_unique<testing::FailingResource>(
                 std::make_unique<HostResource>(max_slots * kSlotBytes), control),
             {.slot_bytes = kSlotBytes,
              .max_slots = max_slots,
              .step_bytes = 4 * kSlotBytes,
              .order = order,
              .shuffle_seed = shuffle_seed}) {}

  std::shared_ptr<testing::FailureSwitch> control = std::make_shared<testing::FailureSwitch>();
  SlotPool pool;
};

void expect_accounts(const SlotPool& pool, int64_t taken) {
  EXPECT_EQ(pool.taken_slots(), taken);
  EXPECT_EQ(pool.free_slots() + pool.taken_slots(), pool.mapped_slots());
  EXPECT_EQ(pool.available_slots(), pool.usable_slots() - taken);
  EXPECT_EQ(pool.usable_slots(), pool.refusal() ? pool.mapped_slots() : pool.max_slots());
  EXPECT_LE(pool.mapped_slots(), pool.max_slots());
}

TEST(SlotPool, TakesNothingBeforeItIsAsked) {
  Fixture f(100);
  EXPECT_EQ(f.pool.committed_bytes(), 0);
  expect_accounts(f.pool, 0);
}

TEST(SlotPool, HasALowerCapForAWhile) {
  Fixture f(10);
  for (const int64_t cap : {10, 7, 0, 9, 10}) {
    f.pool.set_max_slots(cap);
    EXPECT_EQ(f.pool.max_slots(), cap);
    EXPECT_EQ(f.pool.capacity(), 10);
    for (int64_t i = 0; i < cap; ++i) EXPECT_NE(f.pool.take(), kNoSlot);
    EXPECT_EQ(f.pool.take(), kNoSlot);
    expect_accounts(f.pool, cap);
    EXPECT_EQ(f.pool.committed_bytes(), cap * kSlotBytes);
    f.pool.reset();
  }
}

TEST(SlotPool, HandsOutEverySlotOnceAndStopsAtTheCap) {
  Fixture f(10);
  std::set<Slot> seen;
  for (int i = 0; i < 10; ++i) seen.insert(f.pool.take());
  EXPECT_EQ(seen.size(), 10u);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 9);
  EXPECT_EQ(f.pool.take(), kNoSlot);
  expect_accounts(f.pool, 10);
}

TEST(SlotPool, ReusesTheSlotFreedFirst) {
  Fixture f(4);
  for (int i = 0; i < 4; ++i) f.pool.take();
  f.pool.give_back(2);
  f.pool.give_back(0);
  EXPECT_EQ(f.pool.take(), 2);
  EXPECT_EQ(f.pool.take(), 0);
}

TEST(SlotPool, GoesRoundInAscendingOrder) {
  Fixture f(200, std::nullopt, SlotOrder::kRound);
  std::vector<Slot> order;
  for (int i = 0; i < 130; ++i) order.push_back(f.pool.take());
  for (const Slot slot : {129, 70, 5, 6, 7, 64}) f.pool.give_back(slot);
  const int64_t mapped = f.pool.mapped_slots();
  for (int i = 0; i < 8; ++i) order.push_back(f.pool.take());
  std::vector<Slot> expected(130);
  std::iota(expected.begin(), expected.end(), 0);
  for (const Slot slot : {130, 131, 5, 6, 7, 64, 70, 129}) expected.push_back(slot);
  EXPECT_EQ(order, expected) << "what is ahead, then from the beginning; freed ones rest till then";
  EXPECT_EQ(f.pool.mapped_slots(), mapped) << "all that is there is used before there is more";
  EXPECT_EQ(f.pool.take(), 132);
  f.pool.reset();
  EXPECT_EQ(f.pool.take(), 0);
}

// Where hardly any are free and the next one is far away.
TEST(SlotPool, GoesRoundALargePoolThatIsNearlyFull) {
  const int64_t slots = 20'000;
  Fixture f(slots, std::nullopt, SlotOrder::kRound);
  for (int64_t i = 0; i < slots; ++i) ASSERT_EQ(f.pool.take(), i);
  std::mt19937_64 random(0);
  std::set<Slot> free;
  Slot last = static_cast<Slot>(slots - 1);
  for (int step = 0; step < 5'000; ++step) {
    while (free.empty() || random() % 3 > 0) {
      const auto slot = static_cast<Slot>(random() % static_cast<uint64_t>(slots));
      if (free.insert(slot).second) f.pool.give_back(slot);
    }
    do {
      const auto ahead = free.upper_bound(last);
      last = ahead == free.end() ? *free.begin() : *ahead;
      free.erase(last);
      ASSERT_EQ(f.pool.take(), last);
    } while (!free.empty() && random() % 2 > 0);
  }
}

TEST(SlotPool, RefusesASlotThatIsNotTaken) {
  Fixture f(4);
  const Slot slot = f.pool.take();
  f.pool.give_back(slot);
  EXPECT_THROW(f.pool.give_back(slot), Error);
  EXPECT_THROW(f.pool.give_back(4), Error);
  EXPECT_THROW(f.pool.give_back(kNoSlot), Error);
  expect_accounts(f.pool, 0);
}

TEST(SlotPool, FailedGrowthChangesNothing) {
  Fixture f(100);
  for (int i = 0; i < 4; ++i) f.pool.take();
  const int64_t mapped = f.pool.mapped_slots();
  std::vector<Slot> rest;
  while (f.pool.free_slots() > 0) rest.push_back(f.pool.take());
  f.control->most_bytes = 0;
  EXPECT_THROW(f.pool.take(), OutOfMemory);
  EXPECT_EQ(f.pool.mapped_slots(), mapped);
  EXPECT_EQ(f.pool.available_slots(), 0) << "nothing is promised that was refused";
  expect_accounts(f.pool, 4 + static_cast<int64_t>(rest.size()));
  f.control->most_bytes = -1;
  EXPECT_NE(f.pool.take(), kNoSlot);
  EXPECT_EQ(f.pool.usable_slots(), f.pool.max_slots());
}

TEST(SlotPool, GrowsByWhatIsMissingWhereAStepIsTooMuch) {
  Fixture f(100);
  f.control->most_bytes = 6 * kSlotBytes;
  f.pool.reserve(2, SlotPool::Growth::kSteps);
  EXPECT_EQ(f.pool.mapped_slots(), 4);
  for (int i = 0; i < 4; ++i) f.pool.take();
  f.pool.reserve(1, SlotPool::Growth::kSteps);
  EXPECT_EQ(f.pool.available_slots(), 0);
  f.pool.reserve(1, SlotPool::Growth::kMissing);
  EXPECT_EQ(f.pool.mapped_slots(), 5) << "the rest is left to others";
  EXPECT_FALSE(f.pool.refusal());
  f.pool.reserve(3, SlotPool::Growth::kMissing);
  EXPECT_EQ(f.pool.mapped_slots(), 5);
  ASSERT_TRUE(f.pool.refusal());
  EXPECT_EQ(f.pool.refusal()->needed_bytes(), 7 * kSlotBytes);
  EXPECT_EQ(f.pool.available_slots(), 1);
  f.pool.reset();
  EXPECT_EQ(f.pool.available_slots(), 100) << "the next call may find more";
}

TEST(SlotPool, ShuffleChangesTheOrderAndNothingElse) {
  std::vector<std::vector<Slot>> orders;
  for (uint64_t seed : {1, 2, 1}) {
    Fixture f(64, seed);
    std::vector<Slot> order;
    for (int i = 0; i < 64; ++i) order.push_back(f.pool.take());
    EXPECT_EQ(std::set<Slot>(order.begin(), order.end()).size(), 64u);
    orders.push_back(order);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_EQ(orders[0], orders[2]);
}

TEST(SlotPool, ResetReleasesOrKeepsTheMemory) {
  Fixture f(64);
  for (int i = 0; i < 64; ++i) f.pool.take();
  f.pool.reset(false);
  EXPECT_GE(f.pool.committed_bytes(), 64 * kSlotBytes);
  expect_accounts(f.pool, 0);
  f.pool.take();
  EXPECT_EQ(f.pool.mapped_slots(), 64) << "kept memory is used before more is asked for";
  f.pool.reset();
  EXPECT_EQ(f.pool.committed_bytes(), 0);
}

TEST(SlotPool, RandomMixNeverHandsOutATakenSlot) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Fixture f(200, seed % 3 == 0 ? std::optional(seed) : std::nullopt,
              seed % 3 == 1 ? SlotOrder::kRound : SlotOrder::kFreedFirst);
    std::mt19937_64 random(seed);
    std::vector<Slot> taken;
    for (int step = 0; step < 2000; ++step) {
      if (random() % 20 == 0) f.control->countdown = 0;
      if (taken.empty() || random() % 8 < 5) {
        try {
          const Slot slot = f.pool.take();
          ASSERT_EQ(slot == kNoSlot, taken.size() == 200u);
          if (slot != kNoSlot) {
            ASSERT_EQ(std::count(taken.begin(), taken.end(), slot), 0);
            taken.push_back(slot);
          }
        } catch (const OutOfMemory&) {
          // Injected; the accounts must still hold.
        }
      } else {
        std::swap(taken[random() % taken.size()], taken.back());
        f.pool.give_back(taken.back());
        taken.pop_back();
      }
      expect_accounts(f.pool, static_cast<int64_t>(taken.size()));
    }
    EXPECT_GT(f.control->failures, 0);
  }
}

}  // namespace
}  // namespace oomb::memory
