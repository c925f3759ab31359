#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "memory/slot_pool.h"
#include "paging/call_times.h"
#include "paging/lane.h"

namespace oomb::paging {

struct PageCopy {
  memory::Slot device_slot;
  memory::Slot host_slot;
};

struct TableChange {
  int64_t entry;  // index into the table array, see BlockTables
  int32_t value;
};

// Moves pages between the two tiers. Implementations live in offload/; page managers see this only.
// All calls return without waiting for the work, except where an implementation bounds what is in
// flight, and except wait(kCompute, ...) where compute runs on the caller's thread.
class CopyEngine {
 public:
  CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  virtual ~CopyEngine() = default;

  // The stream that the caller's kernels use from now on.
  virtual void set_compute_stream(void* stream) = 0;

  // kStore copies device to host, kLoad host to device; one ticket for the whole batch.
  virtual Ticket copy(Lane lane, std::span<const PageCopy> pages) = 0;

  // Sets every byte of the slots, in the compute lane.
  virtual Ticket fill(std::span<const memory::Slot> slots, uint8_t value) = 0;

  // Copies memory that kernels see into the slots, one after the other, or back, in the compute
  // lane. `bytes` may end within the last slot.
  virtual Ticket pack(std::span<const memory::Slot> slots, const std::byte* source,
                      int64_t bytes) = 0;
  virtual Ticket unpack(std::span<const memory::Slot> slots, std::byte* target, int64_t bytes) = 0;

  // Where kernels cannot read the tables of the host: a copy of this many entries, all -1, kept up
  // to date in the compute lane by update_tables.
  virtual void reset_tables(int64_t) {}
  virtual const int32_t* device_tables() const { return nullptr; }
  virtual void update_tables(std::span<const TableChange> changes) = 0;

  // A ticket for all compute issued so far.
  virtual Ticket mark_compute() = 0;

  // Later work of `waiter` starts only when `lane` has passed `ticket`.
  virtual void wait(Lane waiter, Lane lane, Ticket ticket) = 0;

  virtual Ticket completed(Lane lane) = 0;

  // Blocks until every lane is empty. Throws Error if that takes too long.
  virtual void drain() = 0;

  // Events made so far; they are reused, so this stays small.
  virtual int64_t events_created() const { return 0; }

  // With the copies and waits that are over by now.
  virtual CallTimes& times() = 0;
};

}  // namespace oomb::paging
