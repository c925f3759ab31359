#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/slot_pool.h"
#include "memory/statistics_resource.h"
#include "paging/call_plan.h"
#include "paging/copy_engine.h"
#include "paging/page_space.h"
#include "paging/prefetcher.h"
#include "paging/schedule.h"
#include "paging/tiers.h"

namespace oomb::paging {

// One tier's slots, and the counts of the resource they are carved from.
struct TierPool {
  std::unique_ptr<memory::SlotPool> pool;
  memory::StatisticsResource* resource = nullptr;  // inside the pool
};

struct PageManagerOptions {
  std::optional<Wait> disabled_wait = std::nullopt;  // tests only
  bool poison = false;                               // fill freed slots with NaN
  bool keep_host_memory = false;  // between calls; pinned memory is slow to get back
};

struct PageStatistics {
  int64_t device_peak_bytes = 0;
  int64_t host_peak_bytes = 0;
  int64_t h2d_bytes = 0;
  int64_t d2h_bytes = 0;
  double h2d_seconds = 0;  // while loads ran, without what they waited for; 0: not measured
  double d2h_seconds = 0;
  int64_t loaded_runs = 0;  // stretches of host slots of all batches, see host_runs()
  int64_t stored_runs = 0;
  int64_t hits = 0;     // pages found on the device, or on their way, when acquired
  int64_t misses = 0;   // pages that had to be loaded on the spot
  int64_t gathers = 0;  // times that a visit's pages were looked up
  double exposed_copy_seconds = 0;
  double exposed_growth_seconds = 0;   // the caller waited for memory of the host tier
  memory::SlotPoolState device, host;  // now
};

// Keeps the pages of a call where they are needed. Used from one thread.
//
//     begin_call ─▶ create, commit              a chunk's KV pages are written
//                 ─▶ write_output               attention's output of a chunk is kept
//                 ─▶ waves; acquire, release    pages of one visit, wave by wave
//                 ─▶ waves; read_output         a kept output comes back, and is dead
//                 ─▶ acquire_gradients, drop    a chunk's gradients are read, its pages die
//                ─▶ end_call
class PageManager {
 public:
  PageManager(TierPool device, TierPool host, std::unique_ptr<CopyEngine> engine,
              const PageManagerOptions& options);
  ~PageManager();

  // The smallest device tier, in slots, with which a call can run at all: the pages of one wave, of
  // every sequence, with their gradients.
  static int64_t smallest_device_slots(int64_t batch, int64_t grad_slots, bool backward,
                                       int64_t wave_pages = 1);

  void begin_call(CallPlan plan);
  // What the visit reads, as positions (sequence * max_pages + page). Until then, and for visits
  // that never get a list, it is every page of the visit's range. Not while some of it is acquired.
  void set_visit_pages(int32_t visit, std::vector<int64_t> positions);
  void end_call();
  // Again, where copies had not ended in time.
  void close();

  // How many logical pages fit at once, on top of what is acquired now. At least 1: where not even
  // that fits, asking for it says why.
  int64_t max_create() const;
  int64_t max_gradients() const;
  int64_t max_outputs() const;  // pieces of kept outputs

  void create(int32_t layer, int64_t begin, int64_t end, void* stream);
  void commit(int32_t layer, int64_t begin, int64_t end, void* stream);
  void create_gradients(int32_t layer, int64_t begin, int64_t end);

  // Cuts the visit's range into waves [begin, end), each of which can be acquired at once.
  std::vector<std::pair<int64_t, int64_t>> waves(int32_t visit);
  // Whether the chunk's own keys shall have a launch of their own in front of the visit's first
  // wave, before it is acquired: where a page of it was not foreseen, so that its load has not been
  // issued. Elsewhere that would cost more than it hides: launches write and read the state that
  // passes between them.
  bool own_alone(int32_t visit, int64_t begin, int64_t end);
  void acquire(int32_t visit, int64_t begin, int64_t end, void* stream);
  void release(int32_t visit, int64_t begin, int64_t end, void* stream);

  // Keeps `bytes` bytes as the pieces [begin, end) of a layer's outputs, or gives back those of a
  // visit. Kernels see `source` and `target`; in between, the compute stream copies.
  void write_output(int32_t layer, int64_t begin, int64_t end, const std::byte* source,
                    int64_t bytes, void* stream);
  void read_output(int32_t visit, int64_t begin, int64_t end, std::byte* target, int64_t bytes,
                   void* stream);

  void acquire_gradients(int32_t layer, int64_t begin, int64_t end, void* stream);
  void drop(int32_t layer, int64_t begin, int64_t end, bool kv, bool grads, void* stream);

  std::byte* pool_address() const { return device_.pool->base(); }
  int64_t slot_bytes() const { return device_.pool->slot_bytes(); }
  // Most slots that a call may have on the device, and those that the latest may.
  int64_t device_capacity() const { return device_.pool->capacity(); }
  int64_t device_slots() const { return device_.pool->max_slots(); }
  // Fewer than device_slots() where the device has refused to give them all: the tier goes on with
  // what it has got.
  int64_t usable_slots() const { return device_.pool->usable_slots(); }
  int64_t mapped_device_slots() const { return device_.pool->mapped_slots(); }
  // Between calls too, where the device cannot map memory: until the manager goes.
  bool keeps_device_memory() const { return !device_.resource->gives_back(); }
  const PageSpace& space() const { return space_; }
  const BlockTables& tables() { return tiers_.tables(); }
  // The tables where kernels read them; null: at tables().entries().
  const int32_t* device_tables() const { return engine_->device_tables(); }

  PageStatistics statistics() const;
  const CallTimes& times() const { return engine_->times(); }
  std::string snapshot() const;
  void check_integrity() const;

 private:
  std::span<const PageIndex> gathered(int32_t visit, int64_t begin, int64_t end);
  bool holds_pages(int32_t visit);
  int64_t slots_not_on_device(std::span<const PageIndex> pages) const;
  void check_call() const;
  void check_visit(int32_t visit) const;
  void check_range(int32_t layer, int64_t begin, int64_t end) const;
  void check_outputs(int32_t layer, int64_t begin, int64_t end, int64_t bytes) const;
  std::vector<memory::Slot> slots_of_outputs(int32_t layer, int64_t begin, int64_t end) const;
  void use(void* stream);
  void advance(int32_t visit);
  void acquire_pages(std::span<const PageIndex> pages, bool will_write);
  bool find_room(int64_t slots);
  void require_room(int64_t slots);
  void prefetch(int64_t page);
  void store_ahead();
  void prepare_host();
  [[noreturn]] void throw_out_of_memory(int64_t slots) const;

  TierPool device_;
  TierPool host_;
  std::unique_ptr<CopyEngine> engine_;
  PageManagerOptions options_;
  Tiers tiers_;

  bool active_ = false;
  bool closed_ = false;
  PageSpace space_;
  Schedule schedule_;
  Prefetcher prefetcher_{tiers_};
  int grad_slots_ = 1;
  int64_t smallest_slots_ = 0;
  int64_t wave_pages_ = 1;
  int64_t total_slots_ = 0;   // if every page that may exist did; without dropped gradients
  int64_t create_slots_ = 0;  // most slots that one create has taken

  int32_t now_ = 0;  // the visit under way
  int64_t hits_ = 0;
  int64_t misses_ = 0;
  int64_t gathers_ = 0;
  // What a visit was found to touch of pages [begin, end); no visit where it may be others by now.
  struct Held {
    int32_t visit = -1;
    int64_t begin = 0;
    int64_t end = 0;
    std::vector<PageIndex> pages;
  } held_;
  std::unordered_map<int32_t, int64_t> acquired_;  // pages of visits, less those released
  std::vector<PageIndex> own_, missing_, fresh_, pinned_;
};

}  // namespace oomb::paging
