#pragma once

// Which keys a query row sees, and where a page of a sequence lies.

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::device {

// Keys [begin, end) of a sequence; everything a row may see apart from the page list.
struct KeyRange {
  int begin = INT32_MAX;
  int end = 0;
};

__device__ inline KeyRange visible_keys(const Shape& shape, const Visibility& visibility,
                                        int num_past, int batch, int row) {
  KeyRange keys;
  if (row >= shape.chunk) return keys;
  keys.begin = 0;
  keys.end = num_past + row + 1;
  if (visibility.window > 0 && visibility.window < keys.end) {
    keys.begin = keys.end - static_cast<int>(visibility.window);
  }
  if (visibility.first_key != nullptr) {
    keys.begin = max(keys.begin, visibility.first_key[batch * shape.chunk + row]);
  }
  if (visibility.num_keys != nullptr) keys.end = min(keys.end, visibility.num_keys[batch]);
  return keys;
}

// Past tokens of one sequence that anybody may see: the rest of the last page is not there.
__device__ inline int visible_past(const Visibility& visibility, int num_past, int batch) {
  return visibility.num_keys == nullptr ? num_past : min(num_past, visibility.num_keys[batch]);
}

// A page's keys; its values follow after [Hkv, P, D]. A page that is not resident must never be
// read as if it held something, and a kernel has no other way to report it: the launch fails.
template <typename T>
__device__ inline const T* keys_of_page(const PastPages& past, int64_t batch, int64_t page) {
  const int64_t slot = past.block_table[batch * past.table_stride + page];
  if (slot < 0) __trap();
  return reinterpret_cast<const T*>(static_cast<const char*>(past.kv_pool) +
                                    slot * past.kv_slot_bytes);
}

// The page list of one query block and kv head; null for dense attention.
__device__ inline const int32_t* page_list(const PastPages& past, int64_t num_blocks, int64_t batch,
                                           int64_t block, int64_t kv_head) {
  if (past.selection == nullptr) return nullptr;
  const int64_t head = past.selection_heads == 1 ? 0 : kv_head;
  return past.selection +
         ((batch * num_blocks + block) * past.selection_heads + head) * past.budget;
}

// The first entry of a list that is not below `page`.
__device__ inline int lower_bound(const int32_t* list, int length, int64_t page) {
  int low = 0, high = length;
  while (low < high) {
    const int middle = (low + high) / 2;
    const int32_t entry = list[middle];
    if (entry >= 0 && entry < page) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace oomb::attention::device
