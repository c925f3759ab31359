#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "memory/host_resource.h"
#include "offload/tier_pool.h"
#include "paging/page_manager.h"
#include "support/timed_copy_engine.h"

namespace oomb::paging {

// One layer of one chunk on an H200, model shape of Qwen2.5-7B: what does not depend on the
// context, and every page that a query block attends to. With 64 pages this makes 4 ms in the fill,
// 4.2 ms forward, 12 ms backward.
struct PhaseCost {
  double fixed_seconds;
  double before;  // share of it that comes before attention
  double page_seconds;
  double host_seconds;  // until the layer is issued
};
constexpr PhaseCost kFill = {3.04e-3, 0.2, 15e-6, 0.9e-3};
constexpr PhaseCost kForward = {3.24e-3, 0.2, 15e-6, 0.9e-3};
constexpr PhaseCost kBackward = {9.6e-3, 0.6, 37.5e-6, 0.8e-3};
constexpr double kLossSeconds = 30e-3;  // a chunk's logits, both ways
constexpr double kLaunchSeconds = 20e-6;
constexpr double kStateSeconds = 30e-6;      // to write and read what passes between two launches
constexpr double kReadBackSeconds = 30e-6;   // page lists arrive at the host
constexpr double kAnnounceSeconds = 100e-6;  // and in the schedule
constexpr double kIssuedAhead = 0.5;         // at most: launch queues are bounded

constexpr int64_t kSlotBytes = int64_t{256} << 10;  // only addresses: no byte of them is touched
constexpr int32_t kChunkPages = 32;                 // 4,096 tokens; and as many query blocks
constexpr int kGradSlots = 2;                       // float32 gradients of bfloat16 pages

struct CallShape {
  int32_t layers;
  int32_t chunks;
  int64_t budget;       // pages per query block; 0: dense
  double device_share;  // of the slots that all pages and gradients take
  testing::CopyCosts costs = {};
  PageManagerOptions options = {};
};

// Drives a page manager as the engine does, over copies in virtual time. One layer's turn:
//
//     host     | announce | acquire, and prefetch what comes next
//     compute  | own keys | wave 1 | wave 2 | rest of the layer | write
//     load     |  wave 1  | wave 2 |   the next layer's pages   ...
//     store    |  what will be evicted next, so that its slots are free then  ...
class TimedCall {
 public:
  explicit TimedCall(const CallShape& shape)
      : shape_(shape),
        turns_(static_cast<size_t>(shape.layers) * static_cast<size_t>(shape.chunks)) {
    const int64_t slots = int64_t{shape.layers} * past(last()) * (1 + kGradSlots);
    auto engine = std::make_unique<testing::TimedCopyEngine>(shape.costs);
    engine_ = engine.get();
    manager_ = std::make_unique<PageManager>(
        reserve(static_cast<int64_t>(static_cast<double>(slots) * shape.device_share)),
        reserve(slots), std::move(engine), shape.options);
    manager_->begin_call({.num_layers = shape.layers,
                          .pages_per_sequence = {past(last())},
                          .grad_slots = kGradSlots,
                          .visits = access_order(),
                          .exact = shape.budget == 0});
  }

  // Two chunks take turns layer by layer: while the host waits for one's page lists, compute has
  // the other.
  void fill() {
    for (int32_t first = 0; first < last(); first += 2) {
      const int32_t end = std::min(first + 2, last());
      for (int32_t chunk = first; chunk < end; ++chunk) write(chunk, 0);
      for (int32_t layer = 0; layer + 1 < shape_.layers; ++layer) {
        for (int32_t chunk = first; chunk < end; ++chunk) {
          announce(chunk, layer);
          attend(chunk, layer, turn(chunk, layer).fill, kFill);
          write(chunk, layer + 1);
        }
      }
      manager_->check_integrity();
    }
  }

  // From the last chunk to the first: forward through all layers, then backward.
  void sweep() {
    for (int32_t layer = 0; layer < shape_.layers; ++layer) {
      manager_->create_gradients(layer, 0, past(last()));
    }
    for (int32_t chunk = last(); chunk >= 0; --chunk) {
      for (int32_t layer = 0; layer < shape_.layers; ++layer) {
        chosen_[parity(chunk)] = engine_->compute_end();  // the last chunk had no fill
        announce(chunk, layer);
        attend(chunk, layer, turn(chunk, layer).forward, kForward);
      }
      engine_->let_host_wait_until(engine_->compute_end());  // it reads the loss
      compute(kLossSeconds);
      for (int32_t layer = shape_.layers - 1; layer >= 0; --layer) {
        attend(chunk, layer, turn(chunk, layer).backward, kBackward);
      }
      manager_->check_integrity();
    }
  }

  // What the same kernels would take with every page in place, back to back.
  double ideal_seconds() const { return ideal_; }
  double seconds() const { return engine_->compute_end(); }
  double copy_seconds() const { return statistics().h2d_seconds + statistics().d2h_seconds; }
  PageStatistics statistics() const { return manager_->statistics(); }

 private:
  using List = std::vector<int64_t>;

  struct Turn {  // of one chunk in one layer
    int32_t fill = -1;
    int32_t forward = -1;
    int32_t backward = -1;
    std::optional<List> pages = std::nullopt;  // none: the whole past
  };

  static TierPool reserve(int64_t slots) {
    return offload::make_tier_pool(std::make_unique<memory::HostResource>(slots * kSlotBytes),
                                   {.slot_bytes = kSlotBytes, .max_slots = slots});
  }
  static int32_t past(int32_t chunk) { return chunk * kChunkPages; }
  static size_t parity(int32_t chunk) { return static_cast<size_t>(chunk % 2); }
  int32_t last() const { return shape_.chunks - 1; }
  Turn& turn(int32_t chunk, int32_t layer) {
    return turns_[static_cast<size_t>(chunk) * static_cast<size_t>(shape_.layers) +
                  static_cast<size_t>(layer)];
  }

  std::vector<Visit> access_order() {
    std::vector<Visit> visits;
    const auto add = [&](int32_t chunk, int32_t layer, VisitKind kind) {
      visits.push_back({layer, kind, 0, past(chunk)});
      return static_cast<int32_t>(visits.size()) - 1;
    };
    for (int32_t first = 0; first < last(); first += 2) {
      for (int32_t layer = 0; layer + 1 < shape_.layers; ++layer) {
        for (int32_t chunk = first; chunk < std::min(first + 2, last()); ++chunk) {
          turn(chunk, layer).fill = add(chunk, layer, VisitKind::kRead);
        }
      }
    }
    for (int32_t chunk = last(); chunk >= 0; --chunk) {
      for (int32_t layer = 0; layer < shape_.layers; ++layer) {
        turn(chunk, layer).forward = add(chunk, layer, VisitKind::kRead);
      }
      for (int32_t layer = shape_.layers - 1; layer >= 0; --layer) {
        turn(chunk, layer).backward = add(chunk, layer, VisitKind::kAccumulate);
        if (chunk < last()) {
          visits.push_back({layer, VisitKind::kReadGradient, past(chunk), past(chunk + 1)});
        }
      }
    }
    return visits;
  }

  // What a chunk's query blocks read. Each takes the first pages, the latest, about half of what
  // the block before it took, and the rest at random. (No std distribution: they differ between
  // libraries.)
  List select(int64_t pages) {
    std::vector<bool> any(static_cast<size_t>(pages)), block, before;
    for (int32_t b = 0; b < kChunkPages; ++b) {
      before = std::exchange(block, std::vector<bool>(any.size()));
      int64_t left = shape_.budget;
      const auto take = [&](size_t page) {
        if (left == 0 || block[page]) return;
        block[page] = any[page] = true;
        --left;
      };
      for (size_t page = 0; page < 4; ++page) take(page);
      for (size_t page = any.size() - 8; page < any.size(); ++page) take(page);
      for (size_t page = 0; page < before.size(); ++page) {
        if (before[page] && random_() % 2 == 0) take(page);
      }
      while (left > 0) take(random_() % any.size());
    }
    List list;
    for (int64_t page = 0; page < pages; ++page) {
      if (any[static_cast<size_t>(page)]) list.push_back(page);
    }
    return list;
  }

  // The host learns what a chunk reads once compute has chosen it; fill and sweep read the same.
  void announce(int32_t chunk, int32_t layer) {
    Turn& now = turn(chunk, layer);
    if (shape_.budget == 0 || past(chunk) <= shape_.budget || now.pages) return;
    now.pages = select(past(chunk));
    engine_->let_host_wait_until(chosen_[parity(chunk)] + kReadBackSeconds);
    engine_->spend_on_host(kAnnounceSeconds);
    for (const int32_t visit : {now.fill, now.forward, now.backward}) {
      if (visit >= 0) manager_->set_visit_pages(visit, *now.pages);
    }
  }

  void compute(double seconds) {
    engine_->compute(seconds);
    ideal_ += seconds;
  }

  void attend(int32_t chunk, int32_t layer, int32_t visit, const PhaseCost& cost) {
    engine_->spend_on_host(cost.host_seconds);
    const int64_t pages = past(chunk);
    const double own_keys = 0.1 * cost.fixed_seconds;
    const double attention =
        cost.page_seconds *
        static_cast<double>(shape_.budget == 0 ? pages : std::min(pages, shape_.budget));
    ideal_ += kLaunchSeconds + own_keys + attention;
    const std::optional<List>& list = turn(chunk, layer).pages;
    compute(cost.before * cost.fixed_seconds);
    const auto waves = manager_->waves(visit);
    bool started = false;
    const auto launch = [&](double seconds) {
      const bool goes_on = std::exchange(started, true);
      engine_->compute(kLaunchSeconds + seconds + (goes_on ? kStateSeconds : own_keys));
    };
    if (waves.empty() || own_alone(visit, waves[0])) launch(0);
    int64_t covered = 0;
    for (const auto& [begin, end] : waves) {
      ASSERT_EQ(begin, covered);
      covered = end;
      expect_fit(list, begin, end, visit == turn(chunk, layer).backward);
      manager_->acquire(visit, begin, end, nullptr);
      launch(attention / static_cast<double>(waves.size()));
      manager_->release(visit, begin, end, nullptr);
    }
    ASSERT_EQ(covered, pages);
    if (visit == turn(chunk, layer).backward) end_own_pages(chunk, layer);
    compute((0.9 - cost.before) * cost.fixed_seconds);
    engine_->let_host_wait_until(engine_->compute_end() - kIssuedAhead);
  }

  // As the engine: never where the device tier has room for everything.
  bool own_alone(int32_t visit, const std::pair<int64_t, int64_t>& wave) {
    return shape_.device_share < 1 && manager_->own_alone(visit, wave.first, wave.second);
  }

  // The wave's pages, with their gradients in the backward pass.
  void expect_fit(const std::optional<List>& list, int64_t begin, int64_t end, bool backward) {
    int64_t pages = end - begin;
    if (list) {
      pages = std::lower_bound(list->begin(), list->end(), end) -
              std::lower_bound(list->begin(), list->end(), begin);
    }
    EXPECT_LE(pages * (backward ? 1 + kGradSlots : 1), manager_->device_slots());
  }

  void write(int32_t chunk, int32_t layer) {
    manager_->create(layer, past(chunk), past(chunk + 1), nullptr);
    compute(kLaunchSeconds);
    manager_->commit(layer, past(chunk), past(chunk + 1), nullptr);
    chosen_[parity(chunk)] = engine_->compute_end();
  }

  // The chunk's gradients are read; the keys and values of the next one to be swept are dead.
  void end_own_pages(int32_t chunk, int32_t layer) {
    if (chunk < last()) {
      manager_->acquire_gradients(layer, past(chunk), past(chunk + 1), nullptr);
      compute(kLaunchSeconds);
      manager_->drop(layer, past(chunk), past(chunk + 1), false, true, nullptr);
    }
    if (chunk > 0) manager_->drop(layer, past(chunk - 1), past(chunk), true, false, nullptr);
  }

  CallShape shape_;
  std::vector<Turn> turns_;
  testing::TimedCopyEngine* engine_ = nullptr;
  std::unique_ptr<PageManager> manager_;
  std::mt19937 random_{1};
  double ideal_ = 0;
  std::array<double, 2> chosen_ = {};  // when compute has chosen pages, of chunks in turn
};

}  // namespace oomb::paging
