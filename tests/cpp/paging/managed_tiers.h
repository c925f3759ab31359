#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "support/instant_copy_engine.h"
#include "support/test_tiers.h"

namespace oomb::paging {

constexpr int64_t kSlotBytes = 64;

inline std::unique_ptr<CopyEngine> instant(std::byte* device, std::byte* host, int64_t slot_bytes) {
  return std::make_unique<testing::InstantCopyEngine>(device, host, slot_bytes);
}

// A page manager over two small tiers, and calls on it as short as they can be said.
struct ManagedTiers {
  explicit ManagedTiers(int64_t device_slots, int64_t host_slots = 1024,
                        const PageManagerOptions& options = {})
      : tiers({.slot_bytes = kSlotBytes,
               .device_slots = device_slots,
               .host_slots = host_slots,
               .manager = options},
              instant),
        manager(*tiers.manager) {}

  // Creates and commits pages [begin, end) one by one.
  void write(int32_t layer, int64_t begin, int64_t end) {
    for (int64_t page = begin; page < end; ++page) {
      manager.create(layer, page, page + 1, nullptr);
      manager.commit(layer, page, page + 1, nullptr);
    }
  }
  void visit(int32_t visit) {
    for (const auto& [first, last] : manager.waves(visit)) {
      manager.acquire(visit, first, last, nullptr);
      manager.release(visit, first, last, nullptr);
      manager.check_integrity();
    }
  }
  testing::InstantCopyEngine& engine() {
    return dynamic_cast<testing::InstantCopyEngine&>(*tiers.engine);
  }

  testing::TestTiers tiers;
  PageManager& manager;
};

inline CallPlan plan(int64_t layers, std::vector<int32_t> pages, std::vector<Visit> visits,
                     int grad_slots = 1) {
  return {.num_layers = layers,
          .pages_per_sequence = std::move(pages),
          .grad_slots = grad_slots,
          .visits = std::move(visits)};
}

template <typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_CONTAINS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

}  // namespace oomb::paging
