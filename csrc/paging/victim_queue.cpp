#include "paging/victim_queue.h"

#include "common/error.h"

namespace oomb::paging {

using memory::kNoSlot;
using memory::Slot;

void VictimQueue::reset(int64_t num_slots, int64_t num_keys, Ties ties) {
  ties_ = ties;
  key_.assign(at(num_slots), -1);
  next_.assign(at(num_slots), kNoSlot);
  previous_.assign(at(num_slots), kNoSlot);
  head_.assign(at(num_keys), kNoSlot);
  tail_.assign(at(num_keys), kNoSlot);
  used_.clear();
  size_ = 0;
}

void VictimQueue::insert(Slot slot, int32_t key) {
  if (contains(slot)) throw Error(concat("slot ", slot, " queued for eviction twice"));
  key_[at(slot)] = key;
  Slot& head = head_[at(key)];
  Slot& tail = tail_[at(key)];
  if (head == kNoSlot) {
    head = tail = slot;
    next_[at(slot)] = previous_[at(slot)] = kNoSlot;
    used_.insert(key);
  } else if (ties_ == Ties::kNewestFirst) {
    next_[at(slot)] = head;
    previous_[at(slot)] = kNoSlot;
    previous_[at(head)] = slot;
    head = slot;
  } else {
    next_[at(slot)] = kNoSlot;
    previous_[at(slot)] = tail;
    next_[at(tail)] = slot;
    tail = slot;
  }
  ++size_;
}

void VictimQueue::remove(Slot slot) {
  const int32_t key = key_[at(slot)];
  if (key < 0) throw Error(concat("slot ", slot, " is not queued for eviction"));
  const Slot next = next_[at(slot)];
  const Slot previous = previous_[at(slot)];
  (previous == kNoSlot ? head_[at(key)] : next_[at(previous)]) = next;
  (next == kNoSlot ? tail_[at(key)] : previous_[at(next)]) = previous;
  if (head_[at(key)] == kNoSlot) used_.erase(key);
  key_[at(slot)] = -1;
  --size_;
}

Slot VictimQueue::first() const { return used_.empty() ? kNoSlot : head_[at(*used_.rbegin())]; }

Slot VictimQueue::after(Slot slot) const {
  if (next_[at(slot)] != kNoSlot) return next_[at(slot)];
  const auto place = used_.find(key_[at(slot)]);
  return place == used_.begin() ? kNoSlot : head_[at(*std::prev(place))];
}

std::vector<Slot> VictimQueue::with_key(int32_t key) const {
  std::vector<Slot> slots;
  for (Slot slot = head_[at(key)]; slot != kNoSlot; slot = next_[at(slot)]) slots.push_back(slot);
  return slots;
}

}  // namespace oomb::paging
