// Calls of the page manager and what is in its pages, with copies that happen at once.

#include "paging/page_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "paging/managed_tiers.h"

namespace oomb::paging {
namespace {

TEST(PageManager, GradientStartsAtZeroAndIsNotLoadedBeforeItExists) {
  ManagedTiers f(3);
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

TEST(PageManager, ACallMayHaveLessOfTheDevice) {
  ManagedTiers f(6);
  for (const std::optional<int64_t> slots : {std::optional<int64_t>{3}, {}, {5}}) {
    CallPlan call = plan(1, {12}, {{0, VisitKind::kRead, 0, 12}});
    call.device_slots = slots;
    f.manager.begin_call(std::move(call));
    EXPECT_EQ(f.manager.device_slots(), slots.value_or(6));
    EXPECT_EQ(f.manager.device_capacity(), 6);
    f.write(0, 0, 12);
    f.visit(0);
    EXPECT_LE(f.manager.mapped_device_slots(), slots.value_or(6));
    f.manager.end_call();
  }
  for (const int64_t slots : {7, 0, -1}) {
    CallPlan call = plan(1, {12}, {{0, VisitKind::kRead, 0, 12}});
    call.device_slots = slots;
    EXPECT_THROW(f.manager.begin_call(std::move(call)), Error) << slots;
  }
  f.manager.begin_call(plan(1, {12}, {{0, VisitKind::kRead, 0, 12}}));
}

TEST(PageManager, PageWithoutWantedGradientHasNone) {
  ManagedTiers f(8);
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
  ManagedTiers f(6);
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
    ManagedTiers f(slots);
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
    ManagedTiers f(slots);
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

TEST(PageManager, AcquiringWhatTheEngineRefusesChangesNothing) {
  ManagedTiers f(4);
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

TEST(PageManager, MisuseIsRefused) {
  ManagedTiers f(8);
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

// Each names a range of which a part alone can be done: nothing of it is.
TEST(PageManager, RefusedRangesChangeNothing) {
  ManagedTiers f(8);
  f.manager.begin_call(plan(1, {4}, {{0, VisitKind::kRead, 0, 3}}));
  f.manager.create(0, 0, 2, nullptr);
  EXPECT_CONTAINS(message_of([&] { f.manager.commit(0, 0, 3, nullptr); }), "not been acquired");
  f.manager.commit(0, 0, 2, nullptr);
  f.write(0, 2, 3);
  f.manager.acquire(0, 1, 2, nullptr);
  const std::string before = f.manager.snapshot();
  EXPECT_CONTAINS(message_of([&] { f.manager.release(0, 1, 3, nullptr); }), "not been acquired");
  EXPECT_CONTAINS(message_of([&] { f.manager.drop(0, 0, 2, true, true, nullptr); }), "acquired");
  EXPECT_CONTAINS(message_of([&] { f.manager.set_visit_pages(0, {2}); }), "pages are released");
  EXPECT_EQ(f.manager.snapshot(), before);
  f.manager.release(0, 1, 2, nullptr);
  f.manager.set_visit_pages(0, {0, 2});
  f.visit(0);
  EXPECT_CONTAINS(f.manager.snapshot(), "\"pinned_slots\": 0,");
  f.manager.drop(0, 0, 3, true, true, nullptr);
  f.manager.check_integrity();
}

TEST(PageManager, ACallThatCouldNotBeginHasNotBegun) {
  ManagedTiers f(4);
  const CallPlan spilling = plan(1, {8}, {{0, VisitKind::kRead, 0, 8}});
  f.tiers.host_failures->no_preparing = true;
  EXPECT_THROW(f.manager.begin_call(spilling), Error);
  EXPECT_CONTAINS(message_of([&] { f.write(0, 0, 1); }), "no call has begun");
  f.tiers.host_failures->no_preparing = false;
  f.manager.begin_call(spilling);
  f.write(0, 0, 8);
  f.visit(0);
}

// Nobody may get memory that a copy still writes.
TEST(PageManager, MemoryStaysWhereACopyDoesNotEnd) {
  ManagedTiers f(4);
  const auto committed = [&] {
    const PageStatistics now = f.manager.statistics();
    return now.device.committed_bytes + now.host.committed_bytes;
  };
  const CallPlan spilling = plan(1, {8}, {{0, VisitKind::kRead, 0, 8}});
  f.manager.begin_call(spilling);
  f.write(0, 0, 8);
  const int64_t before = committed();
  ASSERT_GT(before, 4 * kSlotBytes);
  f.engine().stuck = true;
  EXPECT_CONTAINS(message_of([&] { f.manager.end_call(); }), "has not finished");
  EXPECT_EQ(committed(), before);
  EXPECT_CONTAINS(message_of([&] { f.manager.begin_call(spilling); }), "has not finished");
  EXPECT_CONTAINS(message_of([&] { f.write(0, 0, 1); }), "no call has begun");
  f.engine().stuck = false;
  f.manager.begin_call(spilling);
  f.write(0, 0, 8);
  f.visit(0);
  f.manager.end_call();
  EXPECT_EQ(committed(), 0);
  f.manager.begin_call(spilling);
  f.write(0, 0, 8);
  f.engine().stuck = true;
  EXPECT_CONTAINS(message_of([&] { f.manager.close(); }), "has not finished");
  EXPECT_CONTAINS(message_of([&] { f.manager.close(); }), "has not finished");
  EXPECT_EQ(committed(), before);
  f.engine().stuck = false;
  f.manager.close();
  EXPECT_EQ(committed(), 0);
  EXPECT_CONTAINS(message_of([&] { f.manager.begin_call(spilling); }), "closed");
}

TEST(PageManager, EveryPageDiesWithTheCall) {
  ManagedTiers f(4);
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
  ManagedTiers f(4);
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
