#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/slot_pool.h"
#include "paging/copy_engine.h"
#include "paging/page_space.h"

namespace oomb::paging {

// What kernels read to find a page, one array of int32:
//     KV        [layers][batch][max_pages]      slot, -1: not on the device
//     gradients [layers][batch][max_pages][2]   half slots of dK and dV, -1: none
// Kept outputs have no entries: the host knows their slots when it launches what copies them.
// A gradient page in one slot s has the halves 2s and 2s + 1; in two slots a, b it has 2a and 2b.
class BlockTables {
 public:
  BlockTables() = default;
  explicit BlockTables(const PageSpace& space)
      : entries_(std::make_shared<std::vector<int32_t>>(
            static_cast<size_t>(3 * space.num_layers() * space.positions()), -1)),
        positions_(space.positions()),
        gradients_begin_(space.num_layers() * space.positions()) {}

  void set(PageIndex index, memory::Slot first, memory::Slot second) {
    if (index < gradients_begin_) {
      write(index, first);
      return;
    }
    if (index >= 2 * gradients_begin_) return;
    const int64_t entry = gradients_begin_ + 2 * (index - gradients_begin_);
    const bool shared = second == memory::kNoSlot;
    write(entry, first < 0 ? -1 : 2 * first);
    write(entry + 1, first < 0 ? -1 : shared ? 2 * first + 1 : 2 * second);
  }
  void clear(PageIndex index) { set(index, memory::kNoSlot, memory::kNoSlot); }

  int64_t size() const { return static_cast<int64_t>(entries_->size()); }
  int32_t operator[](int64_t entry) const { return (*entries_)[static_cast<size_t>(entry)]; }
  int64_t kv_entry(int64_t layer) const { return layer * positions_; }
  int64_t gradient_entry(int64_t layer) const { return gradients_begin_ + 2 * layer * positions_; }

  // Shared, so that a view handed to Python outlives the call it was made in.
  const std::shared_ptr<std::vector<int32_t>>& entries() const { return entries_; }

  // Changes since the last take, for engines whose kernels read a copy of the table.
  std::vector<TableChange>& changes() { return changes_; }

 private:
  void write(int64_t entry, int32_t value) {
    int32_t& current = (*entries_)[static_cast<size_t>(entry)];
    if (current == value) return;
    current = value;
    changes_.push_back({entry, value});
  }

  std::shared_ptr<std::vector<int32_t>> entries_ = std::make_shared<std::vector<int32_t>>();
  int64_t positions_ = 0;
  int64_t gradients_begin_ = 0;
  std::vector<TableChange> changes_;
};

}  // namespace oomb::paging
