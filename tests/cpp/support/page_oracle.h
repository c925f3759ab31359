#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "offload/host_copy_engine.h"
#include "paging/page_manager.h"

namespace oomb::testing {

// Plays the kernels: writes stamps into pages and checks the stamps it finds, in the compute lane
// of an asynchronous engine. What a page must hold is known when the kernel is issued, where it
// lies is read from the block tables at that moment, and the bytes are looked at when the lane gets
// there.
class PageOracle {
 public:
  PageOracle(paging::PageManager& manager, offload::HostCopyEngine& engine,
             std::optional<uint64_t> delay_seed, int64_t max_delay_us)
      : manager_(manager),
        engine_(engine),
        delays_(delay_seed.has_value()),
        random_(delay_seed.value_or(0)),
        max_delay_us_(max_delay_us) {}

  // A new call: nothing exists.
  void begin_call() {
    keys_.clear();
    gradients_.clear();
    outputs_.clear();  // the compute lane is empty: the call before has ended
    ++version_;
  }

  void write_keys(int64_t layer, int64_t position) {
    keys_[{layer, position}] = ++version_;
    issue({slot_address(kv_slot(layer, position)), manager_.slot_bytes(), std::nullopt, version_});
  }
  void check_keys(int64_t layer, int64_t position) {
    issue({slot_address(kv_slot(layer, position)), manager_.slot_bytes(),
           keys_.at({layer, position}), std::nullopt});
  }
  // Expects the stamp of the last addition (zeros before the first) and puts the next.
  void add_gradient(int64_t layer, int64_t position) { touch_gradient(layer, position, true); }
  void check_gradient(int64_t layer, int64_t position) { touch_gradient(layer, position, false); }
  bool has_gradient(int64_t layer, int64_t position) const {
    return gradients_.contains({layer, position});
  }
  bool has_keys(int64_t layer, int64_t position) const { return keys_.contains({layer, position}); }
  void forget_keys(int64_t layer, int64_t position) { keys_.erase({layer, position}); }
  void forget_gradient(int64_t layer, int64_t position) { gradients_.erase({layer, position}); }

  // A kept output of `pieces` slots, the last of them half full: hands bytes to `write` or `read`,
  // which move them in the compute lane, and checks what comes back.
  template <typename Write>
  void keep_output(int64_t layer, int64_t first, int64_t pieces, Write write) {
    Output& output = outputs_[{layer, first}];
    output.stamp = ++version_;
    output.data.resize(static_cast<size_t>(pieces * words_of_slot() - words_of_slot() / 2));
    issue({bytes_of(output), size_of(output), std::nullopt, output.stamp});
    write(bytes_of(output), size_of(output));
    // Its memory is the caller's again, as soon as the compute lane has been there.
    issue({bytes_of(output), size_of(output), std::nullopt, ++version_});
  }
  template <typename Read>
  void take_output(int64_t layer, int64_t first, Read read) {
    Output& output = outputs_.at({layer, first});
    read(bytes_of(output), size_of(output));
    issue({bytes_of(output), size_of(output), output.stamp, std::nullopt});
  }

  int64_t stale() const { return stale_; }
  int64_t checked() const { return checked_; }

 private:
  using Key = std::pair<int64_t, int64_t>;

  struct Output {
    std::vector<uint64_t> data;
    uint64_t stamp = 0;
  };
  int64_t words_of_slot() const {
    return manager_.slot_bytes() / static_cast<int64_t>(sizeof(uint64_t));
  }
  static std::byte* bytes_of(Output& output) {
    return reinterpret_cast<std::byte*>(output.data.data());
  }
  static int64_t size_of(const Output& output) {
    return static_cast<int64_t>(output.data.size() * sizeof(uint64_t));
  }

  struct Kernel {
    std::byte* data;
    int64_t bytes;
    std::optional<uint64_t> expected;  // stamp to find
    std::optional<uint64_t> written;   // stamp to leave
  };

  int32_t kv_slot(int64_t layer, int64_t position) const {
    return manager_.tables()[manager_.tables().kv_entry(layer) + position];
  }
  std::byte* slot_address(int64_t slot) const {
    return manager_.pool_address() + slot * manager_.slot_bytes();
  }

  void touch_gradient(int64_t layer, int64_t position, bool add) {
    const int64_t entry = manager_.tables().gradient_entry(layer) + 2 * position;
    const int64_t half = manager_.slot_bytes() / 2;
    const int64_t first = manager_.tables()[entry];
    const int64_t second = manager_.tables()[entry + 1];
    const bool shared = second == first + 1 && first % 2 == 0;
    const auto found = gradients_.find({layer, position});
    const uint64_t expected = found == gradients_.end() ? 0 : found->second;
    std::optional<uint64_t> written;
    if (add) gradients_[{layer, position}] = *(written = ++version_);
    for (const int64_t place : {first, second}) {
      issue({manager_.pool_address() + place * half, shared ? half : 2 * half, expected, written});
    }
  }

  // Every word of a page holds its stamp, mixed with the place; stamp 0 means zeros.
  static uint64_t word(uint64_t stamp, int64_t i) {
    return stamp == 0 ? 0 : (stamp * 0x9E3779B97F4A7C15ull) ^ static_cast<uint64_t>(i);
  }

  void issue(const Kernel& kernel) {
    int64_t delay = 0;
    if (delays_ && random_() % 4 == 0) {
      delay = static_cast<int64_t>(random_() % static_cast<uint64_t>(max_delay_us_ + 1));
    }
    engine_.enqueue_compute([this, kernel, delay] {
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      const auto words = kernel.bytes / static_cast<int64_t>(sizeof(uint64_t));
      bool good = true;
      for (int64_t i = 0; i < words; ++i) {
        uint64_t value = 0;
        std::byte* place = kernel.data + i * static_cast<int64_t>(sizeof(uint64_t));
        std::memcpy(&value, place, sizeof value);
        if (kernel.expected) good = good && value == word(*kernel.expected, i);
        if (kernel.written) {
          value = word(*kernel.written, i);
          std::memcpy(place, &value, sizeof value);
        }
      }
      if (!good) ++stale_;
      if (kernel.expected) ++checked_;
    });
  }

  paging::PageManager& manager_;
  offload::HostCopyEngine& engine_;
  bool delays_;
  std::mt19937_64 random_;
  int64_t max_delay_us_;
  uint64_t version_ = 0;
  std::map<Key, uint64_t> keys_, gradients_;
  std::map<Key, Output> outputs_;
  std::atomic<int64_t> stale_ = 0;
  std::atomic<int64_t> checked_ = 0;
};

}  // namespace oomb::testing
