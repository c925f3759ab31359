#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/params.h"

namespace oomb::attention::cpu {

// The keys that row `row` of the chunk sees, before any selection; 0, 0 when there are none.
struct KeyInterval {
  int64_t first = 0;
  int64_t last = 0;
};
KeyInterval visible_keys(const Shape& shape, const Visibility& visibility, int64_t num_past,
                         int64_t batch, int64_t row);

// A tile of at most page_size keys: a page of the past, or page_size tokens of the own chunk.
//
//   keys      0         P        2P     N          N+P           N+C
//   tiles     | page 0  | page 1 | pg 2 | own 0     | own 1 ...   |
//
struct Tile {
  int64_t begin = 0;      // its first key
  int64_t keys = 0;       // without the keys past num_keys; may be 0 in the own chunk
  int64_t page = -1;      // -1: of the own chunk
  int64_t own_begin = 0;  // first token of an own tile
  int64_t own_tokens = 0;
};

// What one launch reads: the own chunk's tiles and the pages of the wave, in the order in which
// they are added up, and which query block attends to which page. The constructor checks all of it.
class Wave {
 public:
  Wave(const Shape& shape, const Visibility& visibility, const PastPages& past, bool own_chunk);

  const std::vector<Tile>& tiles(int64_t batch) const { return tiles_[static_cast<size_t>(batch)]; }
  int64_t longest_tile() const { return longest_tile_; }  // in keys, of all sequences
  bool attends(int64_t batch, int64_t block, int64_t kv_head, const Tile& tile) const;

  // Byte offset of the page in the pool.
  int64_t page_offset(int64_t batch, int64_t page) const {
    return past_.block_table[batch * past_.table_stride + page] * past_.kv_slot_bytes;
  }

 private:
  void check_past() const;
  void read_selection();
  void check_residency(int64_t batch, int64_t block, const KeyInterval& reach) const;
  int64_t selection_row(int64_t batch, int64_t block, int64_t head) const {
    return (batch * blocks_ + block) * past_.selection_heads + head;
  }

  const Shape shape_;
  const PastPages past_;
  const int64_t num_pages_;
  const int64_t blocks_;
  std::vector<std::vector<Tile>> tiles_;
  int64_t longest_tile_ = 0;
  std::vector<uint8_t> listed_;  // [B, Q, selection_heads, pages of the wave]
};

}  // namespace oomb::attention::cpu
