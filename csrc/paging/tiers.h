#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/slot_pool.h"
#include "paging/block_tables.h"
#include "paging/copy_engine.h"
#include "paging/ordering.h"
#include "paging/page_space.h"
#include "paging/residency.h"
#include "paging/schedule.h"
#include "paging/transition_log.h"
#include "paging/victim_queue.h"

namespace oomb::paging {

// One page of one kind: its state, who holds it in place, and its slots in both tiers (a gradient
// page may need two of each).
struct PageRecord {
  Residency state = Residency::kFree;
  bool wanted = false;  // gradient page: takes part in the call, zero until first touched
  bool ahead = false;   // loaded before it was asked for, and not asked for yet
  uint16_t pins = 0;    // acquired this many times: must stay where it is
  int32_t used = -1;    // the latest visit that released it
  int32_t due = 0;  // in the queue of victims: the visit that needs it, if not the one it is under
  std::array<memory::Slot, 2> device = {memory::kNoSlot, memory::kNoSlot};
  std::array<memory::Slot, 2> host = {memory::kNoSlot, memory::kNoSlot};

  bool on_device() const { return device[0] != memory::kNoSlot; }
  bool on_host() const { return host[0] != memory::kNoSlot; }
};

struct TrafficStatistics {
  int64_t stored_pages = 0;
  int64_t loaded_pages = 0;
  int64_t stored_slots = 0;
  int64_t loaded_slots = 0;
  int64_t stored_runs = 0;  // see host_runs()
  int64_t loaded_runs = 0;
};

// All pages of a call in their two tiers: who owns which slot, what state each page is in, what
// copies are on their way, and which waits keep them from treading on each other. Policy (what to
// load when) is PageManager's; the order of eviction comes from the schedule.
class Tiers {
 public:
  Tiers(memory::SlotPool& device, memory::SlotPool& host, CopyEngine& engine,
        std::optional<Wait> disabled_wait, bool poison);

  // `exact`: visits without a list use all of their ranges.
  void begin(const PageSpace& space, const Schedule& schedule, int grad_slots, bool exact);
  // Every page dies. Copies on their way are waited for; where that fails their memory stays, as
  // they may still read and write it, until they are over or the engine is gone.
  void end(bool release_host);
  bool is_stuck() const { return is_stuck_; }

  const PageRecord& operator[](PageIndex index) const { return records_[at(index)]; }
  int64_t slots_of(PageIndex index) const { return is_gradient(index) ? grad_slots_ : 1; }
  bool is_gradient(PageIndex index) const { return space_->kind(index) == PageKind::kGradient; }
  void want(PageIndex index) { records_[at(index)].wanted = true; }

  // A pinned page is never evicted. Pinning hands the page to compute: before its kernels run they
  // wait (order_compute) for the page's load, and for its store if they are going to change it.
  void pin(PageIndex index, bool will_write);
  // `use` covers the kernels that used the page; `written`: they changed it. `now` is the visit
  // that is over for this page.
  void unpin(PageIndex index, Ticket use, bool written, int32_t now);
  // Before many pages are unpinned or dropped: all of them or none.
  void require_pinned(PageIndex index) const;
  void require_unpinned(PageIndex index, int but = 0) const;
  // Takes back a pin that no kernel has used.
  void cancel_pin(PageIndex index, int32_t now);

  // Gives pages that are nowhere their slots: new ones, with undefined bytes or zeroed.
  void create(std::span<const PageIndex> pages, bool zeroed);
  // Starts loading host-only pages, on demand or ahead of it. The slots they need must be
  // available.
  void load(std::span<const PageIndex> pages, int32_t now, bool ahead);

  // The visit under way: what it and the one before it have released may still be in use.
  void enter(int32_t visit) { now_ = visit; }
  // Evicts until `slots` device slots are available. All or nothing; when it fails host_error() has
  // an error of the host tier, if one was met.
  bool make_room(int64_t slots);
  // Evicts pages needed later than `visit`, as far as there are. Returns how many of `slots` are
  // available then.
  int64_t make_room_ahead(int64_t slots, int32_t visit);
  const std::string& host_error() const { return host_error_; }

  // Starts storing the likeliest victims, as far as `slots` slots, so that taking them will be
  // free.
  void store_ahead(int64_t slots);

  // Kills a page in any state.
  void drop(PageIndex index);

  // Files the page under its next use after `now` (it was under a visit that is over, or that
  // turned out not to touch it).
  void requeue(PageIndex index, int32_t now);
  // Files the KV pages under `visit` under `heir`, all but those that the visit's list names.
  void requeue_unlisted(int32_t visit, int32_t heir);
  // Pages filed under a visit.
  std::vector<PageIndex> filed_under(int32_t visit) const;
  // The visit of the nearest page in the queue, -1 if there is none.
  int32_t nearest_visit() const;

  // Issues the waits that compute needs, and table changes.
  void order_compute();
  // Notices copies that have finished.
  void poll();

  // Lets the device tier grow, if it can, until so many slots are free; usable_slots() is less than
  // its cap once it could not.
  void reserve(int64_t slots, memory::SlotPool::Growth growth) { device_.reserve(slots, growth); }
  int64_t max_slots() const { return device_.max_slots(); }
  int64_t slot_bytes() const { return device_.slot_bytes(); }
  int64_t usable_slots() const { return device_.usable_slots(); }
  int64_t available_slots() const { return device_.available_slots(); }
  int64_t pinned_slots() const { return pinned_slots_; }
  int64_t ahead_slots() const { return ahead_slots_; }
  int64_t in_flight_loads() const { return static_cast<int64_t>(loads_.size()); }
  int64_t in_flight_stores() const { return static_cast<int64_t>(stores_.size()); }
  const TrafficStatistics& traffic() const { return traffic_; }
  BlockTables& tables() { return tables_; }
  const TransitionLog& log() const { return log_; }

  // Throws Error with everything that does not add up.
  void check_integrity() const;

 private:
  struct DeviceSlotUse {
    Ticket use = 0;    // last kernel
    Ticket store = 0;  // last copy out of it
    Ticket load = 0;   // last copy into it
  };
  struct HostSlotUse {
    Ticket store = 0;
    Ticket load = 0;
  };
  struct InFlight {
    PageIndex index;
    Ticket ticket;
  };

  static size_t at(int64_t index) { return static_cast<size_t>(index); }
  void move(PageIndex index, Residency to);
  int32_t next_use(PageIndex index, int32_t now) const;
  int32_t filed(PageIndex index, int32_t now, int32_t next) const;
  static int32_t key_at(int32_t visit, PageKind kind);
  void enqueue(PageIndex index, int32_t now);
  std::vector<memory::Slot> take_device_slots(int64_t count);
  bool take_host_slots(PageIndex index);
  void need_for_write(memory::Slot slot);
  template <typename Issue>
  void in_batches(std::span<const PageIndex> pages, Issue issue);
  void load_batch(std::span<const PageIndex> pages, int32_t now, bool ahead);
  void store(std::span<const PageIndex> pages);
  void store_batch(std::span<const PageIndex> pages);
  bool choose_victims(int64_t slots, int32_t visit);
  // Pages in use leave their places on the host, if they have any, to pages that have to go there.
  bool give_up_copies();
  void evict_chosen();
  void evict(PageIndex index);
  void clear_ahead(PageIndex index);
  void free_device_slots(PageIndex index);
  void free_host_slots(PageIndex index);

  memory::SlotPool& device_;
  memory::SlotPool& host_;
  CopyEngine& engine_;
  Ordering ordering_;
  bool poison_;
  bool is_stuck_ = false;  // copies of an earlier call may still be on their way

  const PageSpace* space_ = nullptr;
  const Schedule* schedule_ = nullptr;
  int grad_slots_ = 1;
  bool exact_ = true;
  int32_t now_ = -1;
  std::vector<PageRecord> records_;
  std::vector<PageIndex> owner_;  // per device slot
  std::vector<DeviceSlotUse> device_use_;
  std::vector<HostSlotUse> host_use_;
  VictimQueue victims_;
  BlockTables tables_;
  std::deque<InFlight> loads_, stores_;
  std::vector<PageIndex> chosen_, dirty_;
  int64_t pinned_slots_ = 0;
  int64_t ahead_slots_ = 0;
  TrafficStatistics traffic_;
  TransitionLog log_;
  std::string host_error_;
};

}  // namespace oomb::paging
