// Policy of the page manager, with copies that happen at once.

#include "paging/page_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "common/error.h"
#include "support/instant_copy_engine.h"
#include "support/test_tiers.h"

namespace oomb::paging {
namespace {

using testing::InstantCopyEngine;
using testing::TestTiers;
using testing::TestTiersOptions;

constexpr int64_t kSlotBytes = 64;

std::unique_ptr<CopyEngine> instant(std::byte* device, std::byte* host, int64_t slot_bytes) {
  return std::make_unique<InstantCopyEngine>(device, host, slot_bytes);
}

struct Fixture {
  explicit Fixture(int64_t device_slots, int64_t host_slots = 1024,
                   const PageManagerOptions& options = {})
      : tiers({.slot_bytes = kSlotBytes,
               .device_slots = device_slots,
               .host_slots = host_slots,
               .manager = options},
              instant),
        manager(*tiers.manager) {}

  // Creates and commits pages [begin, end) one by one.
  void write(int32_t layer, int64_t begin, int64_t end) {
    for (int64_t page = begin; page < end; ++page) {
      manager.create(layer, page, page + 1, nullptr);
      manager.commit(layer, page, page + 1, nullptr);
    }
  }
  void visit(int32_t visit) {
    for (const auto& [first, last] : manager.waves(visit)) {
      manager.acquire(visit, first, last, nullptr);
      manager.release(visit, first, last, nullptr);
      manager.check_integrity();
    }
  }
  InstantCopyEngine& engine() { return dynamic_cast<InstantCopyEngine&>(*tiers.engine); }

  TestTiers tiers;
  PageManager& manager;
};

CallPlan plan(int64_t layers, std::vector<int32_t> pages, std::vector<Visit> visits,
              int grad_slots = 1) {
  return {.num_layers = layers,
          .pages_per_sequence = std::move(pages),
          .grad_slots = grad_slots,
          .visits = std::move(visits)};
}

template <typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

TEST(PageManager, NothingIsCopiedWhileEverythingFits) {
  Fixture f(8);
  f.manager.begin_call(
      plan(1, {4}, {{0, VisitKind::kRead, 0, 4}, {0, VisitKind::kAccumulate, 0, 4}}));
  f.write(0, 0, 4);
  f.manager.create_gradients(0, 0, 4);
  f.visit(0);
  f.visit(1);
  EXPECT_TRUE(f.engine().batches.empty());
  EXPECT_EQ(f.manager.statistics().hits, 8);
  EXPECT_EQ(f.manager.statistics().misses, 0);
}

TEST(PageManager, KeysAndValuesGoToTheHostAtMostOnce) {
  Fixture f(4);
  std::vector<Visit> visits(10, Visit{0, VisitKind::kRead, 0, 12});
  f.manager.begin_call(plan(1, {12}, visits));
  f.write(0, 0, 12);
  for (int32_t t = 0; t < 10; ++t) f.visit(t);
  EXPECT_LE(f.manager.statistics().d2h_bytes, 12 * kSlotBytes);
  EXPECT_GE(f.manager.statistics().d2h_bytes, 8 * kSlotBytes);
}

// A cyclic scan of n pages with c slots: the optimum misses about (n - c) / n of it, LRU
// everything.
TEST(PageManager, CyclicScanKeepsMostOfWhatFits) {
  Fixture f(64);
  const int rounds = 20;
  f.manager.begin_call(plan(1, {80}, std::vector<Visit>(rounds, {0, VisitKind::kRead, 0, 80})));
  f.write(0, 0, 80);
  for (int32_t t = 0; t < rounds; ++t) f.visit(t);
  const double per_round =
      static_cast<double>(f.manager.statistics().h2d_bytes) / kSlotBytes / rounds;
  EXPECT_LE(per_round, 80 - 64 + 16 + 1) << "16 slots are the window through which pages stream";
  EXPECT_GE(per_round, 80 - 64 - 1);
}

TEST(PageManager, PagesThatComeNextAreThereWhenAcquired) {
  Fixture f(32);
  std::vector<Visit> visits;
  for (int round = 0; round < 5; ++round) {
    for (int32_t layer = 0; layer < 4; ++layer) visits.push_back({layer, VisitKind::kRead, 0, 16});
  }
  f.manager.begin_call(plan(4, {16}, visits));
  for (int32_t layer = 0; layer < 4; ++layer) f.write(layer, 0, 16);
  for (int32_t t = 0; t < static_cast<int32_t>(visits.size()); ++t) f.visit(t);
  const PageStatistics s = f.manager.statistics();
  EXPECT_GT(s.h2d_bytes, 0);
  EXPECT_GE(static_cast<double>(s.hits) / static_cast<double>(s.hits + s.misses), 0.95);
}

// The device was to give 64 slots and gives 20.
TEST(PageManager, GoesOnWithTheDeviceMemoryThereIs) {
  Fixture f(64);
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
TEST(PageManager, CutsWavesForTheDeviceMemoryThereIs) {
  Fixture f(64);
  f.manager.begin_call(plan(1, {12}, {{0, VisitKind::kAccumulate, 0, 12}}));
  f.manager.create_gradients(0, 0, 12);
  f.tiers.device_failures->most_bytes = 12 * kSlotBytes;
  f.write(0, 0, 12);
  EXPECT_EQ(f.tiers.device_failures->failures, 0);
  f.visit(0);
  EXPECT_GT(f.tiers.device_failures->failures, 0);
}

TEST(PageManager, SaysThatTheDeviceGaveNoMoreWhereNothingCanGo) {
  Fixture f(8, 0);
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
TEST(PageManager, TakesTheLastOfTheDeviceWhereTheHostIsFull) {
  for (const int64_t host_slots : {4, 0}) {
    TestTiers tiers(
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

TEST(PageManager, SaysThatNeitherTierHasRoom) {
  Fixture f(8, 2);
  f.manager.begin_call(plan(1, {8}, {{0, VisitKind::kRead, 0, 8}}));
  f.tiers.device_failures->most_bytes = 3 * kSlotBytes;
  f.write(0, 0, 5);
  const std::string text = message_of([&] { f.manager.create(0, 5, 6, nullptr); });
  EXPECT_CONTAINS(text, "injected failure");
  EXPECT_CONTAINS(text, "host_memory");
  f.manager.check_integrity();
}

TEST(PageManager, GradientStartsAtZeroAndIsNotLoadedBeforeItExists) {
  Fixture f(3);
  f.manager.begin_call(plan(1, {6}, {{0, VisitKind::kAccumulate, 0, 6}}, 2));
  f.write(0, 0, 6);
  f.manager.create_gradients(0, 0, 6);
  for (int64_t page = 0; page < 6; ++page) {
    f.manager.acquire(0, page, page + 1, nullptr);
    const int64_t entry = f.manager.tables().gradient_entry(0) + 2 * page;
    for (const int64_t half : {entry, entry + 1}) {
      std::byte* data = f.manager.pool_address() + f.manager.tables()[half] * kSlotBytes / 2;
      for (int64_t i = 0; i < kSlotBytes; ++i) ASSERT_EQ(data[i], std::byte{0});
      std::memset(data, 0x77, kSlotBytes);
    }
    f.manager.release(0, page, page + 1, nullptr);
    f.manager.check_integrity();
  }
  // Six KV pages and those gradients that made room for others, never an untouched gradient.
  EXPECT_LE(f.manager.statistics().h2d_bytes, 6 * kSlotBytes);
}

TEST(PageManager, DroppedPagesAreNeverWrittenBack) {
  Fixture f(8);
  f.manager.begin_call(plan(1, {64}, {}));
  for (int64_t page = 0; page < 64; ++page) {
    f.write(0, page, page + 1);
    f.manager.drop(0, page, page + 1, true, true, nullptr);
    f.manager.check_integrity();
  }
  EXPECT_EQ(f.manager.statistics().d2h_bytes, 0);
}

TEST(PageManager, PageWithoutWantedGradientHasNone) {
  Fixture f(8);
  f.manager.begin_call(plan(1, {2}, {{0, VisitKind::kAccumulate, 0, 2}}));
  f.write(0, 0, 2);
  f.manager.create_gradients(0, 1, 2);
  f.manager.acquire(0, 0, 2, nullptr);
  const int64_t entry = f.manager.tables().gradient_entry(0);
  EXPECT_EQ(f.manager.tables()[entry], -1);
  EXPECT_EQ(f.manager.tables()[entry + 1], -1);
  EXPECT_EQ(f.manager.tables()[entry + 3], f.manager.tables()[entry + 2] + 1);
}

TEST(PageManager, TablesBuiltFromChangesEqualTheTables) {
  Fixture f(6);
  std::vector<Visit> visits;
  for (int32_t t = 0; t < 12; ++t) visits.push_back({t % 2, VisitKind::kAccumulate, 0, 5});
  f.manager.begin_call(plan(2, {5, 3}, visits));
  for (int32_t layer : {0, 1}) {
    f.write(layer, 0, 5);
    f.manager.create_gradients(layer, 0, 5);
  }
  for (int32_t t = 0; t < 12; ++t) {
    for (const auto& [first, last] : f.manager.waves(t)) {
      f.manager.acquire(t, first, last, nullptr);
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t page = first; page < std::min<int64_t>(last, b == 0 ? 5 : 3); ++page) {
          const int64_t entry = f.manager.tables().kv_entry(t % 2) + b * 5 + page;
          ASSERT_GE(f.engine().table[static_cast<size_t>(entry)], 0);
          ASSERT_EQ(f.engine().table[static_cast<size_t>(entry)], f.manager.tables()[entry]);
        }
      }
      f.manager.release(t, first, last, nullptr);
    }
  }
}

TEST(PageManager, WavesCoverTheVisitAndFit) {
  for (int64_t slots : {4, 5, 8, 13, 40, 200}) {
    Fixture f(slots);
    f.manager.begin_call(plan(1, {20, 17}, {{0, VisitKind::kAccumulate, 0, 20}}));
    f.write(0, 0, 20);
    f.manager.create_gradients(0, 0, 20);
    int64_t expected = 0;
    for (const auto& [first, last] : f.manager.waves(0)) {
      EXPECT_EQ(first, expected);
      EXPECT_LT(first, last);
      expected = last;
      f.manager.acquire(0, first, last, nullptr);
      f.manager.release(0, first, last, nullptr);
    }
    EXPECT_EQ(expected, 20);
  }
}

TEST(PageManager, WavesEndWhereKernelsAllow) {
  for (int64_t slots : {8, 9, 12, 13, 40}) {
    Fixture f(slots);
    CallPlan plan_of_pairs = plan(1, {20, 17}, {{0, VisitKind::kAccumulate, 3, 20}});
    plan_of_pairs.wave_pages = 2;
    f.manager.begin_call(std::move(plan_of_pairs));
    f.write(0, 0, 20);
    f.manager.create_gradients(0, 0, 20);
    const auto waves = f.manager.waves(0);
    EXPECT_GT(waves.size(), 1u);
    int64_t expected = 3;
    for (const auto& [first, last] : waves) {
      EXPECT_EQ(first, expected);
      EXPECT_TRUE(last % 2 == 0) << last;
      expected = last;
      f.manager.acquire(0, first, last, nullptr);
      f.manager.release(0, first, last, nullptr);
    }
    EXPECT_EQ(expected, 20);
  }
  EXPECT_EQ(PageManager::smallest_device_slots(2, 1, true, 2), 8);
}

TEST(PageManager, ExactListsAreAllThatIsLoaded) {
  Fixture f(4);
  f.manager.begin_call({.num_layers = 1,
                        .pages_per_sequence = {32},
                        .grad_slots = 1,
                        .visits = {{0, VisitKind::kRead, 0, 32}, {0, VisitKind::kRead, 0, 32}},
                        .exact = false});
  f.write(0, 0, 32);
  f.manager.set_visit_pages(0, {3, 9, 30});
  f.manager.set_visit_pages(1, {3, 9, 31});
  for (int32_t t = 0; t < 2; ++t) f.visit(t);
  EXPECT_LE(f.manager.statistics().h2d_bytes, 4 * kSlotBytes);
}

TEST(PageManager, OwnKeysAreAloneWhereAPageWasNotForeseen) {
  Fixture f(16);
  f.manager.begin_call(
      plan(1, {24}, {{0, VisitKind::kRead, 0, 24}, {0, VisitKind::kAccumulate, 0, 24}}));
  f.manager.create_gradients(0, 0, 24);
  f.write(0, 0, 24);
  const auto on_device = [&](int64_t page) {
    return f.manager.tables()[f.manager.tables().kv_entry(0) + page] >= 0;
  };
  int64_t away = 0;
  while (on_device(away)) ++away;
  ASSERT_GT(away, 0);
  EXPECT_FALSE(f.manager.own_alone(0, 0, away));
  EXPECT_FALSE(f.manager.own_alone(1, 0, away)) << "gradients do not exist and will be made";
  EXPECT_TRUE(f.manager.own_alone(0, 0, away + 1));
  f.engine().finishing = false;
  f.manager.acquire(0, 0, away, nullptr);
  f.manager.release(0, 0, away, nullptr);
  EXPECT_FALSE(f.manager.own_alone(0, away, away + 1)) << "on its way";
  EXPECT_TRUE(f.manager.own_alone(0, away, 24));
  f.manager.set_visit_pages(0, {away});
  EXPECT_FALSE(f.manager.own_alone(0, 0, 24)) << "only what is listed counts";
}

// The gradients of a chunk's own pages are read in the visit after next; nobody asks for them
// before.
TEST(PageManager, OwnGradientsAreThereWhenTheyAreRead) {
  Fixture f(48);
  std::vector<Visit> visits;
  for (int32_t layer = 0; layer < 4; ++layer) {
    visits.push_back({layer, VisitKind::kAccumulate, 0, 12});
  }
  for (int32_t layer = 0; layer < 4; ++layer) {
    visits.push_back({layer, VisitKind::kAccumulate, 0, 8});
    visits.push_back({layer, VisitKind::kReadGradient, 8, 12});
  }
  f.manager.begin_call({.num_layers = 4,
                        .pages_per_sequence = {12},
                        .grad_slots = 1,
                        .visits = visits,
                        .exact = false});
  for (int32_t t = 0; t < static_cast<int32_t>(visits.size()); ++t) {
    std::vector<int64_t> pages(static_cast<size_t>(visits[static_cast<size_t>(t)].last));
    std::iota(pages.begin(), pages.end(), 0);
    if (visits[static_cast<size_t>(t)].first == 0) f.manager.set_visit_pages(t, pages);
  }
  for (int32_t layer = 0; layer < 4; ++layer) {
    f.manager.create_gradients(layer, 0, 12);
    f.write(layer, 0, 12);
  }
  for (int32_t t = 0; t < 4; ++t) f.visit(t);
  for (int32_t layer = 0; layer < 4; ++layer) {
    f.visit(4 + 2 * layer);
    const int64_t misses = f.manager.statistics().misses;
    f.manager.acquire_gradients(layer, 8, 12, nullptr);
    EXPECT_EQ(f.manager.statistics().misses, misses) << "layer " << layer;
    f.manager.drop(layer, 8, 12, false, true, nullptr);
  }
  EXPECT_GT(f.manager.statistics().h2d_bytes, 0);
}

// Time moves on with a chunk's read of its own gradients, whichever sequences reach so far.
TEST(PageManager, OwnGradientsOfALongerSequenceAreAVisitToo) {
  Fixture f(48);
  f.manager.begin_call(plan(1, {2, 4},
                            {{0, VisitKind::kAccumulate, 0, 4},
                             {0, VisitKind::kAccumulate, 0, 2},
                             {0, VisitKind::kReadGradient, 2, 4},
                             {0, VisitKind::kReadGradient, 0, 2}}));
  f.manager.create_gradients(0, 0, 4);
  f.write(0, 0, 4);
  f.visit(0);
  f.visit(1);
  f.manager.acquire_gradients(0, 4, 4, nullptr);  // none: behind the last page
  EXPECT_CONTAINS(f.manager.snapshot(), "\"visit\": 1,");
  f.manager.acquire_gradients(0, 2, 4, nullptr);
  EXPECT_CONTAINS(f.manager.snapshot(), "\"visit\": 2,");
  f.manager.acquire_gradients(0, 0, 2, nullptr);
  EXPECT_CONTAINS(f.manager.snapshot(), "\"visit\": 3,");
}

// Layer 2 is needed last, but its kernels and those of layer 1 may still run.
TEST(PageManager, SlotsInUseGoLast) {
  Fixture f(12);
  std::vector<Visit> visits;
  for (const int32_t layer : {0, 1, 2, 0, 1, 2}) visits.push_back({layer, VisitKind::kRead, 0, 4});
  f.manager.begin_call(plan(4, {4}, visits));
  const auto on_device = [&](int32_t layer) {
    const int64_t first = f.manager.tables().kv_entry(layer);
    int64_t pages = 0;
    for (int64_t page = 0; page < 4; ++page) pages += f.manager.tables()[first + page] >= 0 ? 1 : 0;
    return pages;
  };
  for (int32_t layer = 0; layer < 3; ++layer) f.write(layer, 0, 4);
  for (int32_t t = 0; t < 3; ++t) f.visit(t);
  f.write(3, 0, 3);
  EXPECT_EQ(on_device(0), 1);
  EXPECT_EQ(on_device(1), 4);
  EXPECT_EQ(on_device(2), 4);
  f.write(3, 3, 4);
  f.manager.acquire(3, 0, 1, nullptr);
  EXPECT_EQ(on_device(3), 4) << "but they do go";
}

// What leaves the tier and comes back is spread over the layers: at the end of a round each has
// kept some of its pages, not the last ones all and others none.
TEST(PageManager, EveryLayerKeepsAShare) {
  const int32_t layers = 16;
  Fixture f(160);
  std::vector<Visit> visits;
  for (int round = 0; round < 4; ++round) {
    for (int32_t layer = 0; layer < layers; ++layer) {
      visits.push_back({layer, VisitKind::kRead, 0, 16});
    }
  }
  f.manager.begin_call(plan(layers, {16}, visits));
  for (int32_t layer = 0; layer < layers; ++layer) f.write(layer, 0, 16);
  for (int32_t t = 0; t < 3 * layers; ++t) f.visit(t);
  for (int32_t layer = 0; layer < layers; ++layer) {
    const int64_t first = f.manager.tables().kv_entry(layer);
    int64_t kept = 0;
    for (int64_t page = 0; page < 16; ++page) kept += f.manager.tables()[first + page] >= 0 ? 1 : 0;
    EXPECT_GT(kept, 0) << "layer " << layer;
  }
}

TEST(PageManager, TooSmallACapNamesTheSmallestThatWorks) {
  Fixture f(5);
  const CallPlan backward = plan(1, {4, 4}, {{0, VisitKind::kAccumulate, 0, 4}}, 2);
  const std::string message = message_of([&] { f.manager.begin_call(backward); });
  EXPECT_EQ(PageManager::smallest_device_slots(2, 2, true), 6);
  EXPECT_CONTAINS(message, "device_memory");
  EXPECT_CONTAINS(message, std::to_string(6 * kSlotBytes));
  EXPECT_THROW(f.manager.begin_call(backward), OutOfMemory);

  Fixture smallest(6);
  smallest.manager.begin_call(backward);
  smallest.write(0, 0, 4);
  smallest.manager.create_gradients(0, 0, 4);
  smallest.visit(0);
}

TEST(PageManager, AcquiringMoreThanFitsFailsAndChangesNothing) {
  Fixture f(4);
  f.manager.begin_call(plan(1, {8}, {{0, VisitKind::kRead, 0, 8}}));
  f.write(0, 0, 8);
  const std::string message = message_of([&] { f.manager.acquire(0, 0, 8, nullptr); });
  EXPECT_CONTAINS(message, "device_memory");
  f.manager.check_integrity();
  f.visit(0);
}

TEST(PageManager, AcquiringWhatTheEngineRefusesChangesNothing) {
  Fixture f(4);
  f.manager.begin_call(plan(1, {4}, {{0, VisitKind::kAccumulate, 0, 4}}));
  f.manager.create_gradients(0, 0, 4);
  f.write(0, 0, 4);
  f.engine().refusing = true;
  EXPECT_THROW(f.manager.acquire(0, 0, 2, nullptr), CudaError);
  EXPECT_CONTAINS(f.manager.snapshot(), "\"pinned_slots\": 0,");
  f.manager.check_integrity();
  f.engine().refusing = false;
  f.visit(0);
}

TEST(PageManager, FullHostTierNamesItsSetting) {
  Fixture f(4, 2);
  f.manager.begin_call(plan(1, {8}, {{0, VisitKind::kRead, 0, 8}}));
  const std::string message = message_of([&] { f.write(0, 0, 8); });
  EXPECT_CONTAINS(message, "host_memory");
  EXPECT_CONTAINS(message, std::to_string(2 * kSlotBytes));
  f.manager.check_integrity();
}

// To ask for host memory may take long where there is none.
TEST(PageManager, HostThatRefusesIsNotAskedForEveryPage) {
  Fixture f(64);
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

TEST(PageManager, MisuseIsRefused) {
  Fixture f(8);
  EXPECT_CONTAINS(message_of([&] { f.manager.create(0, 0, 1, nullptr); }), "no call has begun");
  f.manager.begin_call(plan(1, {4}, {{0, VisitKind::kRead, 0, 4}}));
  EXPECT_CONTAINS(message_of([&] { f.manager.begin_call(plan(1, {4}, {})); }), "in use");
  EXPECT_CONTAINS(message_of([&] { f.manager.acquire(0, 0, 1, nullptr); }), "holds nothing");
  f.write(0, 0, 4);
  EXPECT_CONTAINS(message_of([&] { f.manager.create(0, 0, 1, nullptr); }), "twice");
  EXPECT_CONTAINS(message_of([&] { f.manager.release(0, 0, 1, nullptr); }),
                  "had not been acquired");
  EXPECT_THROW(f.manager.acquire(1, 0, 1, nullptr), InvalidArgument);
  EXPECT_THROW(f.manager.acquire(0, 0, 5, nullptr), InvalidArgument);
  EXPECT_THROW(f.manager.set_visit_pages(0, {4}), InvalidArgument);
  f.manager.acquire(0, 0, 1, nullptr);
  EXPECT_CONTAINS(message_of([&] { f.manager.drop(0, 0, 1, true, true, nullptr); }), "acquired");
  f.manager.check_integrity();
  f.manager.close();
  EXPECT_CONTAINS(message_of([&] { f.manager.begin_call(plan(1, {4}, {})); }), "closed");
  EXPECT_CONTAINS(message_of([&] { f.manager.create(0, 0, 1, nullptr); }), "closed");
  f.manager.close();
}

TEST(PageManager, ACallThatCouldNotBeginHasNotBegun) {
  Fixture f(4);
  const CallPlan spilling = plan(1, {8}, {{0, VisitKind::kRead, 0, 8}});
  f.tiers.host_failures->no_preparing = true;
  EXPECT_THROW(f.manager.begin_call(spilling), Error);
  EXPECT_CONTAINS(message_of([&] { f.write(0, 0, 1); }), "no call has begun");
  f.tiers.host_failures->no_preparing = false;
  f.manager.begin_call(spilling);
  f.write(0, 0, 8);
  f.visit(0);
}

TEST(PageManager, EveryPageDiesWithTheCall) {
  Fixture f(4);
  for (int call = 0; call < 3; ++call) {
    f.manager.begin_call(plan(2, {8}, {{0, VisitKind::kRead, 0, 8}}));
    f.write(0, 0, 8);
    f.write(1, 0, 3);
    f.manager.acquire(0, 0, 1, nullptr);
    EXPECT_EQ(f.manager.statistics().device_peak_bytes, 4 * kSlotBytes);
    f.manager.end_call();
    f.manager.end_call();
    EXPECT_EQ(f.manager.mapped_device_slots(), 0);
  }
}

TEST(PageManager, SnapshotTellsWhatIsWhere) {
  Fixture f(4);
  EXPECT_CONTAINS(f.manager.snapshot(), "\"active\": false");
  f.manager.begin_call(plan(1, {8}, {{0, VisitKind::kRead, 0, 8}}));
  f.write(0, 0, 8);
  const std::string text = f.manager.snapshot();
  EXPECT_CONTAINS(text, "\"host-only\": 4");
  EXPECT_CONTAINS(text, "\"taken_slots\": 4");
  EXPECT_CONTAINS(text, "\"transitions\"");
}

}  // namespace
}  // namespace oomb::paging
