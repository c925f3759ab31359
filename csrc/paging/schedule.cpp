#include "paging/schedule.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace oomb::paging {

Schedule::Schedule(const PageSpace& space, std::vector<Visit> visits)
    : space_(space),
      visits_(std::move(visits)),
      listed_(visits_.size(), false),
      lists_(visits_.size()),
      of_layer_(static_cast<size_t>(space.num_layers())),
      uses_(static_cast<size_t>(space.num_layers())),
      found_(static_cast<size_t>(space.num_layers())),
      max_pages_(std::max<int64_t>(1, space.max_pages())),
      positions_(space.positions()) {
  for (int32_t i = 0; i < size(); ++i) {
    of_layer_[static_cast<size_t>((*this)[i].layer)].push_back(i);
  }
  ranged_ = of_layer_;
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

std::vector<int32_t>& Schedule::uses_of(int32_t layer, int64_t position) {
  auto& of_layer = uses_[static_cast<size_t>(layer)];
  if (of_layer.empty()) of_layer.resize(static_cast<size_t>(positions_));
  return of_layer[static_cast<size_t>(position)];
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
  const int32_t layer = (*this)[visit].layer;
  if (has_pages(visit)) {
    for (const int64_t position : pages(visit)) {
      auto& uses = uses_of(layer, position);
      uses.erase(std::lower_bound(uses.begin(), uses.end(), visit, std::greater<>()));
    }
  } else {
    auto& ranged = ranged_[static_cast<size_t>(layer)];
    ranged.erase(std::lower_bound(ranged.begin(), ranged.end(), visit));
    found_[static_cast<size_t>(layer)] = {};
  }
  positions = ordered(std::move(positions));
  // Lists mostly come in from the last visit to the first (the sweep replays the fill backwards),
  // so that a new visit goes to the end of these descending lists.
  for (const int64_t position : positions) {
    auto& uses = uses_of(layer, position);
    uses.insert(std::lower_bound(uses.begin(), uses.end(), visit, std::greater<>()), visit);
  }
  lists_[static_cast<size_t>(visit)] = std::move(positions);
  listed_[static_cast<size_t>(visit)] = true;
}

int32_t Schedule::heir(int32_t visit) const {
  const Visit& from = (*this)[visit];
  const auto& visits = of_layer_[static_cast<size_t>(from.layer)];
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
  const auto page = static_cast<int32_t>(position % max_pages_);
  return std::min(next_in_ranges(kind, layer, page, after),
                  next_in_lists(kind, layer, position, after));
}

size_t Schedule::first_ranged_after(int32_t layer, int32_t after) const {
  Found& found = found_[static_cast<size_t>(layer)];
  if (found.after != after) {
    const auto& ranged = ranged_[static_cast<size_t>(layer)];
    const auto place = std::upper_bound(ranged.begin(), ranged.end(), after);
    found = {after, static_cast<size_t>(place - ranged.begin())};
  }
  return found.at;
}

int32_t Schedule::next_in_ranges(PageKind kind, int32_t layer, int32_t page, int32_t after) const {
  const auto& ranged = ranged_[static_cast<size_t>(layer)];
  for (size_t i = first_ranged_after(layer, after); i < ranged.size(); ++i) {
    const Visit& visit = (*this)[ranged[i]];
    if (visit.touches(kind) && visit.first <= page && page < visit.last) return ranged[i];
  }
  return size();
}

int32_t Schedule::next_in_lists(PageKind kind, int32_t layer, int64_t position,
                                int32_t after) const {
  const auto& of_layer = uses_[static_cast<size_t>(layer)];
  if (of_layer.empty()) return size();
  const auto& uses = of_layer[static_cast<size_t>(position)];
  // Descending: the visits later than `after` are the front part.
  auto it = std::lower_bound(uses.begin(), uses.end(), after, std::greater<>());
  while (it != uses.begin()) {
    --it;
    if ((*this)[*it].touches(kind)) return *it;
  }
  return size();
}

}  // namespace oomb::paging
