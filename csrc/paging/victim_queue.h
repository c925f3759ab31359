#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "memory/slot_pool.h"

namespace oomb::paging {

// Pages that may be evicted, by the time of their next use, farthest first. A page is known by its
// (first) device slot. Pages with equal keys form a doubly linked list threaded through arrays, so
// inserting and removing cost O(1) beside the few keys in use. A slot knows its list and the list
// its key, so that a whole list can be given another key at once.
class VictimQueue {
 public:
  // Which page of those with equal keys goes first: the one inserted last (a scan in ascending
  // order keeps its beginning), or the one inserted first (least recently used).
  enum class Ties : uint8_t { kNewestFirst, kOldestFirst };

  void reset(int64_t num_slots, int64_t num_keys, Ties ties);

  void insert(memory::Slot slot, int32_t key);
  void remove(memory::Slot slot);
  bool contains(memory::Slot slot) const { return list_[at(slot)] >= 0; }
  // -1: not in the queue.
  int32_t key(memory::Slot slot) const {
    return contains(slot) ? lists_[at(list_[at(slot)])].key : -1;
  }
  // Gives all pages with key `from` the key `to`; they count as older than those that have it.
  // Costs as much as the smaller of the two has pages.
  void move_all(int32_t from, int32_t to);
  int64_t size() const { return size_; }

  // Walks all pages, best victim first: for (s = first(); s != kNoSlot; s = after(s)).
  memory::Slot first() const;
  memory::Slot after(memory::Slot slot) const;

  // Pages with exactly this key, in no particular order.
  std::vector<memory::Slot> with_key(int32_t key) const;
  // The smallest key in use, or -1.
  int32_t nearest_key() const { return used_.empty() ? -1 : *used_.begin(); }

 private:
  struct List {
    int32_t key;
    memory::Slot head = memory::kNoSlot;
    memory::Slot tail = memory::kNoSlot;
    int64_t size = 0;
  };

  static size_t at(int64_t index) { return static_cast<size_t>(index); }
  List& list_with(int32_t key) { return lists_[at(with_[at(key)])]; }
  const List& list_with(int32_t key) const { return lists_[at(with_[at(key)])]; }

  Ties ties_ = Ties::kNewestFirst;
  std::vector<int32_t> list_;  // per slot, -1: not in the queue
  std::vector<memory::Slot> next_, previous_;
  std::vector<List> lists_;
  std::vector<int32_t> with_;  // per key, its list
  std::set<int32_t> used_;     // keys of lists that are not empty
  int64_t size_ = 0;
};

}  // namespace oomb::paging
