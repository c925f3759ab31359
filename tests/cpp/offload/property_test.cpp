// Allocator, block tables, page manager and copy engine together under random use. Long: filter
// with PageTiersProperty.

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>

#include "offload/host_copy_engine.h"
#include "support/page_oracle.h"
#include "support/random_calls.h"
#include "support/test_tiers.h"

namespace oomb::offload {
namespace {

constexpr int64_t kSeeds = 200;
constexpr int64_t kOperations = 1000;

TEST(PageTiersProperty, BytesAndAccountsHoldUnderRandomUseAndFailures) {
  int64_t operations = 0;
  int64_t injected = 0;
  int64_t checked = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::mt19937_64 random(seed);
    const bool delays = seed % 20 == 0;
    testing::TestTiersOptions options;
    options.device_slots = 6 + static_cast<int64_t>(random() % 30);
    if (seed % 2 == 1) options.shuffle_seed = seed;
    options.manager.poison = seed % 4 == 2;
    HostCopyEngine* engine = nullptr;
    testing::TestTiers tiers(options, [&](std::byte* device, std::byte* host, int64_t slot_bytes) {
      auto made = std::make_unique<HostCopyEngine>(
          HostCopyOptions{.device_base = device,
                          .host_base = host,
                          .slot_bytes = slot_bytes,
                          .delay_seed = delays ? std::optional(seed) : std::nullopt,
                          .max_delay_us = 20,
                          .asynchronous_compute = true});
      engine = made.get();
      return made;
    });
    testing::PageOracle oracle(*tiers.manager, *engine, std::nullopt, 0);
    testing::RandomCalls calls(tiers, oracle, seed, true,
                               [&] { tiers.manager->check_integrity(); });
    calls.run(kOperations);
    ASSERT_EQ(oracle.stale(), 0) << "seed " << seed;
    ASSERT_GE(calls.operations(), kOperations);
    operations += calls.operations();
    injected += calls.injected();
    checked += oracle.checked();
  }
  EXPECT_GE(operations, kSeeds * kOperations);
  EXPECT_GT(injected, kSeeds) << "failures were meant to be met";
  EXPECT_GT(checked, kSeeds * kOperations / 2) << "pages were meant to be looked at";
}

}  // namespace
}  // namespace oomb::offload
