#include "paging/schedule.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace oomb::paging {

Schedule::Schedule(const PageSpace& space, std::vector<Visit> visits)
    : space_(space),
      visits_(std::move(visits)),
      listed_(visits_.size(), false),
      lists_(visits_.size()),
      place_(visits_.size()),
      layers_(static_cast<size_t>(space.num_layers())),
      max_pages_(std::max<int64_t>(1, space.max_pages())) {
  for (int32_t i = 0; i < size(); ++i) {
    if (!(*this)[i].touches(PageKind::kKeyValue)) continue;
    Layer& layer = layer_of(i);
    const size_t place = layer.visits.size();
    place_[static_cast<size_t>(i)] = static_cast<int32_t>(place);
    layer.visits.push_back(i);
    for (const PageKind kind : {PageKind::kKeyValue, PageKind::kGradient}) {
      auto& touching = layer.touching[static_cast<size_t>(kind)];
      touching.resize(place / 64 + 1, 0);
      if ((*this)[i].touches(kind)) touching.back() |= uint64_t{1} << (place % 64);
    }
  }
  for (Layer& layer : layers_) {
    layer.ranged = layer.visits;
    layer.uses = UseBits(space.positions(), std::ssize(layer.visits));
    layer.output_reads.assign(static_cast<size_t>(space.outputs()), -1);
  }
  for (int32_t i = 0; i < size(); ++i) {
    const Visit& visit = (*this)[i];
    if (visit.kind == VisitKind::kReadOutput) {
      std::fill_n(layer_of(i).output_reads.begin() + visit.first, visit.last - visit.first, i);
    }
    if (visit.kind != VisitKind::kReadGradient) continue;
    std::vector<int64_t> positions;
    space.for_each_position(visit.first, visit.last,
                            [&](int64_t position) { positions.push_back(position); });
    set_pages(i, std::move(positions));
  }
}

int64_t Schedule::pages_read() const {
  int64_t pages = 0;
  std::vector<int32_t> change;  // at each page, of the number of visits whose range holds it
  std::vector<int64_t> before;  // pages before each one that are in some range
  for (const Layer& layer : layers_) {
    change.assign(static_cast<size_t>(max_pages_) + 1, 0);
    for (const int32_t i : layer.visits) {
      ++change[static_cast<size_t>((*this)[i].first)];
      --change[static_cast<size_t>((*this)[i].last)];
    }
    before.assign(1, 0);
    int64_t ranges = 0;
    for (const int32_t begun : change) {
      ranges += begun;
      before.push_back(before.back() + (ranges > 0 ? 1 : 0));
    }
    for (int64_t b = 0; b < space_.batch(); ++b) {
      pages += before[static_cast<size_t>(space_.pages_of(b))];
    }
  }
  return pages;
}

std::vector<int64_t> Schedule::ordered(std::vector<int64_t> positions) const {
  const auto earlier = [this](int64_t left, int64_t right) {
    return std::pair(left % max_pages_, left) < std::pair(right % max_pages_, right);
  };
  if (!std::is_sorted(positions.begin(), positions.end(), earlier)) {
    std::sort(positions.begin(), positions.end(), earlier);
  }
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  return positions;
}

void Schedule::use(int32_t visit, std::span<const int64_t> positions, bool used) {
  Layer& layer = layer_of(visit);
  if ((*this)[visit].kind == VisitKind::kReadGradient) {
    layer.gradient_reads.resize(static_cast<size_t>(space_.positions()));
    for (const int64_t position : positions) {
      auto& reads = layer.gradient_reads[static_cast<size_t>(position)];
      const auto place = std::lower_bound(reads.begin(), reads.end(), visit);
      if (used) {
        reads.insert(place, visit);
      } else {
        reads.erase(place);
      }
    }
    return;
  }
  const int32_t place = place_[static_cast<size_t>(visit)];
  for (const int64_t position : positions) {
    if (used) {
      layer.uses.set(position, place);
    } else {
      layer.uses.clear(position, place);
    }
  }
}

void Schedule::set_pages(int32_t visit, std::vector<int64_t> positions) {
  if (has_pages(visit)) {
    use(visit, pages(visit), false);
  } else if ((*this)[visit].touches(PageKind::kKeyValue)) {
    Layer& layer = layer_of(visit);
    layer.ranged.erase(std::lower_bound(layer.ranged.begin(), layer.ranged.end(), visit));
    layer.next_ranged = {};
  }
  positions = ordered(std::move(positions));
  use(visit, positions, true);
  lists_[static_cast<size_t>(visit)] = std::move(positions);
  listed_[static_cast<size_t>(visit)] = true;
}

int32_t Schedule::heir(int32_t visit) const {
  const Visit& from = (*this)[visit];
  const auto& visits = layers_[static_cast<size_t>(from.layer)].visits;
  auto it = std::upper_bound(visits.begin(), visits.end(), visit);
  while (it != visits.end() && !(*this)[*it].touches(PageKind::kKeyValue)) ++it;
  if (it == visits.end() || has_pages(*it)) return -1;
  const Visit& to = (*this)[*it];
  return to.first <= from.first && from.last <= to.last ? *it : -1;
}

std::span<const int64_t> Schedule::pages_between(std::span<const int64_t> positions, int64_t begin,
                                                 int64_t end) const {
  const auto before = [this](int64_t page) {
    return [this, page](int64_t position) { return position % max_pages_ < page; };
  };
  const auto first = std::partition_point(positions.begin(), positions.end(), before(begin));
  const auto last = std::partition_point(first, positions.end(), before(end));
  return {first, last};
}

int32_t Schedule::next_use(PageKind kind, int32_t layer, int64_t position, int32_t after) const {
  if (kind == PageKind::kOutput) {
    const auto& reads = layers_[static_cast<size_t>(layer)].output_reads;
    const int32_t visit = reads[static_cast<size_t>(position)];
    return visit > after ? visit : size();
  }
  const auto page = static_cast<int32_t>(position % max_pages_);
  const int32_t ranged = next_in_ranges(kind, layer, page, after);
  const int32_t next = next_in_lists(kind, layer, position, after, ranged);
  if (kind == PageKind::kKeyValue) return next;
  return std::min(next, next_gradient_read(layer, position, after));
}

// `before` if there is none earlier.
int32_t Schedule::next_in_lists(PageKind kind, int32_t layer, int64_t position, int32_t after,
                                int32_t before) const {
  const Layer& of = layers_[static_cast<size_t>(layer)];
  const auto begin = static_cast<int32_t>(first_after(of.visits, after, of.next));
  const auto end = before < size() ? place_[static_cast<size_t>(before)]
                                   : static_cast<int32_t>(of.visits.size());
  const int32_t place = of.uses.first(position, of.touching[static_cast<size_t>(kind)], begin, end);
  return place < end ? of.visits[static_cast<size_t>(place)] : before;
}

int32_t Schedule::next_gradient_read(int32_t layer, int64_t position, int32_t after) const {
  const auto& of_layer = layers_[static_cast<size_t>(layer)].gradient_reads;
  if (of_layer.empty()) return size();
  const auto& reads = of_layer[static_cast<size_t>(position)];
  const auto it = std::upper_bound(reads.begin(), reads.end(), after);
  return it == reads.end() ? size() : *it;
}

size_t Schedule::first_after(const std::vector<int32_t>& visits, int32_t after, Found& found) {
  if (found.after != after) {
    const auto place = std::upper_bound(visits.begin(), visits.end(), after);
    found = {after, static_cast<size_t>(place - visits.begin())};
  }
  return found.at;
}

int32_t Schedule::next_in_ranges(PageKind kind, int32_t layer, int32_t page, int32_t after) const {
  const Layer& of = layers_[static_cast<size_t>(layer)];
  for (size_t i = first_after(of.ranged, after, of.next_ranged); i < of.ranged.size(); ++i) {
    const Visit& visit = (*this)[of.ranged[i]];
    if (visit.touches(kind) && visit.first <= page && page < visit.last) return of.ranged[i];
  }
  return size();
}

}  // namespace oomb::paging
