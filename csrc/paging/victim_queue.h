#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "memory/slot_pool.h"

namespace oomb::paging {

// Pages that may be evicted, by the time of their next use, farthest first. A page is known by its
// (first) device slot. Pages with equal keys form a doubly linked list threaded through arrays, so
// inserting and removing cost O(1) beside the few keys in use.
class VictimQueue {
 public:
  // Which page of those with equal keys goes first: the one inserted last (a scan in ascending
  // order keeps its beginning), or the one inserted first (least recently used).
  enum class Ties : uint8_t { kNewestFirst, kOldestFirst };

  void reset(int64_t num_slots, int64_t num_keys, Ties ties);

  void insert(memory::Slot slot, int32_t key);
  void remove(memory::Slot slot);
  bool contains(memory::Slot slot) const { return key_[at(slot)] >= 0; }
  int32_t key(memory::Slot slot) const { return key_[at(slot)]; }
  int64_t size() const { return size_; }

  // Walks all pages, best victim first: for (s = first(); s != kNoSlot; s = after(s)).
  memory::Slot first() const;
  memory::Slot after(memory::Slot slot) const;

  // Pages with exactly this key, in no particular order.
  std::vector<memory::Slot> with_key(int32_t key) const;
  // The smallest key in use, or -1.
  int32_t nearest_key() const { return used_.empty() ? -1 : *used_.begin(); }

 private:
  static size_t at(int64_t index) { return static_cast<size_t>(index); }

  Ties ties_ = Ties::kNewestFirst;
  std::vector<int32_t> key_;  // per slot, -1: not in the queue
  std::vector<memory::Slot> next_, previous_;
  std::vector<memory::Slot> head_, tail_;  // per key
  std::set<int32_t> used_;
  int64_t size_ = 0;
};

}  // namespace oomb::paging
