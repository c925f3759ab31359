// Ordering: copies and kernels on their own threads, all of them late at random. A page that is
// read before its bytes are there, or overwritten while someone reads it, shows a stale stamp.
//
// The mutation tests leave out one wait each and must see stale stamps. They race by design, so
// they are not built for the thread sanitizer.

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "offload/host_copy_engine.h"
#include "paging/ordering.h"
#include "support/page_oracle.h"
#include "support/random_calls.h"
#include "support/test_tiers.h"

namespace oomb::offload {
namespace {

constexpr int64_t kSchedules = 100;
constexpr int64_t kOperations = 300;
constexpr int64_t kOutputsAlone = 10;

struct Setup {
  Setup(uint64_t seed, int64_t device_slots, std::optional<paging::Wait> disabled)
      : tiers({.slot_bytes = 256,
               .device_slots = device_slots,
               .host_slots = 256,
               .step_slots = 1,  // a freed host slot is the next one taken
               .manager = {.disabled_wait = disabled}},
              [&](std::byte* device, std::byte* host, int64_t slot_bytes) {
                auto made =
                    std::make_unique<HostCopyEngine>(HostCopyOptions{.device_base = device,
                                                                     .host_base = host,
                                                                     .slot_bytes = slot_bytes,
                                                                     .delay_seed = seed,
                                                                     .max_delay_us = 100,
                                                                     .asynchronous_compute = true});
                engine = made.get();
                return made;
              }),
        oracle(*tiers.manager, *engine, seed, 400) {}

  HostCopyEngine* engine = nullptr;
  testing::TestTiers tiers;
  testing::PageOracle oracle;
};

// Stale stamps seen in one random schedule.
int64_t random_schedule(uint64_t seed, std::optional<paging::Wait> disabled,
                        int64_t output_share = 3) {
  std::mt19937_64 random(seed);
  Setup setup(seed, 4 + static_cast<int64_t>(random() % 12), disabled);
  testing::RandomCalls calls(setup.tiers, setup.oracle, seed, false, [] {}, output_share);
  calls.run(kOperations);
  EXPECT_GT(setup.oracle.checked(), 0);
  return setup.oracle.stale();
}

// Two situations that foresight makes rare in random schedules. Page 0 has just left a tier of
// three slots, page 1 goes next, pages 2 and 3 were never stored.
class TightTier {
 public:
  TightTier(uint64_t seed, std::optional<paging::Wait> disabled)
      : setup_(seed, 3, disabled), manager_(*setup_.tiers.manager) {
    manager_.begin_call({.num_layers = 1,
                         .pages_per_sequence = {6},
                         .grad_slots = 1,
                         .visits = {{0, paging::VisitKind::kRead, 2, 4},
                                    {0, paging::VisitKind::kRead, 1, 2},
                                    {0, paging::VisitKind::kRead, 5, 6},
                                    {0, paging::VisitKind::kRead, 5, 6},
                                    {0, paging::VisitKind::kRead, 0, 1}}});
    for (int64_t page = 0; page < 4; ++page) write(page, page + 1);
  }

  // A page is read for the last time and dropped while its load is on its way; its host slot goes
  // to another page at once.
  //     load      [ host 0 -> page 0 ......... ]
  //     compute                                 [ read page 0 ]
  //     store         [ page 3 -> host 0 ]      too early
  int64_t hand_on_host_slot() {
    read_first_page();
    manager_.drop(0, 0, 1, true, true, nullptr);
    write(4, 6);
    manager_.end_call();
    return setup_.oracle.stale();
  }

  // A page comes back, into a slot that nobody stores from, while its store is on its way.
  //     store     [ page 0 -> host 0 ......... ]
  //     load          [ host 0 -> page 0 ]      too early
  int64_t fetch_back_at_once() {
    manager_.drop(0, 2, 3, true, true, nullptr);
    read_first_page();
    manager_.end_call();
    return setup_.oracle.stale();
  }

 private:
  void write(int64_t begin, int64_t end) {
    manager_.create(0, begin, end, nullptr);
    for (int64_t page = begin; page < end; ++page) setup_.oracle.write_keys(0, page);
    manager_.commit(0, begin, end, nullptr);
  }
  void read_first_page() {
    manager_.acquire(0, 0, 1, nullptr);
    setup_.oracle.check_keys(0, 0);
    manager_.release(0, 0, 1, nullptr);
  }

  Setup setup_;
  paging::PageManager& manager_;
};

int64_t stale_stamps(uint64_t seed, std::optional<paging::Wait> disabled) {
  return random_schedule(seed, disabled) + TightTier(seed, disabled).hand_on_host_slot() +
         TightTier(seed, disabled).fetch_back_at_once();
}

TEST(PageStamps, NoneIsStale) {
  for (uint64_t seed = 0; seed < kSchedules; ++seed) {
    ASSERT_EQ(stale_stamps(seed, std::nullopt), 0) << "seed " << seed;
    if (seed % 4 != 0) continue;
    ASSERT_EQ(random_schedule(seed, std::nullopt, kOutputsAlone), 0) << "seed " << seed;
  }
}

#ifndef __SANITIZE_THREAD__

class PageStampsMutation : public ::testing::TestWithParam<int> {};

TEST_P(PageStampsMutation, LeavingTheWaitOutIsNoticed) {
  const auto wait = static_cast<paging::Wait>(GetParam());
  for (uint64_t seed = 0; seed < kSchedules; ++seed) {
    if (stale_stamps(seed, wait) > 0) return;
  }
  FAIL() << "no stale stamp in " << kSchedules << " schedules without the wait";
}

// Every wait that kept outputs need, where nothing else is on its way.
class KeptOutputsMutation : public ::testing::TestWithParam<paging::Wait> {};

TEST_P(KeptOutputsMutation, LeavingTheWaitOutIsNoticed) {
  for (uint64_t seed = 0; seed < kSchedules; ++seed) {
    if (random_schedule(seed, GetParam(), kOutputsAlone) > 0) return;
  }
  FAIL() << "no stale stamp in " << kSchedules << " schedules without the wait";
}

INSTANTIATE_TEST_SUITE_P(
    Waits, KeptOutputsMutation,
    ::testing::Values(paging::Wait::kStoreAfterWrite, paging::Wait::kLoadAfterUse,
                      paging::Wait::kLoadAfterStore, paging::Wait::kComputeAfterLoad,
                      paging::Wait::kWriteAfterStore, paging::Wait::kWriteAfterLoad),
    [](const auto& info) { return paging::kWaitSites[static_cast<size_t>(info.param)].name; });

// A store behind a load that nobody awaited comes after a refused visit alone, which no schedule
// has (tests/python/ops/test_refused_visits.py).
std::vector<int> waits_of_schedules() {
  std::vector<int> waits;
  for (int wait = 0; wait < paging::kNumWaits; ++wait) {
    if (static_cast<paging::Wait>(wait) != paging::Wait::kStoreAfterLoad) waits.push_back(wait);
  }
  return waits;
}

INSTANTIATE_TEST_SUITE_P(Waits, PageStampsMutation, ::testing::ValuesIn(waits_of_schedules()),
                         [](const auto& info) {
                           return paging::kWaitSites[static_cast<size_t>(info.param)].name;
                         });

#endif

}  // namespace
}  // namespace oomb::offload
