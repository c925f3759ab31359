#include "attention/cpu/wave.h"

#include <algorithm>
#include <limits>

#include "common/error.h"
#include "common/math.h"

namespace oomb::attention::cpu {

KeyInterval visible_keys(const Shape& shape, const Visibility& visibility, int64_t num_past,
                         int64_t batch, int64_t row) {
  KeyInterval keys{0, num_past + row + 1};
  if (visibility.window > 0) keys.first = std::max(keys.first, keys.last - visibility.window);
  if (visibility.first_key != nullptr) {
    const int64_t first = visibility.first_key[batch * shape.chunk + row];
    keys.first = std::max(keys.first, first);
  }
  if (visibility.num_keys != nullptr) {
    keys.last = std::min<int64_t>(keys.last, visibility.num_keys[batch]);
  }
  return keys.first < keys.last ? keys : KeyInterval{};
}

Wave::Wave(const Shape& shape, const Visibility& visibility, const PastPages& past, bool own_chunk)
    : shape_(shape),
      past_(past),
      num_pages_(shape.page_size > 0 ? ceil_div(past.num_tokens, shape.page_size) : 0),
      blocks_(shape.page_size > 0 ? ceil_div(shape.chunk, shape.page_size) : 0) {
  check_past();
  if (past_.selection != nullptr) read_selection();

  const int64_t page = shape.page_size;
  for (int64_t batch = 0; batch < shape.batch; ++batch) {
    const int64_t end = visibility.num_keys != nullptr ? visibility.num_keys[batch]
                                                       : std::numeric_limits<int64_t>::max();
    std::vector<Tile>& tiles = tiles_.emplace_back();
    for (int64_t token = 0; own_chunk && token < shape.chunk; token += page) {
      const int64_t begin = past.num_tokens + token;
      const int64_t tokens = std::min(page, shape.chunk - token);
      tiles.push_back({begin, std::clamp<int64_t>(end - begin, 0, tokens), -1, token, tokens});
    }
    for (int64_t p = past.page_begin; p < past.page_end; ++p) {
      const int64_t begin = p * page;
      const int64_t keys = std::min({page, past.num_tokens - begin, end - begin});
      if (keys > 0) tiles.push_back({begin, keys, p, 0, 0});
    }
    for (const Tile& tile : tiles) {
      longest_tile_ = std::max({longest_tile_, tile.keys, tile.own_tokens});
    }
    if (past.page_begin == past.page_end) continue;
    for (int64_t block = 0; block < blocks_; ++block) {
      KeyInterval reach{std::numeric_limits<int64_t>::max(), 0};
      const int64_t last_row = std::min(shape.chunk, (block + 1) * page);
      for (int64_t row = block * page; row < last_row; ++row) {
        const KeyInterval keys = visible_keys(shape, visibility, past.num_tokens, batch, row);
        if (keys.first == keys.last) continue;
        reach.first = std::min(reach.first, keys.first);
        reach.last = std::max(reach.last, keys.last);
      }
      check_residency(batch, block, reach);
    }
  }
}

void Wave::check_past() const {
  expect(shape_.page_size > 0, "page_size", "a number above 0", shape_.page_size);
  expect(shape_.kv_heads > 0 && shape_.query_heads % shape_.kv_heads == 0, "q",
         concat("a multiple of ", shape_.kv_heads, " heads"), shape_.query_heads);
  expect(past_.num_tokens >= 0, "num_past", "a number not below 0", past_.num_tokens);
  expect(
      past_.page_begin >= 0 && past_.page_begin <= past_.page_end && past_.page_end <= num_pages_,
      "page_begin, page_end", concat("a range within the ", num_pages_, " past pages"),
      concat(past_.page_begin, ", ", past_.page_end));
  if (past_.page_begin == past_.page_end) return;
  expect(past_.kv_pool != nullptr, "kv_pool", "an address", "none");
  expect(past_.block_table != nullptr, "block_table", "a table", "none");
  expect(past_.table_stride >= past_.page_end, "block_table",
         concat("at least ", past_.page_end, " pages"), past_.table_stride);
}

void Wave::read_selection() {
  expect(past_.selection_heads == 1 || past_.selection_heads == shape_.kv_heads, "selection",
         concat("1 or ", shape_.kv_heads, " heads"), past_.selection_heads);
  const int64_t pages = past_.page_end - past_.page_begin;
  const int64_t rows = shape_.batch * blocks_ * past_.selection_heads;
  listed_.assign(static_cast<size_t>(rows * pages), 0);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* list = past_.selection + row * past_.budget;
    int64_t previous = -1;
    for (int64_t i = 0; i < past_.budget; ++i) {
      if (list[i] == -1) {
        // Padding ends the list.
        for (int64_t rest = i; rest < past_.budget; ++rest) {
          expect(list[rest] == -1, "selection", "page ids, then only -1", list[rest]);
        }
        break;
      }
      if (list[i] < 0 || list[i] >= num_pages_) {
        expect(false, "selection", concat("pages below ", num_pages_), list[i]);
      }
      if (list[i] <= previous) {
        expect(false, "selection", "ascending pages without duplicates",
               concat(list[i], " after ", previous));
      }
      previous = list[i];
      if (list[i] >= past_.page_begin && list[i] < past_.page_end) {
        listed_[static_cast<size_t>(row * pages + list[i] - past_.page_begin)] = 1;
      }
    }
  }
}

void Wave::check_residency(int64_t batch, int64_t block, const KeyInterval& reach) const {
  const int64_t pages = past_.page_end - past_.page_begin;
  for (int64_t page = past_.page_begin; page < past_.page_end; ++page) {
    bool needed = false;
    if (past_.selection == nullptr) {
      needed = page * shape_.page_size < reach.last && (page + 1) * shape_.page_size > reach.first;
    } else {
      for (int64_t head = 0; head < past_.selection_heads; ++head) {
        const int64_t entry = selection_row(batch, block, head) * pages + page - past_.page_begin;
        needed = needed || listed_[static_cast<size_t>(entry)] != 0;
      }
    }
    if (!needed) continue;
    const int32_t slot = past_.block_table[batch * past_.table_stride + page];
    if (slot < 0 || slot >= past_.kv_num_slots) {
      expect(false, "block_table",
             concat("page ", page, " of sequence ", batch, " in a slot below ", past_.kv_num_slots),
             slot);
    }
  }
}

bool Wave::attends(int64_t batch, int64_t block, int64_t kv_head, const Tile& tile) const {
  if (tile.page < 0 || past_.selection == nullptr) return true;
  const int64_t head = past_.selection_heads == 1 ? 0 : kv_head;
  const int64_t pages = past_.page_end - past_.page_begin;
  const int64_t entry = selection_row(batch, block, head) * pages + tile.page - past_.page_begin;
  return listed_[static_cast<size_t>(entry)] != 0;
}

}  // namespace oomb::attention::cpu
