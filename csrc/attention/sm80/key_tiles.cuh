#pragma once

// The sequence of key tiles that a tile of queries attends to: own chunk first, then the wave's
// pages in ascending order, kKeys at a time. The order is the same whatever the wave is.
//
// One thread at a time walks the sequence, ahead of the products, and leaves each tile's
// description in a ring in shared memory; the walker's state lives there too, so that it costs the
// kernels no registers. Table entries arrive by cp.async, one tile before they are used:
//
//   tile j in use | tile j + 1 being copied | tile j + 2 described
//                                           | slot of the page after that, list entry of the next

#include <cstdint>

#include "attention/device/ptx.cuh"
#include "attention/device/visibility.cuh"
#include "attention/params.h"
#include "common/math.h"

namespace oomb::attention::sm80 {

constexpr int kThreads = 128;  // of every kernel here
constexpr int kElementBytes = 2;
constexpr int kNoPage = INT32_MAX;

// Four bytes to shared memory; nothing is read where !valid, and zero is written.
__device__ inline void copy_word(const void* shared, const void* global, bool valid = true) {
  const int bytes = valid ? 4 : 0;
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(device::shared_address(shared)),
      "l"(global), "r"(bytes)
      : "memory");
}

struct KeyTile {
  const void* k;
  const void* v;
  int64_t k_stride, v_stride;
  int first;   // number of its first key
  int end;     // keys from here on are not visible to anybody
  int rows;    // that exist; the rest is read as zero. 0: no more tiles
  int masked;  // some row does not see all of it
};

template <int kKeys>  // of one tile; divides 64
struct KeyTiles {
  KeyTile ring[4];

  // Limits that the rows of the query tile have in common.
  int first_begin;  // keys below it are seen by no row
  int last_begin;   // from it on, no row has a lower limit
  int full_end;     // below it, no row has an upper limit

  int batch, kv_head;
  int own_next, own_end;
  int past_end, page_limit;
  const int32_t* list;
  int list_end;
  int position;  // next place of the list, or next page
  int in_page;   // keys of the current page done with
  int page;      // the next page, slot its slot
  int slot;
  int page_after;

  // The thread block's rows are queries [first, first + rows), its keys one of `pieces` parts of
  // the sequence, about as long as the others; the own chunk is never cut. All threads call it; the
  // first two tiles are described afterwards.
  template <typename Params>
  __device__ void start(const Params& p, int batch_index, int kv_head_index, int first, int rows,
                        int piece = 0, int pieces = 1) {
    const int num_past = static_cast<int>(p.past.num_tokens);
    if (threadIdx.x == 0) first_begin = INT32_MAX, last_begin = 0, full_end = INT32_MAX;
    __syncthreads();
    for (int i = threadIdx.x; i < rows && first + i < p.shape.chunk; i += kThreads) {
      const auto keys =
          device::visible_keys(p.shape, p.visibility, num_past, batch_index, first + i);
      atomicMin(&first_begin, keys.begin);
      atomicMax(&last_begin, keys.begin);
      atomicMin(&full_end, keys.end);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int page_size = static_cast<int>(p.shape.page_size);
      batch = batch_index;
      kv_head = kv_head_index;
      own_next = 0;
      int chunk_rows = static_cast<int>(p.shape.chunk);  // padding is not even read
      if (p.visibility.num_keys != nullptr) {
        chunk_rows = min(chunk_rows, p.visibility.num_keys[batch] - num_past);
      }
      const int own = p.own_chunk ? max(min(first + rows, chunk_rows), 0) : 0;
      own_end = piece == 0 ? own : 0;
      past_end = max(device::visible_past(p.visibility, num_past, batch), 0);
      page_limit = static_cast<int>(min(p.past.page_end, ceil_div(past_end, page_size)));
      list = device::page_list(p.past, ceil_div(p.shape.chunk, page_size), batch, first / page_size,
                               kv_head);
      const int begin =
          max(static_cast<int>(p.past.page_begin), min(first_begin / page_size, page_limit));
      const int budget = static_cast<int>(p.past.budget);
      const int from = list == nullptr ? begin : device::lower_bound(list, budget, begin);
      const int pages = max((list == nullptr ? page_limit : budget) - from, 0);
      const auto border = [&](int index) {
        const int64_t keys = (int64_t{pages} * page_size + own) * index / pieces - own;
        return from + static_cast<int>(max(keys, int64_t{0}) / page_size);
      };
      position = border(piece);
      if (list == nullptr) {
        page_limit = border(piece + 1);
      } else {
        list_end = border(piece + 1);
      }
      in_page = page_size;
      page = fetch_page(p);
      if (page < page_limit) slot = p.past.block_table[batch * p.past.table_stride + page];
      page_after = fetch_page(p);
      describe<false>(p, 0);
      describe<false>(p, 1);
    }
    __syncthreads();
  }

  // Describes tile `index`; one thread calls it. kAsync: table entries are left on their way, and
  // must have arrived before the next call.
  template <bool kAsync, typename Params>
  __device__ void describe(const Params& p, int index) {
    KeyTile& tile = ring[index % 4];
    const int num_past = static_cast<int>(p.past.num_tokens);
    tile.rows = 0;
    while (own_next < own_end) {
      const int row = own_next;
      own_next += kKeys;
      if (num_past + row + kKeys <= first_begin) continue;
      tile.first = num_past + row;
      tile.k_stride = p.k_strides.token;
      tile.v_stride = p.v_strides.token;
      tile.k = static_cast<const char*>(p.k) +
               (batch * p.k_strides.batch + kv_head * p.k_strides.head + row * p.k_strides.token) *
                   kElementBytes;
      tile.v = static_cast<const char*>(p.v) +
               (batch * p.v_strides.batch + kv_head * p.v_strides.head + row * p.v_strides.token) *
                   kElementBytes;
      tile.rows = min(kKeys, own_end - row);
      tile.end = INT32_MAX;
      tile.masked = tile.rows < kKeys || tile.first < last_begin || tile.first + kKeys > full_end;
      return;
    }
    const int page_size = static_cast<int>(p.shape.page_size);
    const int head_dim = static_cast<int>(p.shape.head_dim);
    if (in_page + kKeys < page_size) {
      const KeyTile& before = ring[(index + 3) % 4];
      in_page += kKeys;
      tile.first = before.first + kKeys;
      tile.k = static_cast<const char*>(before.k) + kKeys * head_dim * kElementBytes;
      tile.v = static_cast<const char*>(before.v) + kKeys * head_dim * kElementBytes;
    } else {
      if (page >= page_limit) return;
      if (slot < 0) __trap();  // listed, but not resident: must not be read as if it held something
      const int64_t matrix = int64_t{page_size} * head_dim * kElementBytes;
      in_page = 0;
      tile.first = page * page_size;
      const char* keys =
          static_cast<const char*>(p.past.kv_pool) + slot * p.past.kv_slot_bytes + kv_head * matrix;
      if (tile.first + kKeys <= first_begin) {  // only a later part of the page is visible
        in_page = (first_begin - tile.first) / kKeys * kKeys;
        tile.first += in_page;
        keys += in_page * head_dim * kElementBytes;
      }
      tile.k = keys;
      tile.v = keys + p.shape.kv_heads * matrix;
      advance<kAsync>(p);
    }
    if (tile.first + kKeys >= past_end) in_page = page_size;  // nothing left in this page
    tile.k_stride = tile.v_stride = head_dim;
    tile.rows = max(0, min(kKeys, past_end - tile.first));
    tile.end = past_end;
    tile.masked = tile.first < last_begin || tile.first + kKeys > min(full_end, past_end);
  }

 private:
  // The page at the read position; kNoPage when there is none.
  template <typename Params>
  __device__ int fetch_page(const Params& p) {
    if (list == nullptr) return position++;
    if (position >= list_end) return kNoPage;
    const int entry = list[position++];
    return entry < 0 ? kNoPage : entry;
  }

  template <bool kAsync, typename Params>
  __device__ void advance(const Params& p) {
    page = page_after < 0 ? kNoPage : page_after;
    if (page >= page_limit) return;
    const int32_t* entry = p.past.block_table + batch * p.past.table_stride + page;
    if constexpr (kAsync) {
      copy_word(&slot, entry);
      if (list == nullptr) {
        page_after = position++;
      } else if (position >= list_end) {
        page_after = kNoPage;
      } else {
        copy_word(&page_after, list + position++);  // may be -1
      }
    } else {
      slot = *entry;
      page_after = fetch_page(p);
    }
  }
};

}  // namespace oomb::attention::sm80
