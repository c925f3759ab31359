// What the page manager moves between its tiers, and when, with copies that happen at once.

#include <gtest/gtest.h>

#include <numeric>
#include <span>
#include <vector>

#include "paging/managed_tiers.h"
#include "paging/page_manager.h"

namespace oomb::paging {
namespace {

TEST(PageTraffic, NothingIsCopiedWhileEverythingFits) {
  ManagedTiers f(8);
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

TEST(PageTraffic, KeysAndValuesGoToTheHostAtMostOnce) {
  ManagedTiers f(4);
  std::vector<Visit> visits(10, Visit{0, VisitKind::kRead, 0, 12});
  f.manager.begin_call(plan(1, {12}, visits));
  f.write(0, 0, 12);
  for (int32_t t = 0; t < 10; ++t) f.visit(t);
  EXPECT_LE(f.manager.statistics().d2h_bytes, 12 * kSlotBytes);
  EXPECT_GE(f.manager.statistics().d2h_bytes, 8 * kSlotBytes);
}

// A cyclic scan of n pages with c slots: the optimum misses about (n - c) / n of it, LRU
// everything.
TEST(PageTraffic, CyclicScanKeepsMostOfWhatFits) {
  ManagedTiers f(64);
  const int rounds = 20;
  f.manager.begin_call(plan(1, {80}, std::vector<Visit>(rounds, {0, VisitKind::kRead, 0, 80})));
  f.write(0, 0, 80);
  for (int32_t t = 0; t < rounds; ++t) f.visit(t);
  const double per_round =
      static_cast<double>(f.manager.statistics().h2d_bytes) / kSlotBytes / rounds;
  EXPECT_LE(per_round, 80 - 64 + 16 + 1) << "16 slots are the window through which pages stream";
  EXPECT_GE(per_round, 80 - 64 - 1);
}

TEST(PageTraffic, PagesThatComeNextAreThereWhenAcquired) {
  ManagedTiers f(32);
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

// Waves, the question whether the own chunk goes alone, acquire and release: one look.
TEST(PageTraffic, PagesAreLookedUpOnceAVisit) {
  ManagedTiers f(8);
  f.manager.begin_call(plan(1, {32, 20},
                            {{0, VisitKind::kRead, 0, 32},
                             {0, VisitKind::kRead, 4, 32},
                             {0, VisitKind::kAccumulate, 0, 32}}));
  f.write(0, 0, 32);
  f.manager.create_gradients(0, 0, 32);
  f.manager.set_visit_pages(1, {4, 9, 31, 32 + 4, 32 + 19});
  for (int32_t visit = 0; visit < 3; ++visit) {
    const auto waves = f.manager.waves(visit);
    EXPECT_EQ(waves.size() > 1, visit != 1);
    f.manager.own_alone(visit, waves[0].first, waves[0].second);
    for (const auto& [first, last] : waves) {
      f.manager.acquire(visit, first, last, nullptr);
      f.manager.release(visit, first, last, nullptr);
    }
    EXPECT_EQ(f.manager.statistics().gathers, visit + 1);
  }
  const PageStatistics s = f.manager.statistics();
  EXPECT_EQ(s.hits + s.misses, 52 + 5 + 52) << "gradients are made, neither found nor loaded";
}

// What a visit touches may change between its questions.
TEST(PageTraffic, PagesAreLookedUpAgainWhereTheyMayBeOthers) {
  ManagedTiers f(16);
  f.manager.begin_call(
      plan(1, {8}, {{0, VisitKind::kRead, 0, 8}, {0, VisitKind::kAccumulate, 0, 4}}));
  f.write(0, 0, 8);
  f.manager.waves(0);
  f.manager.set_visit_pages(0, {2, 5, 6});
  f.manager.acquire(0, 0, 8, nullptr);
  EXPECT_EQ(f.manager.statistics().hits, 3);
  f.manager.release(0, 0, 8, nullptr);
  f.manager.waves(1);
  f.manager.create_gradients(0, 1, 3);
  f.manager.acquire(1, 0, 4, nullptr);
  f.manager.release(1, 0, 4, nullptr);
  f.manager.waves(1);
  f.manager.drop(0, 1, 2, true, true, nullptr);
  f.manager.acquire(1, 2, 4, nullptr);
  f.manager.release(1, 2, 4, nullptr);
  EXPECT_EQ(f.manager.statistics().hits, 3 + 4 + 3) << "pages 2 and 3, and the gradient of 2";
  EXPECT_EQ(f.manager.statistics().gathers, 5) << "two of each visit, and one after the drop";
  f.manager.check_integrity();
}

TEST(PageTraffic, DroppedPagesAreNeverWrittenBack) {
  ManagedTiers f(8);
  f.manager.begin_call(plan(1, {64}, {}));
  for (int64_t page = 0; page < 64; ++page) {
    f.write(0, page, page + 1);
    f.manager.drop(0, page, page + 1, true, true, nullptr);
    f.manager.check_integrity();
  }
  EXPECT_EQ(f.manager.statistics().d2h_bytes, 0);
}

TEST(PageTraffic, ExactListsAreAllThatIsLoaded) {
  ManagedTiers f(4);
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

TEST(PageTraffic, OwnKeysAreAloneWhereAPageWasNotForeseen) {
  ManagedTiers f(16);
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
TEST(PageTraffic, OwnGradientsAreThereWhenTheyAreRead) {
  ManagedTiers f(48);
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
TEST(PageTraffic, OwnGradientsOfALongerSequenceAreAVisitToo) {
  ManagedTiers f(48);
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
TEST(PageTraffic, SlotsInUseGoLast) {
  ManagedTiers f(12);
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
TEST(PageTraffic, EveryLayerKeepsAShare) {
  const int32_t layers = 16;
  ManagedTiers f(160);
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

TEST(PageTraffic, WaitsCountUnderTheVisitThatNeededThem) {
  ManagedTiers f(8);
  const auto seconds = [](std::span<const double> waits) {
    return std::accumulate(waits.begin(), waits.end(), 0.0);
  };
  f.manager.begin_call(plan(1, {24}, std::vector<Visit>(5, {0, VisitKind::kRead, 0, 24})));
  f.write(0, 0, 24);  // into slots from which pages are being stored
  const CallTimes& times = f.manager.times();
  const double for_stores = times.waits_for_stores()[0];
  EXPECT_GT(for_stores, 0);
  EXPECT_EQ(seconds(times.waits_for_loads()), 0);
  for (int32_t t = 0; t < 5; ++t) {
    const double before = seconds(times.waits_for_loads());
    f.visit(t);
    EXPECT_GT(times.waits_for_loads()[static_cast<size_t>(t)], 0);
    EXPECT_EQ(times.waits_for_loads()[static_cast<size_t>(t)],
              seconds(times.waits_for_loads()) - before);
  }
  EXPECT_EQ(seconds(times.waits_for_stores()), for_stores);
  EXPECT_EQ(times.waits(), for_stores + seconds(times.waits_for_loads()));
}

}  // namespace
}  // namespace oomb::paging
