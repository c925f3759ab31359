#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>

#include "offload/worker_lane.h"
#include "paging/copy_engine.h"

namespace oomb::offload {

struct HostCopyOptions {
  std::byte* device_base = nullptr;  // of the tier that plays the device
  std::byte* host_base = nullptr;
  int64_t slot_bytes = 0;
  std::optional<uint64_t> delay_seed = std::nullopt;  // copies dawdle at random (tests)
  int64_t max_delay_us = 200;
  bool dry = false;  // no byte is moved or set: to see what the page manager would do
  // false: compute runs on the caller's thread, where waiting blocks the caller. true (tests): it
  // is a thread too, fed through enqueue_compute, so that every wait can be missed.
  bool asynchronous_compute = false;
  double timeout_seconds = 60;
};

// The copy engine of a machine without a GPU: both tiers are ordinary memory, copies run on two
// threads.
class HostCopyEngine final : public paging::CopyEngine {
 public:
  explicit HostCopyEngine(const HostCopyOptions& options);
  ~HostCopyEngine() override;

  void set_compute_stream(void*) override {}
  paging::Ticket copy(paging::Lane lane, std::span<const paging::PageCopy> pages) override;
  paging::Ticket fill(std::span<const memory::Slot> slots, uint8_t value) override;
  paging::Ticket pack(std::span<const memory::Slot> slots, const std::byte* source,
                      int64_t bytes) override;
  paging::Ticket unpack(std::span<const memory::Slot> slots, std::byte* target,
                        int64_t bytes) override;
  void update_tables(std::span<const paging::TableChange>) override {}
  paging::Ticket mark_compute() override;
  void wait(paging::Lane waiter, paging::Lane lane, paging::Ticket ticket) override;
  paging::Ticket completed(paging::Lane lane) override;
  void drain() override;
  paging::CallTimes& times() override { return times_; }

  void enqueue_compute(std::function<void()> task);

 private:
  WorkerLane& lane(paging::Lane lane) { return lanes_[static_cast<size_t>(lane)]; }
  bool on_caller(paging::Lane lane) const {
    return lane == paging::Lane::kCompute && !options_.asynchronous_compute;
  }
  // Work of the compute lane.
  paging::Ticket compute(std::function<void()> task);
  void block_on(paging::Lane awaited, paging::Ticket ticket);

  HostCopyOptions options_;
  std::mt19937_64 random_;
  paging::Ticket compute_ticket_ = 0;  // of compute on the caller's thread: done when issued
  paging::CallTimes times_;
  std::array<WorkerLane, paging::kNumLanes> lanes_;
};

}  // namespace oomb::offload
