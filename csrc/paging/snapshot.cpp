#include <sstream>
#include <string>
#include <vector>

#include "paging/page_manager.h"

namespace oomb::paging {

namespace {

void write_pool(std::ostream& out, const char* name, const memory::SlotPoolState& pool) {
  out << "\"" << name << "\": {\"slot_bytes\": " << pool.slot_bytes
      << ", \"max_slots\": " << pool.max_slots << ", \"mapped_slots\": " << pool.mapped_slots
      << ", \"taken_slots\": " << pool.taken_slots << ", \"free_slots\": " << pool.free_slots
      << ", \"committed_bytes\": " << pool.committed_bytes << "}";
}

using StateCounts = std::array<int64_t, kNumResidencies>;

void write_states(std::ostream& out, const StateCounts& counts) {
  out << "{";
  for (size_t state = 0; state < counts.size(); ++state) {
    out << (state > 0 ? ", " : "") << "\"" << name_of(static_cast<Residency>(state))
        << "\": " << counts[state];
  }
  out << "}";
}

}  // namespace

std::string PageManager::snapshot() const {
  constexpr size_t kTransitions = 100;
  std::ostringstream out;
  out << "{\"active\": " << (active_ ? "true" : "false") << ", ";
  write_pool(out, "device", device_.pool->state());
  out << ", ";
  write_pool(out, "host", host_.pool->state());
  out << ", \"events\": " << engine_->events_created();
  if (!active_) {
    out << "}";
    return out.str();
  }
  const int64_t layers = space_.num_layers();
  std::vector<StateCounts> per_layer(static_cast<size_t>(3 * layers), StateCounts{});
  StateCounts all{};
  for (PageIndex index = 0; index < space_.size(); ++index) {
    const auto state = static_cast<size_t>(tiers_[index].state);
    const int64_t kind = static_cast<int64_t>(space_.kind(index));
    ++per_layer[static_cast<size_t>(kind * layers + space_.layer(index))][state];
    ++all[state];
  }
  out << ", \"visit\": " << now_ << ", \"visits\": " << schedule_.size()
      << ", \"pinned_slots\": " << tiers_.pinned_slots()
      << ", \"stream_slots\": " << prefetcher_.window()
      << ", \"ahead_slots\": " << tiers_.ahead_slots()
      << ", \"in_flight\": {\"loads\": " << tiers_.in_flight_loads()
      << ", \"stores\": " << tiers_.in_flight_stores() << "}, \"pages\": ";
  write_states(out, all);
  out << ", \"layers\": [";
  for (int64_t layer = 0; layer < layers; ++layer) {
    out << (layer > 0 ? ", " : "") << "{\"kv\": ";
    write_states(out, per_layer[static_cast<size_t>(layer)]);
    out << ", \"gradients\": ";
    write_states(out, per_layer[static_cast<size_t>(layers + layer)]);
    out << ", \"outputs\": ";
    write_states(out, per_layer[static_cast<size_t>(2 * layers + layer)]);
    out << "}";
  }
  out << "], \"transitions\": [";
  bool first = true;
  for (const Transition& transition : tiers_.log().last(kTransitions)) {
    const PageId id = space_.id(transition.index);
    out << (first ? "" : ", ") << "{\"kind\": \"" << name_of(id.kind)
        << "\", \"layer\": " << id.layer << ", \"sequence\": " << id.sequence
        << ", \"page\": " << id.page << ", \"from\": \"" << name_of(transition.from)
        << "\", \"to\": \"" << name_of(transition.to) << "\"}";
    first = false;
  }
  out << "]}";
  return out.str();
}

}  // namespace oomb::paging
