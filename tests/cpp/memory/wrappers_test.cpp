#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "common/error.h"
#include "memory/host_resource.h"
#include "memory/limited_resource.h"
#include "memory/statistics_resource.h"
#include "support/delaying_resource.h"
#include "support/failing_resource.h"

namespace oomb::memory {
namespace {

constexpr int64_t kCapacity = int64_t{1} << 20;

std::unique_ptr<HostResource> host() { return std::make_unique<HostResource>(kCapacity); }

TEST(LimitedResource, ExactFillIsAllowed) {
  LimitedResource resource(host(), kCapacity / 2, "host_memory");
  resource.commit(kCapacity / 2);
  EXPECT_EQ(resource.committed(), kCapacity / 2);
}

TEST(LimitedResource, RefusalNamesTheSettingAndTheNumbers) {
  LimitedResource resource(host(), 65536, "host_memory");
  resource.commit(65536);
  try {
    resource.commit(65537);
    FAIL() << "no error";
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("host_memory"), std::string::npos) << error.what();
    EXPECT_EQ(error.needed_bytes(), 65537);
    EXPECT_EQ(error.available_bytes(), 0);
  }
  EXPECT_EQ(resource.committed(), 65536);
}

TEST(WrappedResource, TellsWhetherMemoryIsGivenBack) {
  class Keeping final : public WrappedResource {
   public:
    Keeping() : WrappedResource(host()) {}
    bool gives_back() const override { return false; }
  };
  EXPECT_TRUE(StatisticsResource(host()).gives_back());
  EXPECT_FALSE(StatisticsResource(std::make_unique<Keeping>()).gives_back());
}

TEST(StatisticsResource, CountsGrowthsAndKeepsThePeak) {
  StatisticsResource resource(host());
  resource.commit(1);
  resource.commit(1);
  resource.commit(kCapacity);
  EXPECT_EQ(resource.statistics().commits, 2);
  resource.release();
  EXPECT_EQ(resource.statistics().peak_bytes, kCapacity);
  resource.reset();
  EXPECT_EQ(resource.statistics().peak_bytes, 0);
}

TEST(StatisticsResource, MeasuresWhatCallersWaited) {
  using namespace std::chrono_literals;
  StatisticsResource resource(std::make_unique<testing::DelayingResource>(host(), 10ms));
  EXPECT_EQ(resource.statistics().commit_seconds, 0);
  resource.commit(1);
  EXPECT_GE(resource.statistics().commit_seconds, 0.010);
  EXPECT_THROW(resource.commit(kCapacity + 1), OutOfMemory);
  EXPECT_GE(resource.statistics().commit_seconds, 0.020);
  resource.reset();
  EXPECT_EQ(resource.statistics().commit_seconds, 0);
}

TEST(StatisticsResource, CountsFailures) {
  auto control = std::make_shared<testing::FailureSwitch>();
  StatisticsResource resource(std::make_unique<testing::FailingResource>(host(), control));
  control->countdown = 1;
  resource.commit(1);
  EXPECT_THROW(resource.commit(kCapacity), OutOfMemory);
  EXPECT_EQ(resource.statistics().failures, 1);
  EXPECT_EQ(resource.statistics().commits, 1);
  resource.commit(kCapacity);
  EXPECT_EQ(resource.statistics().commits, 2);
}

}  // namespace
}  // namespace oomb::memory
