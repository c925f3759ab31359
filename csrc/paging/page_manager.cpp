#include "paging/page_manager.h"

#include <algorithm>

#include "common/bytes.h"
#include "common/checked.h"
#include "common/error.h"
#include "memory/head_room.h"

namespace oomb::paging {

PageManager::PageManager(TierPool device, TierPool host, std::unique_ptr<CopyEngine> engine,
                         const PageManagerOptions& options)
    : device_(std::move(device)),
      host_(std::move(host)),
      engine_(std::move(engine)),
      options_(options),
      tiers_(*device_.pool, *host_.pool, *engine_, options.disabled_wait, options.poison) {}

PageManager::~PageManager() {
  try {
    close();
  } catch (...) {
    // The copy engine has failed before and said so; its memory goes with it.
  }
}

int64_t PageManager::smallest_device_slots(int64_t batch, int64_t grad_slots, bool backward,
                                           int64_t wave_pages) {
  expect(batch >= 0, "batch", "0 or more sequences", batch);
  expect(grad_slots >= 0 && grad_slots <= 2, "grad_slots", "0 to 2", grad_slots);
  expect(wave_pages > 0, "wave_pages", "at least 1", wave_pages);
  return checked_product("wave_pages", wave_pages, batch, backward ? 1 + grad_slots : 1);
}

namespace {

// What a call's tables, lists and records take at its start, whatever of it is used.
int64_t bookkeeping_bytes(const PageSpace& space, int64_t slots) {
  constexpr int64_t kPage = 2 * sizeof(PageRecord) + 3 * sizeof(int32_t);
  constexpr int64_t kOutput = sizeof(PageRecord) + sizeof(int32_t);
  constexpr int64_t kLayer = 512, kSlot = 64;
  return checked_product("pages_per_sequence", space.num_layers(), space.positions(), kPage) +
         checked_product("outputs", space.num_layers(), space.outputs(), kOutput) +
         kLayer * space.num_layers() + kSlot * slots;
}

// Such a table is not worth a look at the machine's memory.
constexpr int64_t kSmallTables = 256 * kMiB;

void require_bookkeeping(int64_t bytes, const PageSpace& space) {
  if (bytes <= kSmallTables) return;
  const int64_t available = memory::read_head_room().available;
  if (bytes <= available) return;
  throw OutOfMemory(
      concat("tables of the call's pages: needed ", human_bytes(bytes), " (", bytes, " bytes) for ",
             space.num_layers(), " layers of ", space.positions(), " pages and ", space.outputs(),
             " pieces of outputs, the machine has ", human_bytes(available),
             " available; raise page_size or lower the number of tokens"),
      bytes, available);
}

}  // namespace

void PageManager::begin_call(CallPlan plan) {
  if (closed_) throw Error("the page manager is closed");
  if (active_) throw Error("the page manager is in use: another call has begun and not ended");
  plan.check();
  const int64_t cap = plan.device_slots.value_or(device_capacity());
  expect(cap >= 0 && cap <= device_capacity(), "device_slots", concat("0 .. ", device_capacity()),
         cap);
  const bool backward = plan.has_gradients();
  const int64_t outputs = plan.kept_outputs();
  PageSpace space(plan.num_layers, std::move(plan.pages_per_sequence), plan.outputs);
  require_bookkeeping(bookkeeping_bytes(space, cap), space);
  const int64_t smallest =
      smallest_device_slots(space.batch(), plan.grad_slots, backward, plan.wave_pages);
  expect(smallest <= memory::kMostSlots, "wave_pages",
         concat("waves of at most ", memory::kMostSlots, " slots"), smallest);
  space_ = std::move(space);
  schedule_ = {};  // before the next one takes its memory
  schedule_ = Schedule(space_, std::move(plan.visits));
  grad_slots_ = plan.grad_slots;
  wave_pages_ = plan.wave_pages;
  device_.pool->set_max_slots(cap);
  smallest_slots_ = smallest;
  if (cap < smallest_slots_) throw_out_of_memory(smallest_slots_);
  total_slots_ = outputs + schedule_.pages_read();
  create_slots_ = 0;
  now_ = -1;
  hits_ = misses_ = gathers_ = 0;
  held_ = {};
  acquired_.clear();
  device_.resource->reset();
  host_.resource->reset();
  engine_->times().begin(schedule_.size());
  tiers_.begin(space_, schedule_, grad_slots_, plan.exact);
  prefetcher_.begin(space_, schedule_, smallest_slots_, plan.exact);
  engine_->reset_tables(tiers_.tables().size());
  prepare_host();
  active_ = true;
}

// What cannot fit the device will go to the host: let slow memory be got ahead of its use.
void PageManager::prepare_host() {
  const int64_t spilled = std::min(total_slots_ - device_slots(), host_.pool->max_slots());
  if (spilled > 0) host_.resource->prepare(spilled * slot_bytes());
}

void PageManager::end_call() {
  if (!active_) return;
  active_ = false;
  host_.resource->prepare(0);  // an interrupted call may have foreseen more
  tiers_.end(!options_.keep_host_memory);
  schedule_ = {};
}

void PageManager::close() {
  if (closed_ && !tiers_.is_stuck()) return;
  closed_ = true;
  if (active_) {
    end_call();
  } else if (tiers_.is_stuck()) {
    tiers_.end(true);
  }
  host_.pool->reset();
}

// --- What a call names --------------------------------------------------------------------------

void PageManager::check_call() const {
  if (closed_) throw Error("the page manager is closed");
  if (!active_) throw Error("no call has begun on this page manager");
}

void PageManager::check_visit(int32_t visit) const {
  check_call();
  expect(visit >= 0 && visit < schedule_.size(), "visit", concat("0 .. ", schedule_.size() - 1),
         visit);
}

void PageManager::check_range(int32_t layer, int64_t begin, int64_t end) const {
  check_call();
  expect(layer >= 0 && layer < space_.num_layers(), "layer",
         concat("0 .. ", space_.num_layers() - 1), layer);
  expect(0 <= begin && begin <= end && end <= space_.max_pages(), "pages",
         concat("a range within 0 .. ", space_.max_pages()), concat(begin, " .. ", end));
}

void PageManager::set_visit_pages(int32_t visit, std::vector<int64_t> positions) {
  check_visit(visit);
  expect(schedule_[visit].kind != VisitKind::kReadOutput, "visit", "one that reads pages", visit);
  expect(!holds_pages(visit), "visit", "one whose pages are released", visit);
  // Made once: for each of a list's pages it would take longer than all the rest.
  const std::string known = concat("sequence * max_pages + page below ", space_.positions());
  for (const int64_t position : positions) {
    expect(position >= 0 && position < space_.positions(), "pages", known, position);
  }
  const bool first_list = !schedule_.has_pages(visit);
  held_.visit = -1;
  schedule_.set_pages(visit, std::move(positions));
  // Pages that were expected there and are not will be needed later than thought. In a fill that is
  // most of the past, at each list: one by one they would take longer than the chunk's kernels.
  if (const int32_t heir = schedule_.heir(visit);
      heir >= 0 && first_list && schedule_[visit].kind == VisitKind::kRead) {
    tiers_.requeue_unlisted(visit, heir);
    return;
  }
  for (const PageIndex index : tiers_.filed_under(visit)) tiers_.requeue(index, visit - 1);
}

// --- Chunks -------------------------------------------------------------------------------------

void PageManager::use(void* stream) { engine_->set_compute_stream(stream); }

int64_t PageManager::max_create() const {
  check_call();
  return std::max<int64_t>(1, (usable_slots() - tiers_.pinned_slots()) / space_.batch());
}

int64_t PageManager::max_gradients() const {
  check_call();
  return std::max<int64_t>(
      1, (usable_slots() - tiers_.pinned_slots()) / (space_.batch() * grad_slots_));
}

void PageManager::create(int32_t layer, int64_t begin, int64_t end, void* stream) {
  check_range(layer, begin, end);
  use(stream);
  tiers_.poll();
  fresh_.clear();
  space_.for_each_position(begin, end, [&](int64_t position) {
    const PageIndex index = space_.index(PageKind::kKeyValue, layer, position);
    if (tiers_[index].state != Residency::kFree) throw Error("a page was created twice");
    fresh_.push_back(index);
  });
  const auto slots = static_cast<int64_t>(fresh_.size());
  require_room(slots);
  create_slots_ = std::max(create_slots_, slots);
  tiers_.create(fresh_, false);
  tiers_.order_compute();
}

void PageManager::commit(int32_t layer, int64_t begin, int64_t end, void* stream) {
  check_range(layer, begin, end);
  space_.for_each_position(begin, end, [&](int64_t position) {
    tiers_.require_pinned(space_.index(PageKind::kKeyValue, layer, position));
  });
  use(stream);
  const Ticket written = engine_->mark_compute();
  space_.for_each_position(begin, end, [&](int64_t position) {
    tiers_.unpin(space_.index(PageKind::kKeyValue, layer, position), written, true, now_);
  });
  store_ahead();
}

void PageManager::create_gradients(int32_t layer, int64_t begin, int64_t end) {
  check_range(layer, begin, end);
  held_.visit = -1;
  space_.for_each_position(begin, end, [&](int64_t position) {
    const PageIndex index = space_.index(PageKind::kGradient, layer, position);
    if (!tiers_[index].wanted) total_slots_ += grad_slots_;
    tiers_.want(index);
  });
  prepare_host();
}

void PageManager::drop(int32_t layer, int64_t begin, int64_t end, bool kv, bool grads,
                       void* stream) {
  check_range(layer, begin, end);
  space_.for_each_position(begin, end, [&](int64_t position) {
    if (kv) tiers_.require_unpinned(space_.index(PageKind::kKeyValue, layer, position));
    if (grads) tiers_.require_unpinned(space_.index(PageKind::kGradient, layer, position), 1);
  });
  use(stream);
  held_.visit = -1;
  Ticket read = 0;
  space_.for_each_position(begin, end, [&](int64_t position) {
    if (kv) tiers_.drop(space_.index(PageKind::kKeyValue, layer, position));
    if (!grads) return;
    const PageIndex index = space_.index(PageKind::kGradient, layer, position);
    if (tiers_[index].wanted) total_slots_ -= grad_slots_;
    if (tiers_[index].pins > 0) {
      if (read == 0) read = engine_->mark_compute();
      tiers_.unpin(index, read, false, now_);
    }
    tiers_.drop(index);
  });
}

// --- What is going on ---------------------------------------------------------------------------

PageStatistics PageManager::statistics() const {
  const TrafficStatistics& traffic = tiers_.traffic();
  const CallTimes& times = engine_->times();
  return {.device_peak_bytes = device_.resource->statistics().peak_bytes,
          .host_peak_bytes = host_.resource->statistics().peak_bytes,
          .h2d_bytes = traffic.loaded_slots * slot_bytes(),
          .d2h_bytes = traffic.stored_slots * slot_bytes(),
          .h2d_seconds = times.copying(Lane::kLoad),
          .d2h_seconds = times.copying(Lane::kStore),
          .loaded_runs = traffic.loaded_runs,
          .stored_runs = traffic.stored_runs,
          .hits = hits_,
          .misses = misses_,
          .gathers = gathers_,
          .exposed_copy_seconds = times.waits(),
          .exposed_growth_seconds = host_.resource->statistics().commit_seconds,
          .device = device_.pool->state(),
          .host = host_.pool->state()};
}

void PageManager::check_integrity() const {
  if (active_) tiers_.check_integrity();
}

}  // namespace oomb::paging
