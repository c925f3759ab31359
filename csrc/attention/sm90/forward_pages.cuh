#pragma once

// Which keys the forward's producer loads: what rows may see, and the pages of several lists in
// order.

#include <climits>
#include <cstdint>

#include "attention/sm90/forward_args.h"
#include "attention/sm90/forward_shared.cuh"

namespace oomb::attention::sm90 {

// What the rows of a task may see.
struct RowRange {
  int32_t last_row = -1;                   // the first is the multiple of 64 below; -1: no rows
  int32_t key_min = INT_MAX, key_max = 0;  // range of first_visible_key over the rows

  __device__ __forceinline__ void find(const ForwardArgs& args, int32_t batch, int32_t row,
                                       int32_t lane) {
    if (row >= args.chunk) return;
    last_row = min(row + kTaskRows, args.chunk) - 1;
    for (int32_t r = row + lane; r <= last_row; r += 32) {
      const int32_t first = first_visible_key(args, batch, r);
      key_min = min(key_min, first);
      key_max = max(key_max, first);
    }
    key_min = __reduce_min_sync(kAllLanes, key_min);
    key_max = __reduce_max_sync(kAllLanes, key_max);
  }

  // Flags of a tile of keys [begin, end) for these rows; keys from real_end on are hidden from all.
  __device__ __forceinline__ int flags(int32_t begin, int32_t end, int32_t real_end, bool own,
                                       int32_t num_past, int seen) const {
    if (last_row < 0 || end <= key_min) return 0;
    if (own && begin > num_past + last_row) return 0;
    const int32_t first_row = last_row / kTaskRows * kTaskRows;
    const bool masked =
        begin < key_max || end > real_end || (own && end - 1 > num_past + first_row);
    return seen | (masked ? kMasked : 0);
  }
};

// Walks the union of up to kLists ascending page lists. Lanes are divided into segments, one per
// list; a lane holds one page of its segment's list, with its slot.
//
//   kLists = 2   [ list 0: 3 7 8 12 .. ][ list 1: 0 3 9 .. ]    left: lanes with a page to come
template <int kPageSize, int kLists>
struct PageReader {
  static constexpr int32_t kEveryPage = -1, kNoPage = -2;
  int32_t list;  // of this lane's segment: its first position in args.selection, or one of these
  int32_t next;  // position to read; without a list, page
  uint32_t consumers;  // who reads this segment's list, a bit each
  int32_t page = 0, slot = 0;
  uint32_t left = 0;

  // Reads on where a segment has no page left.
  __device__ __forceinline__ void refill(const ForwardArgs& args, int32_t batch, int32_t page_begin,
                                         int32_t real_end, int32_t lane) {
    const int32_t page_end = min(args.page_end, (real_end + kPageSize - 1) / kPageSize);
    while (true) {
      const int32_t width = list == kEveryPage ? 32 : 32 / kLists;
      const uint32_t segment = (kAllLanes >> (32 - width)) << lane / width * width;
      const int32_t end = list == kEveryPage ? page_end : list == kNoPage ? 0 : args.budget;
      const bool empty = (left & segment) == 0 && next < end;
      if (!__any_sync(kAllLanes, empty)) return;
      bool wanted = false;
      if (empty) {
        const int32_t position = next + lane % width;
        next += width;
        page = position >= end      ? -1
               : list == kEveryPage ? position
                                    : args.selection[list + position];
        wanted = page >= page_begin && page < page_end;
        slot = wanted ? args.block_table[batch * args.table_stride + page] : 0;
        // A page from the future or one that is not resident must never be read as something else.
        if (page >= args.num_pages ||
            static_cast<uint32_t>(slot) >= static_cast<uint32_t>(args.num_slots)) {
          __trap();
        }
      }
      left |= __ballot_sync(kAllLanes, wanted);
    }
  }

  // The lowest page left, INT_MAX when there is none; the same in all lanes, as everything below.
  __device__ __forceinline__ int32_t front(int32_t lane) const {
    return __reduce_min_sync(kAllLanes, left >> lane & 1 ? page : INT_MAX);
  }

  // Takes that page out of all lists: its slot and who listed it.
  __device__ __forceinline__ void take(int32_t front, int32_t lane, int32_t& front_slot,
                                       uint32_t& listed_by) {
    const bool found = (left >> lane & 1) && page == front;
    const uint32_t lanes = __ballot_sync(kAllLanes, found);
    listed_by = __reduce_or_sync(kAllLanes, found ? consumers : 0);
    front_slot = __shfl_sync(kAllLanes, slot, __ffs(lanes) - 1);
    left &= ~lanes;
  }
};

}  // namespace oomb::attention::sm90
