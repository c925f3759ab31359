#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/cpu/wave.h"
#include "attention/params.h"

namespace oomb::attention::cpu {

// How much of a tile a panel sees.
enum class Cover { kNone, kPart, kAll };

// The query rows of one kv head, in panels of one row per vector lane. The rows of a query block
// and of all heads of the group see the same pages and share panels:
//
//   block 0: head 0 rows 0..P-1, head 1 rows 0..P-1, ... | block 1: head 0 rows P..2P-1, ...
//            '--- panel 0 ---''--- panel 1 ---' ...        a new panel starts with each block
//
class Panels {
 public:
  struct Row {
    int64_t head = 0;   // query head
    int64_t token = 0;  // of the chunk
    KeyInterval keys;
  };
  struct Panel {
    int64_t block = 0;
    int64_t first_row = 0;
    int64_t rows = 0;
    int64_t vectors = 0;
    KeyInterval any;  // keys that some row may see
    KeyInterval all;  // keys that every row sees; may be empty
  };

  Panels(const Shape& shape, const Visibility& visibility, int64_t num_past, int64_t lanes,
         int64_t panel_rows, int64_t batch, int64_t kv_head, int64_t block_begin,
         int64_t block_end);

  int64_t size() const { return static_cast<int64_t>(panels_.size()); }
  const Panel& operator[](int64_t panel) const { return panels_[static_cast<size_t>(panel)]; }
  const Row* rows(int64_t panel) const { return rows_.data() + (*this)[panel].first_row; }

  Cover cover(int64_t panel, const Tile& tile) const;

  // Per lane the keys it sees, relative to the tile: first [panel_rows], last [panel_rows].
  template <typename Real>
  void fill_mask(int64_t panel, const Tile& tile, Real* first, Real* last) const;

 private:
  int64_t lanes_;
  std::vector<Panel> panels_;
  std::vector<Row> rows_;
};

}  // namespace oomb::attention::cpu
