#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "memory/host_resource.h"
#include "memory/limited_resource.h"
#include "memory/statistics_resource.h"
#include "paging/page_manager.h"
#include "support/failing_resource.h"

namespace oomb::testing {

struct TestTiersOptions {
  int64_t slot_bytes = 64;
  int64_t device_slots = 16;
  int64_t host_slots = 1024;
  std::optional<uint64_t> shuffle_seed = std::nullopt;
  int64_t step_slots = 1;  // slots that become usable at a time
  paging::PageManagerOptions manager = {};
};

// Makes the engine once the pools exist.
using EngineFactory = std::function<std::unique_ptr<paging::CopyEngine>(
    std::byte* device, std::byte* host, int64_t slot_bytes)>;

// Two tiers of ordinary memory whose growth can be made to fail, and a page manager over them.
struct TestTiers {
  TestTiers(const TestTiersOptions& options, const EngineFactory& make_engine) {
    auto device = pool(options, options.device_slots, "device_memory",
                       memory::SlotOrder::kFreedFirst, device_failures);
    auto host =
        pool(options, options.host_slots, "host_memory", memory::SlotOrder::kRound, host_failures);
    auto made = make_engine(device.pool->base(), host.pool->base(), options.slot_bytes);
    engine = made.get();
    manager = std::make_unique<paging::PageManager>(std::move(device), std::move(host),
                                                    std::move(made), options.manager);
  }

  std::shared_ptr<FailureSwitch> device_failures = std::make_shared<FailureSwitch>();
  std::shared_ptr<FailureSwitch> host_failures = std::make_shared<FailureSwitch>();
  paging::CopyEngine* engine = nullptr;
  std::unique_ptr<paging::PageManager> manager;

 private:
  // Grows by exactly what it is asked for, so that failures can be met slot by slot.
  class ExactResource final : public memory::WrappedResource {
   public:
    using WrappedResource::WrappedResource;
    int64_t committed() const override { return committed_; }
    void commit(int64_t bytes) override {
      WrappedResource::commit(bytes);
      committed_ = std::max(committed_, bytes);
    }
    void release() override {
      WrappedResource::release();
      committed_ = 0;
    }

   private:
    int64_t committed_ = 0;
  };

  static paging::TierPool pool(const TestTiersOptions& options, int64_t slots, const char* setting,
                               memory::SlotOrder order,
                               const std::shared_ptr<FailureSwitch>& failures) {
    const int64_t bytes = slots * options.slot_bytes;
    auto counted = std::make_unique<memory::StatisticsResource>(std::make_unique<FailingResource>(
        std::make_unique<memory::LimitedResource>(
            std::make_unique<ExactResource>(std::make_unique<memory::HostResource>(bytes)), bytes,
            setting),
        failures));
    paging::TierPool tier;
    tier.resource = counted.get();
    tier.pool = std::make_unique<memory::SlotPool>(
        std::move(counted),
        memory::SlotPoolOptions{.slot_bytes = options.slot_bytes,
                                .max_slots = slots,
                                .step_bytes = options.step_slots * options.slot_bytes,
                                .order = order,
                                .shuffle_seed = options.shuffle_seed});
    return tier;
  }
};

}  // namespace oomb::testing
