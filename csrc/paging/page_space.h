#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace oomb::paging {

enum class PageKind : uint8_t {
  kKeyValue,
  kGradient,
  kOutput  // a piece of a chunk's attention output, kept from the fill for the sweep
};

constexpr const char* name_of(PageKind kind) {
  return kind == PageKind::kKeyValue ? "kv" : kind == PageKind::kGradient ? "gradient" : "output";
}

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
// `position` is the part of it inside a layer: sequence * max_pages + page. Behind them come the
// pieces of kept outputs, which know no sequences: `outputs` of each layer, numbered by position.
class PageSpace {
 public:
  PageSpace() = default;
  PageSpace(int64_t num_layers, std::vector<int32_t> pages_per_sequence, int64_t outputs = 0)
      : num_layers_(num_layers), pages_(std::move(pages_per_sequence)), outputs_(outputs) {
    for (const int32_t pages : pages_) max_pages_ = std::max<int64_t>(max_pages_, pages);
  }

  int64_t num_layers() const { return num_layers_; }
  int64_t batch() const { return static_cast<int64_t>(pages_.size()); }
  int64_t max_pages() const { return max_pages_; }
  int64_t pages_of(int64_t sequence) const { return pages_[static_cast<size_t>(sequence)]; }
  int64_t positions() const { return batch() * max_pages_; }
  int64_t outputs() const { return outputs_; }  // of a layer
  int64_t size() const { return outputs_begin() + num_layers_ * outputs_; }

  PageIndex index(PageKind kind, int64_t layer, int64_t position) const {
    if (kind == PageKind::kOutput) return outputs_begin() + layer * outputs_ + position;
    return (static_cast<int64_t>(kind) * num_layers_ + layer) * positions() + position;
  }

  PageKind kind(PageIndex index) const {
    if (index >= outputs_begin()) return PageKind::kOutput;
    return 2 * index < outputs_begin() ? PageKind::kKeyValue : PageKind::kGradient;
  }
  int64_t layer(PageIndex index) const {
    if (index >= outputs_begin()) return (index - outputs_begin()) / outputs_;
    return index / positions() % num_layers_;
  }
  int64_t position(PageIndex index) const {
    if (index >= outputs_begin()) return (index - outputs_begin()) % outputs_;
    return index % positions();
  }
  // Of a piece of an output: its position.
  int64_t page(PageIndex index) const {
    return index >= outputs_begin() ? position(index) : index % max_pages_;
  }

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
    const bool output = index >= outputs_begin();
    return {kind(index), static_cast<int32_t>(layer(index)),
            output ? 0 : static_cast<int32_t>(position(index) / max_pages_),
            static_cast<int32_t>(page(index))};
  }

 private:
  PageIndex outputs_begin() const { return 2 * num_layers_ * positions(); }

  int64_t num_layers_ = 0;
  std::vector<int32_t> pages_;
  int64_t max_pages_ = 0;
  int64_t outputs_ = 0;
};

}  // namespace oomb::paging
