#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "common/error.h"
#include "paging/copy_engine.h"

namespace oomb::testing {

// Copies at once on the caller's thread and remembers what it copied: for tests of policy, where
// ordering does not matter.
class InstantCopyEngine final : public paging::CopyEngine {
 public:
  InstantCopyEngine(std::byte* device, std::byte* host, int64_t slot_bytes)
      : device_(device), host_(host), slot_bytes_(slot_bytes) {}

  void set_compute_stream(void*) override {}

  paging::Ticket copy(paging::Lane lane, std::span<const paging::PageCopy> pages) override {
    for (const paging::PageCopy& page : pages) {
      std::byte* device = device_ + page.device_slot * slot_bytes_;
      std::byte* host = host_ + page.host_slot * slot_bytes_;
      const bool store = lane == paging::Lane::kStore;
      std::memcpy(store ? host : device, store ? device : host, static_cast<size_t>(slot_bytes_));
    }
    batches.push_back({lane, static_cast<int64_t>(pages.size())});
    return ++tickets_[static_cast<size_t>(lane)];
  }

  paging::Ticket fill(std::span<const memory::Slot> slots, uint8_t value) override {
    for (const memory::Slot slot : slots) {
      std::memset(device_ + slot * slot_bytes_, value, static_cast<size_t>(slot_bytes_));
    }
    return mark_compute();
  }
  paging::Ticket pack(std::span<const memory::Slot> slots, const std::byte* source,
                      int64_t bytes) override {
    for_each_piece(slots, bytes, [&](std::byte* slot, int64_t from, size_t size) {
      std::memcpy(slot, source + from, size);
    });
    return mark_compute();
  }
  paging::Ticket unpack(std::span<const memory::Slot> slots, std::byte* target,
                        int64_t bytes) override {
    for_each_piece(slots, bytes, [&](std::byte* slot, int64_t to, size_t size) {
      std::memcpy(target + to, slot, size);
    });
    return mark_compute();
  }
  void update_tables(std::span<const paging::TableChange> changes) override {
    if (refusing) throw CudaError("injected failure");
    for (const paging::TableChange& change : changes) {
      if (table.size() <= static_cast<size_t>(change.entry)) {
        table.resize(static_cast<size_t>(change.entry) + 1, -1);
      }
      table[static_cast<size_t>(change.entry)] = change.value;
    }
  }
  paging::Ticket mark_compute() override { return ++tickets_[0]; }
  // Every wait of compute is told to have lasted a second.
  void wait(paging::Lane waiter, paging::Lane awaited, paging::Ticket) override {
    if (waiter == paging::Lane::kCompute) times_.add_wait(times_.label(awaited), 1.0);
  }
  paging::Ticket completed(paging::Lane lane) override {
    return finishing ? tickets_[static_cast<size_t>(lane)] : 0;
  }
  void drain() override {
    if (stuck) throw Error("injected: a copy has not finished");
  }
  paging::CallTimes& times() override { return times_; }

  struct Batch {
    paging::Lane lane;
    int64_t pages;
  };
  std::vector<Batch> batches;
  bool finishing = true;       // false: completed() knows of nothing
  bool refusing = false;       // true: tables cannot be changed
  bool stuck = false;          // true: copies never end
  std::vector<int32_t> table;  // what kernels would read, built from the changes alone

 private:
  template <typename Copy>
  void for_each_piece(std::span<const memory::Slot> slots, int64_t bytes, Copy copy) {
    int64_t done = 0;
    for (const memory::Slot slot : slots) {
      const int64_t size = std::min(slot_bytes_, bytes - done);
      copy(device_ + slot * slot_bytes_, done, static_cast<size_t>(size));
      done += size;
    }
  }

  std::byte* device_;
  std::byte* host_;
  int64_t slot_bytes_;
  paging::CallTimes times_;
  std::array<paging::Ticket, paging::kNumLanes> tickets_{};
};

}  // namespace oomb::testing
