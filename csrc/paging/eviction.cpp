// Which pages Tiers gives up, and when they go to the host.

#include <algorithm>
#include <limits>
#include <vector>

#include "paging/tiers.h"

namespace oomb::paging {

using memory::kNoSlot;
using memory::Slot;

namespace {

constexpr int32_t kAsFiled = std::numeric_limits<int32_t>::max();
constexpr int32_t kAny = -1;

}  // namespace

int32_t Tiers::next_use(PageIndex index, int32_t now) const {
  return schedule_->next_use(space_->kind(index), static_cast<int32_t>(space_->layer(index)),
                             space_->position(index), now);
}

// The visit under which a page is filed that is needed next in visit `next`.
//
// Layers come round in circles. What is needed farthest from now is all of the layers just left;
// to evict strictly by that loads some layers whole, one after the other, and of others nothing:
// while those run the link is idle, and then it cannot follow.
//
//     strictly     layer  27 26 25 24 23 22 21 20 ...      # resident
//                         #  #  #  #  .  .  .  .           . loaded, all at the link's peak
//     spread              #. #. #. #. #. #. #. #.          at the mean rate
//
// So a page counts as up to twice as far as it is, by its place in the sequence: of every layer the
// same share stays. About as many pages are loaded in all.
int32_t Tiers::filed(PageIndex index, int32_t now, int32_t next) const {
  if (next >= schedule_->size() || !(exact_ || schedule_->is_exact(next))) return next;
  // Multiples of the golden ratio fall evenly into 0 .. 1, whatever pages there are.
  const auto page = static_cast<uint32_t>(space_->page(index));
  const double place = static_cast<double>(page * 2654435769U) * 0x1p-32;
  return static_cast<int32_t>(std::min<double>(schedule_->size(), next + place * (next - now)));
}

int32_t Tiers::key_at(int32_t visit, PageKind kind) {
  // Of two pages needed at the same time the gradient goes last: others need not be stored again.
  return 2 * visit + (kind == PageKind::kGradient ? 0 : 1);
}

void Tiers::enqueue(PageIndex index, int32_t now) {
  PageRecord& record = records_[at(index)];
  const int32_t next = next_use(index, now);
  const int32_t visit = filed(index, now, next);
  record.due = visit > next ? next : kAsFiled;
  victims_.insert(record.device[0], key_at(visit, space_->kind(index)));
}

void Tiers::requeue(PageIndex index, int32_t now) {
  victims_.remove(records_[at(index)].device[0]);
  enqueue(index, now);
}

void Tiers::requeue_unlisted(int32_t visit, int32_t heir) {
  victims_.move_all(key_at(visit, PageKind::kKeyValue), key_at(heir, PageKind::kKeyValue));
  for (const int64_t position : schedule_->pages(visit)) {
    const PageIndex index = space_->index(PageKind::kKeyValue, (*schedule_)[visit].layer, position);
    const PageRecord& record = records_[at(index)];
    if (record.on_device() && victims_.contains(record.device[0])) requeue(index, visit - 1);
  }
}

std::vector<PageIndex> Tiers::filed_under(int32_t visit) const {
  std::vector<PageIndex> pages;
  for (const PageKind kind : {PageKind::kGradient, PageKind::kKeyValue}) {
    for (const Slot slot : victims_.with_key(key_at(visit, kind)))
      pages.push_back(owner_[at(slot)]);
  }
  return pages;
}

int32_t Tiers::nearest_visit() const {
  const int32_t key = victims_.nearest_key();
  return key < 0 ? -1 : key / 2;
}

void Tiers::evict(PageIndex index) {
  clear_ahead(index);
  victims_.remove(records_[at(index)].device[0]);
  move(index, Residency::kHostOnly);
  free_device_slots(index);
}

// Pages whose next use is later than `visit`, farthest first, until `slots` are available. Those in
// use come last: whoever takes their slots waits until the kernels of the latest visits are over,
// and everybody behind it in the queue of loads with it.
bool Tiers::choose_victims(int64_t slots, int32_t visit) {
  int64_t room = available_slots();
  chosen_.clear();
  for (const bool in_use : {false, true}) {
    for (Slot slot = victims_.first(); slot != kNoSlot && room < slots;
         slot = victims_.after(slot)) {
      if (victims_.key(slot) / 2 <= visit) break;
      const PageIndex index = owner_[at(slot)];
      const PageRecord& record = records_[at(index)];
      if (record.due <= visit || (record.used >= now_ - 1) != in_use) continue;
      // With a full host tier a page that already has its place there can still go.
      if (record.state == Residency::kDirty && !take_host_slots(index)) continue;
      chosen_.push_back(index);
      room += slots_of(index);
    }
  }
  return room >= slots;
}

void Tiers::evict_chosen() {
  dirty_.clear();
  for (const PageIndex index : chosen_) {
    if (records_[at(index)].state == Residency::kDirty) dirty_.push_back(index);
  }
  store(dirty_);
  for (const PageIndex index : chosen_) evict(index);
}

bool Tiers::make_room(int64_t slots) {
  host_error_.clear();
  if (available_slots() >= slots) return true;
  if (!choose_victims(slots, kAny) && !(give_up_copies() && choose_victims(slots, kAny))) {
    return false;
  }
  evict_chosen();
  return true;
}

bool Tiers::give_up_copies() {
  bool any = false;
  for (const PageIndex index : owner_) {
    if (index < 0 || records_[at(index)].pins == 0 || !records_[at(index)].on_host()) continue;
    if (records_[at(index)].state == Residency::kResident) move(index, Residency::kDirty);
    if (records_[at(index)].state != Residency::kDirty) continue;  // its copy is on the way
    free_host_slots(index);
    any = true;
  }
  return any;
}

int64_t Tiers::make_room_ahead(int64_t slots, int32_t visit) {
  host_error_.clear();
  if (available_slots() < slots) {
    choose_victims(slots, visit);
    evict_chosen();
  }
  return std::min(slots, available_slots());
}

// In the order in which choose_victims takes them.
void Tiers::store_ahead(int64_t slots) {
  host_error_.clear();
  int64_t ready = available_slots();
  dirty_.clear();
  for (const bool in_use : {false, true}) {
    for (Slot slot = victims_.first(); slot != kNoSlot && ready < slots;
         slot = victims_.after(slot)) {
      const PageIndex index = owner_[at(slot)];
      const PageRecord& record = records_[at(index)];
      if ((record.used >= now_ - 1) != in_use) continue;
      ready += slots_of(index);
      if (record.state != Residency::kDirty) continue;
      if (!take_host_slots(index)) break;
      dirty_.push_back(index);
    }
  }
  store(dirty_);
}

}  // namespace oomb::paging
