#include "attention/cpu/panels.h"

#include <algorithm>
#include <limits>

#include "common/math.h"

namespace oomb::attention::cpu {

Panels::Panels(const Shape& shape, const Visibility& visibility, int64_t num_past, int64_t lanes,
               int64_t panel_rows, int64_t batch, int64_t kv_head, int64_t block_begin,
               int64_t block_end)
    : lanes_(lanes) {
  const int64_t group = shape.query_heads / shape.kv_heads;
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t token_begin = block * shape.page_size;
    const int64_t token_end = std::min(shape.chunk, token_begin + shape.page_size);
    const int64_t rows = group * (token_end - token_begin);
    const int64_t first_row = static_cast<int64_t>(rows_.size());
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t token = token_begin; token < token_end; ++token) {
        rows_.push_back({head, token, visible_keys(shape, visibility, num_past, batch, token)});
      }
    }
    for (int64_t begin = 0; begin < rows; begin += panel_rows) {
      Panel panel;
      panel.block = block;
      panel.first_row = first_row + begin;
      panel.rows = std::min(panel_rows, rows - begin);
      panel.vectors = ceil_div(panel.rows, lanes);
      panel.any = {std::numeric_limits<int64_t>::max(), 0};
      panel.all = {0, std::numeric_limits<int64_t>::max()};
      for (int64_t i = 0; i < panel.rows; ++i) {
        const KeyInterval& keys = rows_[static_cast<size_t>(panel.first_row + i)].keys;
        panel.all.first = std::max(panel.all.first, keys.first);
        panel.all.last = std::min(panel.all.last, keys.last);
        if (keys.first == keys.last) continue;
        panel.any.first = std::min(panel.any.first, keys.first);
        panel.any.last = std::max(panel.any.last, keys.last);
      }
      panels_.push_back(panel);
    }
  }
}

Cover Panels::cover(int64_t panel, const Tile& tile) const {
  const Panel& p = (*this)[panel];
  const int64_t end = tile.begin + tile.keys;
  if (tile.keys == 0 || p.any.first >= end || p.any.last <= tile.begin) return Cover::kNone;
  return p.all.first <= tile.begin && p.all.last >= end ? Cover::kAll : Cover::kPart;
}

template <typename Real>
void Panels::fill_mask(int64_t panel, const Tile& tile, Real* first, Real* last) const {
  const Panel& p = (*this)[panel];
  const Row* row = rows(panel);
  for (int64_t i = 0; i < p.vectors * lanes_; ++i) {
    const KeyInterval keys = i < p.rows ? row[i].keys : KeyInterval{};
    first[i] = static_cast<Real>(std::clamp<int64_t>(keys.first - tile.begin, 0, tile.keys));
    last[i] = static_cast<Real>(std::clamp<int64_t>(keys.last - tile.begin, 0, tile.keys));
  }
}

template void Panels::fill_mask(int64_t, const Tile&, float*, float*) const;
template void Panels::fill_mask(int64_t, const Tile&, double*, double*) const;

}  // namespace oomb::attention::cpu
