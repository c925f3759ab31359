#include "attention/sm80/forward_plan.h"

#include <algorithm>

#include "common/math.h"

namespace oomb::attention::sm80 {
namespace {

constexpr int kMostPieces = 8;
constexpr int64_t kHandoverKeys = 384;  // what a piece costs beside its keys, in keys

// Keys that a row sees, on average and at most.
int64_t visible_keys(const ForwardParams& p) {
  const Shape& shape = p.shape;
  int64_t pages = p.past.page_end - p.past.page_begin;
  if (p.past.selection != nullptr) pages = std::min(pages, p.past.budget);
  const int64_t keys = pages * shape.page_size + (p.own_chunk ? shape.chunk / 2 : 0);
  const int64_t window = p.visibility.window;
  return window > 0 ? std::min(keys, window) : keys;
}

}  // namespace

ForwardPlan::ForwardPlan(const ForwardParams& p, int rows, int at_once)
    : query_tiles(static_cast<int>(ceil_div(p.shape.chunk, rows))),
      tiles(static_cast<int>(query_tiles * p.shape.query_heads * p.shape.batch)) {
  keep_whole();
  if (tiles <= at_once) return;
  const int parted = tiles - std::max(tiles / at_once - 1, 0) * at_once;
  const int64_t keys = visible_keys(p);
  int64_t least = ceil_div(parted, at_once) * keys;
  for (int count = 2; count <= kMostPieces; ++count) {
    const int64_t rounds = ceil_div(int64_t{parted} * count, at_once);
    const int64_t cost = rounds * (keys / count + kHandoverKeys);
    if (cost < least) least = cost, pieces = count;
  }
  if (pieces == 1) return;
  whole = tiles - parted;
  units = whole + parted * pieces;
  const auto take = [&](int64_t count) {
    char* place = p.workspace == nullptr ? nullptr : static_cast<char*>(p.workspace) + bytes;
    bytes += align_up(count * 4, 256);
    return place;
  };
  next_unit = reinterpret_cast<int32_t*>(take(1));
  turns = reinterpret_cast<int32_t*>(take(parted));
  clear_bytes = bytes;
  const int64_t state_rows = int64_t{parted} * rows;
  acc = reinterpret_cast<float*>(take(state_rows * p.shape.head_dim));
  max = reinterpret_cast<float*>(take(state_rows));
  sum = reinterpret_cast<float*>(take(state_rows));
}

void ForwardPlan::keep_whole() {
  whole = units = tiles;
  pieces = 1;
  next_unit = turns = nullptr;
  acc = max = sum = nullptr;
  clear_bytes = bytes = 0;
}

}  // namespace oomb::attention::sm80
