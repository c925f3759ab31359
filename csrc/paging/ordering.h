#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "paging/copy_engine.h"

namespace oomb::paging {

// Every wait that the engine ever needs, one name each. Example, a slot that changes its page:
//
//     compute  ──[ read A ]─┐                                   ┌─[ read B ]
//     store                 └▶[ A → host ]─┐                    │compute_after_load
//     load        store_after_write        └▶[ host → B ]───────┘
//                                 load_after_store
enum class Wait : uint8_t {
  kStoreAfterWrite,     // a page is stored after the kernel that wrote it
  kStoreAfterLoad,      // ... and after a load into its slot that nobody waited for
  kStoreAfterHostRead,  // a host slot is overwritten after the load that still reads it
  kLoadAfterUse,        // a slot is loaded over after the kernels that use its old page
  kLoadAfterStore,      // ... and after the store that still reads its old page
  kLoadAfterHostWrite,  // a host slot is read after the store that fills it
  kComputeAfterLoad,    // a kernel reads a page after its load
  kWriteAfterStore,     // a kernel writes to a slot after the store that still reads it
  kWriteAfterLoad,      // ... and after a load into it that nobody waited for
};
constexpr int kNumWaits = 9;

struct WaitSite {
  const char* name;
  Lane waiter;
  Lane awaited;
};

constexpr std::array<WaitSite, kNumWaits> kWaitSites = {{
    {"store_after_write", Lane::kStore, Lane::kCompute},
    {"store_after_load", Lane::kStore, Lane::kLoad},
    {"store_after_host_read", Lane::kStore, Lane::kLoad},
    {"load_after_use", Lane::kLoad, Lane::kCompute},
    {"load_after_store", Lane::kLoad, Lane::kStore},
    {"load_after_host_write", Lane::kLoad, Lane::kStore},
    {"compute_after_load", Lane::kCompute, Lane::kLoad},
    {"write_after_store", Lane::kCompute, Lane::kStore},
    {"write_after_load", Lane::kCompute, Lane::kLoad},
}};

inline std::optional<Wait> wait_named(std::string_view name) {
  for (size_t i = 0; i < kWaitSites.size(); ++i) {
    if (name == kWaitSites[i].name) return static_cast<Wait>(i);
  }
  return std::nullopt;
}

// Collects what a batch of work must wait for and issues one wait per pair of lanes at most.
class Ordering {
 public:
  // `disabled` leaves one wait out; only tests do that, to prove that they would notice.
  Ordering(CopyEngine& engine, std::optional<Wait> disabled)
      : engine_(engine), disabled_(disabled) {}

  void need(Wait wait, Ticket ticket) {
    Ticket& pending = pending_[static_cast<size_t>(wait)];
    pending = std::max(pending, ticket);
  }

  // Issues what is needed by the next work of this lane.
  void issue(Lane waiter) {
    for (size_t i = 0; i < kWaitSites.size(); ++i) {
      if (kWaitSites[i].waiter != waiter) continue;
      const Ticket ticket = std::exchange(pending_[i], 0);
      if (disabled_ && static_cast<size_t>(*disabled_) == i) continue;
      Ticket& waited = waited_[index(waiter)][index(kWaitSites[i].awaited)];
      if (ticket <= waited) continue;
      engine_.wait(waiter, kWaitSites[i].awaited, ticket);
      waited = ticket;
    }
  }

  // Forgets needs collected for work that was not issued.
  void cancel() { pending_.fill(0); }

 private:
  static constexpr size_t index(Lane lane) { return static_cast<size_t>(lane); }

  CopyEngine& engine_;
  std::optional<Wait> disabled_;
  std::array<Ticket, kNumWaits> pending_{};
  std::array<std::array<Ticket, kNumLanes>, kNumLanes> waited_{};
};

}  // namespace oomb::paging
