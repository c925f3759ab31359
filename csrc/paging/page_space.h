#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace oomb::paging {

enum class PageKind : uint8_t { kKeyValue, kGradient };

struct PageId {
  PageKind kind = PageKind::kKeyValue;
  int32_t layer = 0;
  int32_t sequence = 0;
  int32_t page = 0;
};

// Number of one page among all pages of a call.
using PageIndex = int64_t;

// Every page a call can have, numbered so that the pages of one (kind, layer, sequence) lie in a
// row:
//     index = ((kind * layers + layer) * batch + sequence) * max_pages + page
// `position` is the part of it inside a layer: sequence * max_pages + page.
class PageSpace {
 public:
  PageSpace() = default;
  PageSpace(int64_t num_layers, std::vector<int32_t> pages_per_sequence)
      : num_layers_(num_layers), pages_(std::move(pages_per_sequence)) {
    for (const int32_t pages : pages_) max_pages_ = std::max<int64_t>(max_pages_, pages);
  }

  int64_t num_layers() const { return num_layers_; }
  int64_t batch() const { return static_cast<int64_t>(pages_.size()); }
  int64_t max_pages() const { return max_pages_; }
  int64_t pages_of(int64_t sequence) const { return pages_[static_cast<size_t>(sequence)]; }
  int64_t positions() const { return batch() * max_pages_; }
  int64_t size() const { return 2 * num_layers_ * positions(); }

  PageIndex index(PageKind kind, int64_t layer, int64_t position) const {
    return (static_cast<int64_t>(kind) * num_layers_ + layer) * positions() + position;
  }

  int64_t position(PageIndex index) const { return index % positions(); }
  int64_t page(PageIndex index) const { return index % max_pages_; }

  // Positions of pages [begin, end) of every sequence by page, then sequence: the order of waves. A
  // visitor that returns false stops it; the result says whether it got to the end.
  template <typename Visitor>
  bool for_each_position(int64_t begin, int64_t end, Visitor visitor) const {
    for (int64_t page = begin; page < end; ++page) {
      for (int64_t b = 0; b < batch(); ++b) {
        if (page < pages_of(b) && !visit(visitor, b * max_pages_ + page)) return false;
      }
    }
    return true;
  }

  template <typename Visitor>
  static bool visit(Visitor& visitor, int64_t position) {
    if constexpr (std::is_void_v<std::invoke_result_t<Visitor, int64_t>>) {
      visitor(position);
      return true;
    } else {
      return visitor(position);
    }
  }

  PageId id(PageIndex index) const {
    const int64_t row = index / positions();
    const int64_t position = index - row * positions();
    return {static_cast<PageKind>(row / num_layers_), static_cast<int32_t>(row % num_layers_),
            static_cast<int32_t>(position / max_pages_),
            static_cast<int32_t>(position % max_pages_)};
  }

 private:
  int64_t num_layers_ = 0;
  std::vector<int32_t> pages_;
  int64_t max_pages_ = 0;
};

}  // namespace oomb::paging
