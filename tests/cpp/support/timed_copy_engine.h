#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "paging/copy_engine.h"

namespace oomb::testing {

struct CopyCosts {
  double slot_seconds = 5.6e-6;    // 256 KiB at 47 GB/s: each way while both ways are busy
  double batch_seconds = 20e-6;    // until a batch's first byte moves
  double issue_seconds = 10e-6;    // of the host, per batch
  double record_seconds = 1e-6;    // of the host, per slot of a batch
  double filled_seconds = 0.1e-6;  // of compute, per slot set to zero
};

// Moves nothing, in virtual time. The host issues work; each lane runs its own in order, as early
// as the host's issue and the waits between lanes allow:
//
//     host     issue issue issue
//     load     [ batch 1 ][ batch 2 ]
//     compute  [ kernel ]..[ kernel ]      .. exposed: compute waited for batch 1
//     store              [ batch ]         it waited for the first kernel
//
// Nothing depends on the machine's own clock, so results are the same everywhere.
class TimedCopyEngine final : public paging::CopyEngine {
 public:
  explicit TimedCopyEngine(const CopyCosts& costs = {}) : costs_(costs) {}

  void set_compute_stream(void*) override {}

  paging::Ticket copy(paging::Lane lane, std::span<const paging::PageCopy> pages) override {
    const auto slots = static_cast<double>(pages.size());
    host_ += costs_.issue_seconds + costs_.record_seconds * slots;
    const double seconds = costs_.batch_seconds + costs_.slot_seconds * slots;
    times_.add_copy(lane, seconds);
    return run(lane, seconds);
  }

  paging::Ticket fill(std::span<const memory::Slot> slots, uint8_t) override {
    compute(costs_.filled_seconds * static_cast<double>(slots.size()));
    return mark_compute();
  }

  paging::Ticket pack(std::span<const memory::Slot> slots, const std::byte*, int64_t) override {
    return fill(slots, 0);
  }
  paging::Ticket unpack(std::span<const memory::Slot> slots, std::byte*, int64_t) override {
    return fill(slots, 0);
  }
  void update_tables(std::span<const paging::TableChange>) override {}
  paging::Ticket mark_compute() override { return run(paging::Lane::kCompute, 0); }

  void wait(paging::Lane waiter, paging::Lane lane, paging::Ticket ticket) override {
    const double until = of(lane).ends[static_cast<size_t>(ticket)];
    double& free = of(waiter).free;
    if (waiter == paging::Lane::kCompute) {
      times_.add_wait(times_.label(lane), std::max(0.0, until - std::max(free, host_)));
    }
    free = std::max(free, until);
  }

  paging::Ticket completed(paging::Lane lane) override {
    const std::vector<double>& ends = of(lane).ends;
    return std::upper_bound(ends.begin(), ends.end(), host_) - ends.begin() - 1;
  }

  void drain() override {
    for (const Timeline& lane : lanes_) host_ = std::max(host_, lane.free);
  }
  paging::CallTimes& times() override { return times_; }

  // Issues a kernel.
  void compute(double seconds) { run(paging::Lane::kCompute, seconds); }
  // The host is busy with something else.
  void spend_on_host(double seconds) { host_ += seconds; }
  void let_host_wait_until(double time) { host_ = std::max(host_, time); }

  // When everything issued to compute will have run.
  double compute_end() const { return of(paging::Lane::kCompute).free; }

 private:
  struct Timeline {
    double free = 0;                   // when the lane can start what comes next
    std::vector<double> ends = {0.0};  // per ticket
  };

  Timeline& of(paging::Lane lane) { return lanes_[static_cast<size_t>(lane)]; }
  const Timeline& of(paging::Lane lane) const { return lanes_[static_cast<size_t>(lane)]; }

  paging::Ticket run(paging::Lane lane, double seconds) {
    Timeline& timeline = of(lane);
    timeline.free = std::max(timeline.free, host_) + seconds;
    timeline.ends.push_back(timeline.free);
    return static_cast<paging::Ticket>(timeline.ends.size()) - 1;
  }

  CopyCosts costs_;
  double host_ = 0;  // the host's own clock
  paging::CallTimes times_;
  std::array<Timeline, paging::kNumLanes> lanes_;
};

}  // namespace oomb::testing
