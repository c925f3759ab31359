#include "paging/page_manager.h"

#include <algorithm>

#include "common/error.h"

namespace oomb::paging {

namespace {

using Growth = memory::SlotPool::Growth;

}  // namespace

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
  } catch (const Error&) {
    // The copy engine has failed before and said so; its memory goes with it.
  }
}

int64_t PageManager::smallest_device_slots(int64_t batch, int64_t grad_slots, bool backward,
                                           int64_t wave_pages) {
  return wave_pages * batch * (backward ? 1 + grad_slots : 1);
}

void PageManager::begin_call(CallPlan plan) {
  if (closed_) throw Error("the page manager is closed");
  if (active_) throw Error("the page manager is in use: another call has begun and not ended");
  plan.check();
  const bool backward = plan.has_gradients();
  space_ = PageSpace(plan.num_layers, std::move(plan.pages_per_sequence));
  schedule_ = Schedule(space_, std::move(plan.visits));
  grad_slots_ = plan.grad_slots;
  wave_pages_ = plan.wave_pages;
  smallest_slots_ = smallest_device_slots(space_.batch(), grad_slots_, backward, wave_pages_);
  if (device_slots() < smallest_slots_) throw_out_of_memory(smallest_slots_);
  total_slots_ = 0;
  for (int64_t b = 0; b < space_.batch(); ++b) {
    total_slots_ += space_.num_layers() * space_.pages_of(b);
  }
  create_slots_ = 0;
  now_ = -1;
  hits_ = misses_ = 0;
  device_.resource->reset();
  host_.resource->reset();
  engine_->times().begin(schedule_.size());
  tiers_.begin(space_, schedule_, grad_slots_, plan.exact);
  prefetcher_.begin(space_, schedule_, smallest_slots_, plan.exact);
  engine_->reset_tables(tiers_.tables().size());
  active_ = true;
  prepare_host();
}

// What cannot fit the device will go to the host: let slow memory be got ahead of its use.
void PageManager::prepare_host() {
  const int64_t spilled = std::min(total_slots_ - device_slots(), host_.pool->max_slots());
  if (spilled > 0) host_.resource->prepare(spilled * slot_bytes());
}

void PageManager::end_call() {
  if (!active_) return;
  active_ = false;
  tiers_.end(!options_.keep_host_memory);
}

void PageManager::close() {
  if (closed_) return;
  end_call();
  closed_ = true;
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

// Pages of the visit within [begin, end), KV and gradient.
void PageManager::gather(int32_t visit, int64_t begin, int64_t end) {
  check_visit(visit);
  const Visit& what = schedule_[visit];
  check_range(what.layer, begin, end);
  gathered_.clear();
  schedule_.for_each_position(visit, begin, end, [&](int64_t position) {
    if (what.touches(PageKind::kKeyValue)) {
      gathered_.push_back(space_.index(PageKind::kKeyValue, what.layer, position));
    }
    if (what.touches(PageKind::kGradient)) {
      const PageIndex index = space_.index(PageKind::kGradient, what.layer, position);
      if (tiers_[index].wanted) gathered_.push_back(index);
    }
  });
}

int64_t PageManager::slots_not_on_device() const {
  int64_t slots = 0;
  for (const PageIndex index : gathered_) {
    if (!tiers_[index].on_device()) slots += tiers_.slots_of(index);
  }
  return slots;
}

void PageManager::set_visit_pages(int32_t visit, std::vector<int64_t> positions) {
  check_visit(visit);
  for (const int64_t position : positions) {
    expect(position >= 0 && position < space_.positions(), "pages",
           concat("sequence * max_pages + page below ", space_.positions()), position);
  }
  const bool first_list = !schedule_.has_pages(visit);
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
  use(stream);
  const Ticket written = engine_->mark_compute();
  space_.for_each_position(begin, end, [&](int64_t position) {
    tiers_.unpin(space_.index(PageKind::kKeyValue, layer, position), written, true, now_);
  });
  store_ahead();
}

void PageManager::create_gradients(int32_t layer, int64_t begin, int64_t end) {
  check_range(layer, begin, end);
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
  use(stream);
  Ticket read = 0;
  space_.for_each_position(begin, end, [&](int64_t position) {
    if (kv) tiers_.drop(space_.index(PageKind::kKeyValue, layer, position));
    if (!grads) return;
    const PageIndex index = space_.index(PageKind::kGradient, layer, position);
    if (tiers_[index].pins > 0) {
      if (read == 0) read = engine_->mark_compute();
      tiers_.unpin(index, read, false, now_);
    }
    tiers_.drop(index);
  });
}

// --- Visits -------------------------------------------------------------------------------------

std::vector<std::pair<int64_t, int64_t>> PageManager::waves(int32_t visit) {
  check_visit(visit);
  const int64_t begin = schedule_[visit].first;
  const int64_t end = schedule_[visit].last;
  gather(visit, begin, end);
  // A wave must fit what the device gives, not what it was hoped to give.
  tiers_.reserve(slots_not_on_device(), Growth::kSteps);
  if (usable_slots() - tiers_.pinned_slots() < smallest_slots_) {
    tiers_.reserve(smallest_slots_, Growth::kMissing);
  }
  const int64_t room = usable_slots() - tiers_.pinned_slots();
  const int64_t limit = std::max(room - prefetcher_.window(), std::min(room, smallest_slots_));
  const int64_t missing_limit = prefetcher_.window() > 0 ? prefetcher_.window() : limit;

  std::vector<std::pair<int64_t, int64_t>> result;
  int64_t first = begin;
  int64_t slots = 0;
  int64_t missing = 0;
  for (size_t i = 0; i < gathered_.size();) {
    // All of what a wave must not part: the sequences, keys and gradients of wave_pages_ pages.
    const int64_t group = space_.page(gathered_[i]) / wave_pages_;
    int64_t group_slots = 0;
    int64_t group_missing = 0;
    for (; i < gathered_.size() && space_.page(gathered_[i]) / wave_pages_ == group; ++i) {
      group_slots += tiers_.slots_of(gathered_[i]);
      const PageRecord& record = tiers_[gathered_[i]];
      if (!record.on_device() || record.ahead) group_missing += tiers_.slots_of(gathered_[i]);
    }
    if (group_slots > room) throw_out_of_memory(group_slots);
    if (slots > 0 && (slots + group_slots > limit || missing + group_missing > missing_limit)) {
      result.emplace_back(first, group * wave_pages_);
      first = group * wave_pages_;
      slots = missing = 0;
    }
    slots += group_slots;
    missing += group_missing;
  }
  if (first < end) result.emplace_back(first, end);
  return result;
}

bool PageManager::own_alone(int32_t visit, int64_t begin, int64_t end) {
  gather(visit, begin, end);
  return std::any_of(gathered_.begin(), gathered_.end(),
                     [&](PageIndex index) { return tiers_[index].state == Residency::kHostOnly; });
}

void PageManager::acquire(int32_t visit, int64_t begin, int64_t end, void* stream) {
  gather(visit, begin, end);
  use(stream);
  tiers_.poll();
  advance(visit);
  acquire_gathered(schedule_[visit].kind == VisitKind::kAccumulate);
  prefetch(end);
}

// Pins what was gathered, loading what is missing; all of it or nothing.
void PageManager::acquire_gathered(bool will_write) {
  missing_.clear();
  fresh_.clear();
  int64_t slots = 0;
  int64_t found = 0;
  for (const PageIndex index : gathered_) {
    const PageRecord& record = tiers_[index];
    if (record.on_device()) {
      ++found;
      continue;
    }
    slots += tiers_.slots_of(index);
    if (record.state == Residency::kHostOnly) {
      missing_.push_back(index);
    } else if (tiers_.is_gradient(index) && will_write) {
      fresh_.push_back(index);
    } else {
      const PageId id = space_.id(index);
      throw Error(concat("page ", id.page, " of layer ", id.layer, ", sequence ", id.sequence,
                         " holds nothing: it was never created, or dropped"));
    }
  }
  const auto writes = [&](PageIndex index) { return will_write && tiers_.is_gradient(index); };
  pinned_.clear();
  const auto pin = [&](PageIndex index) {
    tiers_.pin(index, writes(index));
    pinned_.push_back(index);
  };
  try {
    for (const PageIndex index : gathered_) {
      if (tiers_[index].on_device()) pin(index);
    }
    require_room(slots);
    tiers_.load(missing_, now_ - 1, false);
    for (const PageIndex index : missing_) pin(index);
    tiers_.create(fresh_, true);
  } catch (...) {
    for (const PageIndex index : pinned_) tiers_.cancel_pin(index, now_ - 1);
    throw;
  }
  tiers_.order_compute();
  hits_ += found;
  misses_ += static_cast<int64_t>(missing_.size());
}

void PageManager::release(int32_t visit, int64_t begin, int64_t end, void* stream) {
  gather(visit, begin, end);
  use(stream);
  const Ticket used = engine_->mark_compute();
  const bool accumulated = schedule_[visit].kind == VisitKind::kAccumulate;
  for (const PageIndex index : gathered_) {
    tiers_.unpin(index, used, accumulated && tiers_.is_gradient(index), visit);
  }
  tiers_.poll();
  store_ahead();
  prefetch(schedule_[visit].first);
}

void PageManager::acquire_gradients(int32_t layer, int64_t begin, int64_t end, void* stream) {
  check_range(layer, begin, end);
  use(stream);
  tiers_.poll();
  const int32_t visit = schedule_.next_use(PageKind::kGradient, layer, begin, now_ - 1);
  if (visit < schedule_.size() && schedule_[visit].kind == VisitKind::kReadGradient) {
    advance(visit);
  }
  gathered_.clear();
  space_.for_each_position(begin, end, [&](int64_t position) {
    const PageIndex index = space_.index(PageKind::kGradient, layer, position);
    if (tiers_[index].state != Residency::kFree) gathered_.push_back(index);
  });
  acquire_gathered(false);
  prefetch(end);
}

// Time moves on: pages filed under visits that are over get their next use.
void PageManager::advance(int32_t visit) {
  if (visit > now_) {
    now_ = visit;
    tiers_.enter(visit);
    engine_->times().enter(visit);
  }
  for (int32_t past = tiers_.nearest_visit(); past >= 0 && past < now_;
       past = tiers_.nearest_visit()) {
    for (const PageIndex index : tiers_.filed_under(past)) tiers_.requeue(index, now_ - 1);
  }
}

// --- Room ---------------------------------------------------------------------------------------

// Where the device gives no further step, pages go to the host; it is made to give its last only
// where they cannot.
void PageManager::require_room(int64_t slots) {
  for (const Growth growth : {Growth::kSteps, Growth::kMissing}) {
    tiers_.reserve(slots, growth);
    if (tiers_.make_room(slots)) return;
  }
  throw_out_of_memory(slots);
}

void PageManager::throw_out_of_memory(int64_t slots) const {
  const int64_t bytes = slot_bytes();
  const int64_t pinned = active_ ? tiers_.pinned_slots() : 0;
  if (const auto& refusal = device_.pool->refusal(); refusal && pinned + slots <= device_slots()) {
    const int64_t limit = host_.pool->max_slots() * bytes;
    throw OutOfMemory(
        concat(refusal->what(), limit == 0 ? ""
                                           : concat("; nor has host_memory room for others, ",
                                                    host_.pool->taken_slots() * bytes, " of ",
                                                    limit, " bytes are taken")),
        refusal->needed_bytes(), refusal->available_bytes());
  }
  if (active_ && pinned + slots <= device_slots()) {
    const int64_t limit = host_.pool->max_slots() * bytes;
    throw OutOfMemory(
        concat("host tier full: needed room for pages of ", slots * bytes,
               " bytes that no longer fit the device tier; host_memory holds ",
               host_.pool->taken_slots() * bytes, " bytes of at most ", limit,
               "; raise host_memory or device_memory",
               tiers_.host_error().empty() ? "" : concat(" (", tiers_.host_error(), ")")),
        slots * bytes, host_.pool->available_slots() * bytes);
  }
  throw OutOfMemory(
      concat("device tier too small: needed ", (pinned + slots) * bytes,
             " bytes of pages at the same time, device_memory allows ", device_slots() * bytes,
             "; the smallest device_memory that works here is ",
             std::max(smallest_slots_, slots > smallest_slots_ ? pinned + slots : 0) * bytes,
             " bytes of pages"),
      (pinned + slots) * bytes, device_slots() * bytes);
}

void PageManager::prefetch(int64_t page) {
  if (host_.pool->taken_slots() == 0) return;  // nothing has ever left the device
  prefetcher_.run(now_, page);
}

// The next wave's new pages and the next chunk's should find slots that need no store any more.
void PageManager::store_ahead() {
  if (total_slots_ <= usable_slots()) return;  // nothing will ever have to go
  tiers_.store_ahead(std::min(prefetcher_.window() + create_slots_, usable_slots() / 2));
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
          .exposed_copy_seconds = times.waits()};
}

void PageManager::check_integrity() const {
  if (active_) tiers_.check_integrity();
}

}  // namespace oomb::paging
