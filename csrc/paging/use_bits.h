#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace oomb::paging {

// Which of a layer's visits use which position: a row of bits for each position, with a bit for
// each visit in the order of time.
//
// A call asks for the next use of all pages of a list, one after the other. Rows are short and lie
// side by side, so that this reads little memory, and forwards; lists of visits would be spread
// over many times as much.
class UseBits {
 public:
  UseBits() = default;
  // Memory comes with the first bit: where all pages are seen nothing gets a list.
  UseBits(int64_t positions, int64_t visits)
      : positions_(static_cast<size_t>(positions)),
        words_((static_cast<size_t>(visits) + 63) / 64) {}

  void set(int64_t position, int32_t visit) {
    if (bits_.empty()) bits_.resize(positions_ * words_, 0);
    word(position, visit) |= bit(visit);
  }
  void clear(int64_t position, int32_t visit) { word(position, visit) &= ~bit(visit); }

  // First visit of [begin, end) that uses the position and is one of `among`; `end`: none.
  int32_t first(int64_t position, std::span<const uint64_t> among, int32_t begin,
                int32_t end) const {
    if (bits_.empty()) return end;
    const uint64_t* row = bits_.data() + static_cast<size_t>(position) * words_;
    uint64_t not_before = ~uint64_t{0} << (begin % 64);
    for (int32_t word = begin / 64; 64 * word < end; ++word) {
      const uint64_t found = row[word] & among[static_cast<size_t>(word)] & not_before;
      if (found != 0) return std::min(end, 64 * word + std::countr_zero(found));
      not_before = ~uint64_t{0};
    }
    return end;
  }

 private:
  static uint64_t bit(int32_t visit) { return uint64_t{1} << (visit % 64); }
  uint64_t& word(int64_t position, int32_t visit) {
    return bits_[static_cast<size_t>(position) * words_ + static_cast<size_t>(visit) / 64];
  }

  size_t positions_ = 0;
  size_t words_ = 0;
  std::vector<uint64_t> bits_;
};

}  // namespace oomb::paging
