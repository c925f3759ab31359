// What every memory resource must do, run over each of them and over a stack of all.

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "common/bytes.h"
#include "common/error.h"
#include "memory/host_resource.h"
#include "memory/limited_resource.h"
#include "memory/pinned_resource.h"
#include "memory/statistics_resource.h"
#include "support/delaying_resource.h"
#include "support/failing_resource.h"

namespace oomb::memory {
namespace {

constexpr int64_t kCapacity = int64_t{1} << 20;

struct Case {
  std::string name;
  std::function<std::unique_ptr<MemoryResource>()> make;
};

std::unique_ptr<MemoryResource> host() { return std::make_unique<HostResource>(kCapacity); }
std::unique_ptr<MemoryResource> limited(std::unique_ptr<MemoryResource> upstream) {
  return std::make_unique<LimitedResource>(std::move(upstream), kCapacity, "host_memory");
}
std::unique_ptr<MemoryResource> counted(std::unique_ptr<MemoryResource> upstream) {
  return std::make_unique<StatisticsResource>(std::move(upstream));
}
std::unique_ptr<MemoryResource> failing(std::unique_ptr<MemoryResource> upstream) {
  return std::make_unique<testing::FailingResource>(std::move(upstream),
                                                    std::make_shared<testing::FailureSwitch>());
}
std::unique_ptr<MemoryResource> delaying(std::unique_ptr<MemoryResource> upstream) {
  return std::make_unique<testing::DelayingResource>(std::move(upstream),
                                                     std::chrono::microseconds(10));
}

struct NoRegistrar final : Registrar {
  void add(std::byte*, int64_t) override {}
  void remove(std::byte*) noexcept override {}
};
std::unique_ptr<MemoryResource> pinned() {
  return std::make_unique<PinnedResource>(
      PinnedOptions{.capacity = kCapacity,
                    .piece_bytes = kCapacity / 8,
                    .read_room = [] { return HeadRoom{.available = kGiB, .total = kGiB}; }},
      std::make_unique<NoRegistrar>());
}

class ResourceConformance : public ::testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<MemoryResource> resource_ = GetParam().make();
};

TEST_P(ResourceConformance, StartsEmpty) {
  EXPECT_EQ(resource_->committed(), 0);
  EXPECT_GE(resource_->capacity(), kCapacity);
  EXPECT_GT(resource_->granularity(), 0);
  EXPECT_NE(resource_->base(), nullptr);
}

TEST_P(ResourceConformance, CommittedMemoryIsZeroAndWritable) {
  resource_->commit(1000);
  ASSERT_GE(resource_->committed(), 1000);
  const auto size = static_cast<size_t>(resource_->committed());
  for (size_t i = 0; i < size; ++i) ASSERT_EQ(resource_->base()[i], std::byte{0});
  std::memset(resource_->base(), 0x5A, size);
  EXPECT_EQ(resource_->base()[size - 1], std::byte{0x5A});
}

TEST_P(ResourceConformance, GrowthKeepsAddressAndBytes) {
  resource_->commit(1);
  std::byte* base = resource_->base();
  std::memset(base, 0x11, 1);
  resource_->commit(kCapacity / 2);
  resource_->commit(kCapacity);
  EXPECT_EQ(resource_->base(), base);
  EXPECT_EQ(base[0], std::byte{0x11});
  EXPECT_EQ(base[kCapacity - 1], std::byte{0});
}

TEST_P(ResourceConformance, NeverShrinksByCommit) {
  resource_->commit(kCapacity);
  const int64_t committed = resource_->committed();
  resource_->commit(1);
  resource_->commit(0);
  EXPECT_EQ(resource_->committed(), committed);
}

TEST_P(ResourceConformance, TooLargeThrowsAndChangesNothing) {
  resource_->commit(100);
  const int64_t committed = resource_->committed();
  EXPECT_THROW(resource_->commit(resource_->capacity() + 1), OutOfMemory);
  EXPECT_EQ(resource_->committed(), committed);
  resource_->commit(kCapacity);
  EXPECT_GE(resource_->committed(), kCapacity);
}

TEST_P(ResourceConformance, ReleaseGivesBackAndCanGrowAgain) {
  for (int round = 0; round < 3; ++round) {
    resource_->commit(kCapacity);
    EXPECT_EQ(resource_->base()[kCapacity - 1], std::byte{0}) << "memory of the round before";
    std::memset(resource_->base(), 0xFF, kCapacity);
    std::byte* base = resource_->base();
    resource_->release();
    EXPECT_EQ(resource_->committed(), 0);
    EXPECT_EQ(resource_->base(), base);
  }
  resource_->release();
}

INSTANTIATE_TEST_SUITE_P(
    All, ResourceConformance,
    ::testing::Values(Case{"Host", host}, Case{"Pinned", pinned},
                      Case{"Limited", [] { return limited(host()); }},
                      Case{"Statistics", [] { return counted(host()); }},
                      Case{"Failing", [] { return failing(host()); }},
                      Case{"Delaying", [] { return delaying(host()); }},
                      Case{"Stack", [] { return counted(limited(delaying(failing(host())))); }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace oomb::memory
