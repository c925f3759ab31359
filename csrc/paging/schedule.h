#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "paging/page_space.h"
#include "paging/use_bits.h"

namespace oomb::paging {

enum class VisitKind : int32_t {
  kRead = 0,          // reads KV pages
  kAccumulate = 1,    // reads KV pages, adds to their gradient pages
  kReadGradient = 2,  // reads gradient pages, after which they are dead
  kReadOutput = 3     // reads a kept output, after which it is dead
};

// One step of the access order: a layer's pages [first, last) of every sequence, or the exact list
// set for it. A kReadGradient has its list from the start; a kReadOutput reads the layer's pieces
// of outputs [first, last), each of which no other visit reads.
struct Visit {
  int32_t layer = 0;
  VisitKind kind = VisitKind::kRead;
  int32_t first = 0;
  int32_t last = 0;

  bool touches(PageKind page) const {
    switch (page) {
      case PageKind::kKeyValue: return kind == VisitKind::kRead || kind == VisitKind::kAccumulate;
      case PageKind::kGradient:
        return kind == VisitKind::kAccumulate || kind == VisitKind::kReadGradient;
      case PageKind::kOutput: return kind == VisitKind::kReadOutput;
    }
    return false;
  }
};

// The known future: what is used when. Ranges answer in closed form (a scan over the layer's visits
// that nearly always ends at once); exact lists through bits, position -> visits. A page's gradient
// is read once as a rule: bits for those visits would be nearly all zero.
class Schedule {
 public:
  Schedule() = default;
  Schedule(const PageSpace& space, std::vector<Visit> visits);

  int32_t size() const { return static_cast<int32_t>(visits_.size()); }
  const Visit& operator[](int32_t visit) const { return visits_[static_cast<size_t>(visit)]; }

  // Positions (sequence * max_pages + page) that this visit touches, instead of its range. Kept
  // ordered by page, then sequence: the order of waves.
  void set_pages(int32_t visit, std::vector<int64_t> positions);
  bool has_pages(int32_t visit) const { return listed_[static_cast<size_t>(visit)]; }
  // Whether it is known what a visit touches, where ranges of KV pages are an upper bound.
  bool is_exact(int32_t visit) const {
    return has_pages(visit) || (*this)[visit].kind == VisitKind::kReadOutput;
  }
  std::span<const int64_t> pages(int32_t visit) const { return lists_[static_cast<size_t>(visit)]; }

  // By page, then sequence, each once.
  std::vector<int64_t> ordered(std::vector<int64_t> positions) const;

  // The part of an ordered list that lies in pages [begin, end).
  std::span<const int64_t> pages_between(std::span<const int64_t> positions, int64_t begin,
                                         int64_t end) const;

  // What a visit touches of pages [begin, end), as PageSpace::for_each_position.
  template <typename Visitor>
  bool for_each_position(int32_t visit, int64_t begin, int64_t end, Visitor visitor) const {
    if ((*this)[visit].kind == VisitKind::kReadOutput) {
      for (int64_t position = begin; position < end; ++position) {
        if (!PageSpace::visit(visitor, position)) return false;
      }
      return true;
    }
    if (!has_pages(visit)) return space_.for_each_position(begin, end, visitor);
    for (const int64_t position : pages_between(pages(visit), begin, end)) {
      if (!PageSpace::visit(visitor, position)) return false;
    }
    return true;
  }

  // KV pages of all layers and sequences that some visit reads: in a call no others are made.
  int64_t pages_read() const;

  // The visit at which pages expected at `visit`, which has got a list that they are not in, are
  // expected next: the layer's next one that reads KV pages, if it has no list and its range holds
  // that of `visit`. Else -1: they part.
  int32_t heir(int32_t visit) const;

  // First visit later than `after` that touches the page; size() if there is none.
  int32_t next_use(PageKind kind, int32_t layer, int64_t position, int32_t after) const;

 private:
  // Queries come in runs of equal (layer, after): where the last search ended.
  struct Found {
    int32_t after = -2;
    size_t at = 0;
  };
  static size_t first_after(const std::vector<int32_t>& visits, int32_t after, Found& found);
  int32_t next_in_ranges(PageKind kind, int32_t layer, int32_t page, int32_t after) const;
  int32_t next_in_lists(PageKind kind, int32_t layer, int64_t position, int32_t after,
                        int32_t before) const;
  int32_t next_gradient_read(int32_t layer, int64_t position, int32_t after) const;

  // What is asked of one layer. Among the visits that read its KV pages, one is known by its place.
  struct Layer {
    std::vector<int32_t> visits;
    std::vector<int32_t> ranged;                       // those without a list
    UseBits uses;                                      // those with one
    std::array<std::vector<uint64_t>, 2> touching;     // per kind of page: bits of visits
    std::vector<std::vector<int32_t>> gradient_reads;  // per position: visits, ascending
    std::vector<int32_t> output_reads;                 // per piece of an output: its visit or -1
    mutable Found next, next_ranged;
  };
  void use(int32_t visit, std::span<const int64_t> positions, bool used);
  Layer& layer_of(int32_t visit) { return layers_[static_cast<size_t>((*this)[visit].layer)]; }

  PageSpace space_;
  std::vector<Visit> visits_;
  std::vector<bool> listed_;
  std::vector<std::vector<int64_t>> lists_;  // per visit
  std::vector<int32_t> place_;               // per visit that reads KV pages
  std::vector<Layer> layers_;
  int64_t max_pages_ = 1;
};

}  // namespace oomb::paging
