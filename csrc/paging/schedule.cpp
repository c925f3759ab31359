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
  }
  // A page's gradient is read once: searching ranges for that one visit would take the longer the
  // more chunks there are.
  for (int32_t i = 0; i < size(); ++i) {
    const Visit& visit = (*this)[i];
    if (visit.kind != VisitKind::kReadGradient) continue;
    std::vector<int64_t> positions;
    space.for_each_position(visit.first, visit.last,
                            [&](int64_t position) { positions.push_back(position); });
    set_pages(i, std::move(positions));
  }
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

void Schedule::set_pages(int32_t visit, std::vector<int64_t> positions) {
  Layer& layer = layer_of(visit);
  const int32_t place = place_[static_cast<size_t>(visit)];
  if (has_pages(visit)) {
    for (const int64_t position : pages(visit)) layer.uses.clear(position, place);
  } else {
    layer.ranged.erase(std::lower_bound(layer.ranged.begin(), layer.ranged.end(), visit));
    layer.next_ranged = {};
  }
  positions = ordered(std::move(positions));
  for (const int64_t position : positions) layer.uses.set(position, place);
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
  const Layer& of = layers_[static_cast<size_t>(layer)];
  const auto page = static_cast<int32_t>(position % max_pages_);
  const int32_t ranged = next_in_ranges(kind, layer, page, after);
  const auto begin = static_cast<int32_t>(first_after(of.visits, after, of.next));
  const auto end = ranged < size() ? place_[static_cast<size_t>(ranged)]
                                   : static_cast<int32_t>(of.visits.size());
  const int32_t place = of.uses.first(position, of.touching[static_cast<size_t>(kind)], begin, end);
  return place < end ? of.visits[static_cast<size_t>(place)] : ranged;
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
