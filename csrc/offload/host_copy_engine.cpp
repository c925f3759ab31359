#include "offload/host_copy_engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.h"

namespace oomb::offload {

using paging::Lane;
using paging::Ticket;

namespace {

// For each of the slots that `bytes` bytes fill: offset in the pool, offset in the data, bytes.
template <typename Copy>
void in_pieces(const std::vector<memory::Slot>& slots, int64_t bytes, int64_t slot_bytes,
               Copy copy) {
  int64_t done = 0;
  for (const memory::Slot slot : slots) {
    const int64_t size = std::min(slot_bytes, bytes - done);
    if (size <= 0) return;
    copy(slot * slot_bytes, done, static_cast<size_t>(size));
    done += size;
  }
}

}  // namespace

HostCopyEngine::HostCopyEngine(const HostCopyOptions& options)
    : options_(options), random_(options.delay_seed.value_or(0)) {}

// Lanes wait for one another: let them finish before the first of them goes.
HostCopyEngine::~HostCopyEngine() {
  for (WorkerLane& worker : lanes_) worker.wait_for(worker.issued(), options_.timeout_seconds);
}

Ticket HostCopyEngine::copy(Lane which, std::span<const paging::PageCopy> pages) {
  if (options_.dry) return lane(which).enqueue([] {});
  const bool to_host = which == Lane::kStore;
  const auto bytes = static_cast<size_t>(options_.slot_bytes);
  std::optional<uint64_t> seed;
  if (options_.delay_seed) seed = random_();
  return lane(which).enqueue([this, to_host, bytes, seed,
                              batch = std::vector<paging::PageCopy>(pages.begin(), pages.end())] {
    std::mt19937_64 random(seed.value_or(0));
    for (const paging::PageCopy& page : batch) {
      if (seed) {
        const auto limit = static_cast<uint64_t>(options_.max_delay_us) + 1;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % limit));
      }
      std::byte* device = options_.device_base + page.device_slot * options_.slot_bytes;
      std::byte* host = options_.host_base + page.host_slot * options_.slot_bytes;
      std::memcpy(to_host ? host : device, to_host ? device : host, bytes);
    }
  });
}

Ticket HostCopyEngine::fill(std::span<const memory::Slot> slots, uint8_t value) {
  return compute([this, value, list = std::vector<memory::Slot>(slots.begin(), slots.end())] {
    for (const memory::Slot slot : list) {
      std::memset(options_.device_base + slot * options_.slot_bytes, value,
                  static_cast<size_t>(options_.slot_bytes));
    }
  });
}

Ticket HostCopyEngine::pack(std::span<const memory::Slot> slots, const std::byte* source,
                            int64_t bytes) {
  return compute([this, source, bytes, list = std::vector(slots.begin(), slots.end())] {
    in_pieces(list, bytes, options_.slot_bytes, [&](int64_t slot, int64_t from, size_t size) {
      std::memcpy(options_.device_base + slot, source + from, size);
    });
  });
}

Ticket HostCopyEngine::unpack(std::span<const memory::Slot> slots, std::byte* target,
                              int64_t bytes) {
  return compute([this, target, bytes, list = std::vector(slots.begin(), slots.end())] {
    in_pieces(list, bytes, options_.slot_bytes, [&](int64_t slot, int64_t to, size_t size) {
      std::memcpy(target + to, options_.device_base + slot, size);
    });
  });
}

Ticket HostCopyEngine::compute(std::function<void()> task) {
  if (options_.dry) return ++compute_ticket_;
  if (options_.asynchronous_compute) return lane(Lane::kCompute).enqueue(std::move(task));
  task();
  return ++compute_ticket_;
}

Ticket HostCopyEngine::mark_compute() {
  return options_.asynchronous_compute ? lane(Lane::kCompute).issued() : ++compute_ticket_;
}

void HostCopyEngine::wait(Lane waiter, Lane awaited, Ticket ticket) {
  if (on_caller(awaited)) return;
  if (!on_caller(waiter)) {
    constexpr double kForever = 1e8;
    lane(waiter).enqueue([this, awaited, ticket] { lane(awaited).wait_for(ticket, kForever); });
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  block_on(awaited, ticket);
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  times_.add_wait(times_.label(awaited), waited.count());
}

void HostCopyEngine::block_on(Lane awaited, Ticket ticket) {
  if (!lane(awaited).wait_for(ticket, options_.timeout_seconds)) {
    throw Error(
        concat("a page copy has not finished within ", options_.timeout_seconds, " seconds"));
  }
}

Ticket HostCopyEngine::completed(Lane which) {
  return on_caller(which) ? compute_ticket_ : lane(which).completed();
}

void HostCopyEngine::drain() {
  for (const Lane which : {Lane::kCompute, Lane::kStore, Lane::kLoad}) {
    if (!on_caller(which)) block_on(which, lane(which).issued());
  }
}

void HostCopyEngine::enqueue_compute(std::function<void()> task) {
  lane(Lane::kCompute).enqueue(std::move(task));
}

}  // namespace oomb::offload
