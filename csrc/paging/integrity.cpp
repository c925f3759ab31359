#include <string>
#include <vector>

#include "common/error.h"
#include "paging/tiers.h"

namespace oomb::paging {

using memory::kNoSlot;
using memory::Slot;

namespace {

// Counts who owns what in one tier and complains about a slot with two owners or a free one in use.
class Ownership {
 public:
  Ownership(const char* tier, const memory::SlotPool& pool)
      : tier_(tier), pool_(pool), owned_(static_cast<size_t>(pool.mapped_slots()), false) {}

  void add(Slot slot, std::string& problems) {
    if (slot < 0 || slot >= pool_.mapped_slots()) {
      problems += concat("\n  ", tier_, " slot ", slot, " does not exist");
      return;
    }
    if (owned_[static_cast<size_t>(slot)]) {
      problems += concat("\n  ", tier_, " slot ", slot, " has two owners");
    }
    if (!pool_.is_taken(slot))
      problems += concat("\n  ", tier_, " slot ", slot, " is owned and free");
    owned_[static_cast<size_t>(slot)] = true;
    ++count_;
  }

  void finish(std::string& problems) const {
    if (count_ != pool_.taken_slots() || count_ + pool_.free_slots() != pool_.mapped_slots()) {
      problems +=
          concat("\n  ", tier_, ": ", count_, " owned + ", pool_.free_slots(), " free slots, but ",
                 pool_.mapped_slots(), " in all and ", pool_.taken_slots(), " taken");
    }
  }

 private:
  const char* tier_;
  const memory::SlotPool& pool_;
  std::vector<bool> owned_;
  int64_t count_ = 0;
};

}  // namespace

void Tiers::check_integrity() const {
  std::string problems;
  Ownership device("device", device_);
  Ownership host("host", host_);
  int64_t pinned = 0;
  int64_t ahead = 0;
  int64_t queued = 0;
  for (PageIndex index = 0; index < static_cast<int64_t>(records_.size()); ++index) {
    const PageRecord& record = records_[at(index)];
    const auto complain = [&](const char* what) {
      problems += concat("\n  page ", index, " (", name_of(record.state), "): ", what);
    };
    const bool on_device = paging::on_device(record.state);
    if (on_device != record.on_device()) complain("state and device slot disagree");
    const bool copied = record.state == Residency::kLoading ||
                        record.state == Residency::kStoring || record.state == Residency::kHostOnly;
    if (copied && !record.on_host()) complain("no host slot");
    if (record.state == Residency::kFree && record.on_host()) complain("host slot of a free page");
    for (int64_t i = 0; i < 2; ++i) {
      const Slot slot = record.device[at(i)];
      const bool expected = on_device && i < slots_of(index);
      if ((slot != kNoSlot) != expected) complain("wrong number of device slots");
      if (slot != kNoSlot) {
        device.add(slot, problems);
        if (owner_[at(slot)] != index) complain("its device slot names another owner");
      }
      if (record.host[at(i)] != kNoSlot) host.add(record.host[at(i)], problems);
    }
    if (record.pins > 0) pinned += slots_of(index);
    if (record.ahead) ahead += slots_of(index);
    if (record.ahead && (record.pins > 0 || !record.on_device())) complain("loaded ahead, or not?");
    if (record.on_device()) {
      const bool in_queue = victims_.contains(record.device[0]);
      if (in_queue) ++queued;
      if (in_queue == (record.pins > 0)) complain("pinned and evictable, or neither");
    }
    if (space_->kind(index) == PageKind::kOutput) continue;  // no table knows it
    const int64_t kv_pages = space_->num_layers() * space_->positions();
    const int32_t entry = tables_[index < kv_pages ? index : kv_pages + 2 * (index - kv_pages)];
    const int32_t first = record.device[0];
    if (entry != (index < kv_pages || first < 0 ? first : 2 * first)) complain("wrong table entry");
  }
  device.finish(problems);
  host.finish(problems);
  if (pinned != pinned_slots_) {
    problems += concat("\n  ", pinned, " slots pinned, counted ", pinned_slots_);
  }
  if (ahead != ahead_slots_) {
    problems += concat("\n  ", ahead, " slots loaded ahead, counted ", ahead_slots_);
  }
  if (queued != victims_.size()) {
    problems += concat("\n  ", queued, " pages evictable, queue holds ", victims_.size());
  }
  if (!problems.empty()) throw Error("page tiers are inconsistent:" + problems);
}

}  // namespace oomb::paging
