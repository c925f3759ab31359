#include "paging/victim_queue.h"

#include <utility>

#include "common/error.h"

namespace oomb::paging {

using memory::kNoSlot;
using memory::Slot;

void VictimQueue::reset(int64_t num_slots, int64_t num_keys, Ties ties) {
  ties_ = ties;
  list_.assign(at(num_slots), -1);
  next_.assign(at(num_slots), kNoSlot);
  previous_.assign(at(num_slots), kNoSlot);
  lists_.clear();
  with_.clear();
  for (int32_t key = 0; key < num_keys; ++key) {
    lists_.push_back({.key = key});
    with_.push_back(key);
  }
  used_.clear();
  size_ = 0;
}

void VictimQueue::insert(Slot slot, int32_t key) {
  if (contains(slot)) throw Error(concat("slot ", slot, " queued for eviction twice"));
  List& list = list_with(key);
  list_[at(slot)] = with_[at(key)];
  next_[at(slot)] = previous_[at(slot)] = kNoSlot;
  if (list.size == 0) {
    list.head = list.tail = slot;
    used_.insert(key);
  } else if (ties_ == Ties::kNewestFirst) {
    next_[at(slot)] = list.head;
    previous_[at(list.head)] = slot;
    list.head = slot;
  } else {
    previous_[at(slot)] = list.tail;
    next_[at(list.tail)] = slot;
    list.tail = slot;
  }
  ++list.size;
  ++size_;
}

void VictimQueue::remove(Slot slot) {
  if (!contains(slot)) throw Error(concat("slot ", slot, " is not queued for eviction"));
  List& list = lists_[at(list_[at(slot)])];
  const Slot next = next_[at(slot)];
  const Slot previous = previous_[at(slot)];
  (previous == kNoSlot ? list.head : next_[at(previous)]) = next;
  (next == kNoSlot ? list.tail : previous_[at(next)]) = previous;
  if (--list.size == 0) used_.erase(list.key);
  list_[at(slot)] = -1;
  --size_;
}

void VictimQueue::move_all(int32_t from, int32_t to) {
  if (from == to || list_with(from).size == 0) return;
  used_.erase(from);
  used_.insert(to);
  // The longer list keeps its slots and takes the key; the other one's slots join it.
  const bool moved_join = list_with(from).size <= list_with(to).size;
  if (!moved_join) {
    std::swap(with_[at(from)], with_[at(to)]);
    std::swap(list_with(from).key, list_with(to).key);
  }
  List& few = list_with(from);
  List& many = list_with(to);
  if (few.size == 0) return;
  for (Slot slot = few.head; slot != kNoSlot; slot = next_[at(slot)])
    list_[at(slot)] = with_[at(to)];
  const bool in_front = moved_join == (ties_ == Ties::kOldestFirst);
  const List& first = in_front ? few : many;
  const List& second = in_front ? many : few;
  next_[at(first.tail)] = second.head;
  previous_[at(second.head)] = first.tail;
  const Slot head = first.head;
  const Slot tail = second.tail;
  many = {.key = to, .head = head, .tail = tail, .size = few.size + many.size};
  few = {.key = from};
}

Slot VictimQueue::first() const {
  return used_.empty() ? kNoSlot : list_with(*used_.rbegin()).head;
}

Slot VictimQueue::after(Slot slot) const {
  if (next_[at(slot)] != kNoSlot) return next_[at(slot)];
  const auto place = used_.find(key(slot));
  return place == used_.begin() ? kNoSlot : list_with(*std::prev(place)).head;
}

std::vector<Slot> VictimQueue::with_key(int32_t key) const {
  std::vector<Slot> slots;
  for (Slot slot = list_with(key).head; slot != kNoSlot; slot = next_[at(slot)]) {
    slots.push_back(slot);
  }
  return slots;
}

}  // namespace oomb::paging
