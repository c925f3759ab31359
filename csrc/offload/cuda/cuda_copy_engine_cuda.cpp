#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "memory/cuda/cuda_call.h"
#include "offload/cuda/copy_batch.h"
#include "offload/cuda/cuda_copy_engine.h"
#include "offload/cuda/cuda_lane.h"
#include "offload/cuda/event_pool.h"
#include "offload/cuda/slot_kernels.h"
#include "offload/cuda/stopwatch.h"

namespace oomb::offload {

namespace {

using memory::cuda_call;
using paging::Lane;
using paging::PageCopy;
using paging::Ticket;

// More batches than this in a lane keep the caller waiting: descriptors of queued copies take
// memory of the driver, and a queue of this length hides every latency.
constexpr int64_t kBatchesInFlight = 64;
constexpr uint64_t kMaxDelayCycles = 400'000;

class CudaCopyEngine final : public paging::CopyEngine {
 public:
  explicit CudaCopyEngine(const CudaCopyOptions& options)
      : options_(options), random_(options.delay_seed.value_or(0)) {}

  ~CudaCopyEngine() override {
    for (CudaLane* lane : {&compute_, &store_, &load_}) lane->abandon();
    cudaFree(tables_);
  }

  void set_compute_stream(void* stream) override {
    compute_.switch_stream(static_cast<cudaStream_t>(stream));
  }

  Ticket copy(Lane which, std::span<const PageCopy> pages) override {
    CudaLane& target = lane(which);
    if (pages.empty()) return target.issued();
    if (target.in_flight() >= kBatchesInFlight) {
      target.synchronize(target.issued() - kBatchesInFlight + 1, options_.timeout_seconds);
    }
    collect(which, pages);
    // Behind the waits that come before it in the stream: what the link takes.
    Stopwatch& watch = which == Lane::kLoad ? loads_ : stores_;
    watch.around(target.stream(), static_cast<int64_t>(which), [&] { issue(target.stream()); });
    return target.mark();
  }

  Ticket fill(std::span<const memory::Slot> slots, uint8_t value) override {
    if (slots.empty()) return compute_.issued();
    cuda_call("fill_slots", [&] {
      launch_fill(options_.device_base, options_.slot_bytes, slots, value, compute_.stream());
      return cudaSuccess;
    });
    return compute_.mark();
  }

  Ticket pack(std::span<const memory::Slot> slots, const std::byte* source,
              int64_t bytes) override {
    cuda_call("copy_slots", [&] {
      launch_pack(options_.device_base, options_.slot_bytes, slots, source, bytes,
                  compute_.stream());
      return cudaSuccess;
    });
    return compute_.mark();
  }

  Ticket unpack(std::span<const memory::Slot> slots, std::byte* target, int64_t bytes) override {
    cuda_call("copy_slots", [&] {
      launch_unpack(options_.device_base, options_.slot_bytes, slots, target, bytes,
                    compute_.stream());
      return cudaSuccess;
    });
    return compute_.mark();
  }

  void reset_tables(int64_t entries) override {
    if (entries > table_capacity_) {
      int32_t* larger = nullptr;
      cuda_call("cudaMalloc", [&] {
        return cudaMalloc(reinterpret_cast<void**>(&larger), static_cast<size_t>(entries) * 4);
      });
      cudaFree(std::exchange(tables_, larger));
      table_capacity_ = entries;
    }
    cuda_call("cudaMemset",
              [&] { return cudaMemset(tables_, 0xFF, static_cast<size_t>(entries) * 4); });
    // The first kernels may come in a stream that does not wait for the default one.
    cuda_call("cudaStreamSynchronize", [&] { return cudaStreamSynchronize(nullptr); });
  }
  const int32_t* device_tables() const override { return tables_; }

  void update_tables(std::span<const paging::TableChange> changes) override {
    if (changes.empty()) return;
    // Of several changes of an entry the last one counts; kernels apply theirs in any order.
    last_changes_.assign(changes.begin(), changes.end());
    std::stable_sort(last_changes_.begin(), last_changes_.end(),
                     [](const auto& a, const auto& b) { return a.entry < b.entry; });
    size_t kept = 0;
    for (size_t i = 0; i < last_changes_.size(); ++i) {
      const bool last =
          i + 1 == last_changes_.size() || last_changes_[i + 1].entry != last_changes_[i].entry;
      if (last) last_changes_[kept++] = last_changes_[i];
    }
    last_changes_.resize(kept);
    cuda_call("update_entries", [&] {
      launch_table_update(tables_, last_changes_, compute_.stream());
      return cudaSuccess;
    });
  }

  Ticket mark_compute() override {
    compute_.completed();
    return compute_.mark();
  }

  void wait(Lane waiter, Lane awaited, Ticket ticket) override {
    cudaEvent_t event = lane(awaited).event_of(ticket);
    if (event == nullptr) return;
    const auto wait_for_it = [&] {
      cuda_call("cudaStreamWaitEvent",
                [&] { return cudaStreamWaitEvent(lane(waiter).stream(), event, 0); });
    };
    if (waiter == Lane::kCompute) {
      waits_.around(compute_.stream(), times_.label(awaited), wait_for_it);
    } else {
      wait_for_it();
    }
    harvest();
  }

  Ticket completed(Lane which) override { return lane(which).completed(); }

  void drain() override {
    try {
      // A call that failed may have left work behind that no ticket covers: mark all lanes anew.
      for (CudaLane* lane : {&compute_, &store_, &load_}) {
        lane->synchronize(lane->mark(), options_.timeout_seconds);
      }
      harvest();
    } catch (const CudaError&) {
      for (CudaLane* lane : {&compute_, &store_, &load_}) lane->abandon();
      throw;
    }
  }

  int64_t events_created() const override {
    return events_.created() + waits_.events_created() + loads_.events_created() +
           stores_.events_created();
  }

  paging::CallTimes& times() override {
    harvest();
    return times_;
  }

 private:
  CudaLane& lane(Lane which) {
    return which == Lane::kCompute ? compute_ : which == Lane::kStore ? store_ : load_;
  }

  // In the order of their places on the host, where copies that jump about are slower: beside
  // kernels by a tenth. Slots in a row in both tiers become one copy.
  void collect(Lane which, std::span<const PageCopy> pages) {
    ascending_.assign(pages.begin(), pages.end());
    std::ranges::sort(ascending_, {}, &PageCopy::host_slot);
    batch_.clear();
    for (const PageCopy& page : ascending_) {
      std::byte* device = options_.device_base + page.device_slot * options_.slot_bytes;
      std::byte* host = options_.host_base + page.host_slot * options_.slot_bytes;
      const bool to_host = which == Lane::kStore;
      batch_.add(to_host ? host : device, to_host ? device : host,
                 static_cast<size_t>(options_.slot_bytes), may_merge(page.host_slot));
    }
  }

  // A copy must not run from one registered piece of host memory into the next. Pieces begin at
  // multiples of 2 MiB or, with slots that do not divide that, anywhere: then nothing is merged.
  bool may_merge(memory::Slot host_slot) const {
    constexpr int64_t kPieceAlignment = int64_t{2} << 20;
    if (kPieceAlignment % options_.slot_bytes != 0) return false;
    return host_slot * options_.slot_bytes % kPieceAlignment != 0;
  }

  void issue(cudaStream_t stream) {
    if (options_.delay_seed && random_() % 2 == 0) {
      launch_spin(static_cast<int64_t>(random_() % kMaxDelayCycles), stream);
    }
    if (batched_ && batch_.size() > 1) {
      batched_ = batch_.issue_together(stream, options_.overlap_hint);
      if (batched_) return;
    }
    batch_.issue_one_by_one(stream);
  }

  void harvest() {
    waits_.harvest([this](int64_t label, double seconds) { times_.add_wait(label, seconds); });
    for (Stopwatch* watch : {&loads_, &stores_}) {
      watch->harvest([this](int64_t lane, double seconds) {
        times_.add_copy(static_cast<Lane>(lane), seconds);
      });
    }
  }

  CudaCopyOptions options_;
  bool batched_ = options_.batched;
  std::mt19937_64 random_;
  EventPool events_{false};
  Stopwatch waits_;  // of compute for pages
  Stopwatch loads_;
  Stopwatch stores_;
  CudaLane compute_{events_, false};
  CudaLane store_{events_, true};
  CudaLane load_{events_, true};
  std::vector<PageCopy> ascending_;
  CopyBatch batch_;
  std::vector<paging::TableChange> last_changes_;
  paging::CallTimes times_;
  int32_t* tables_ = nullptr;
  int64_t table_capacity_ = 0;
};

}  // namespace

std::unique_ptr<paging::CopyEngine> make_cuda_copy_engine(const CudaCopyOptions& options) {
  const DeviceGuard guard(options.device);
  return std::make_unique<CudaCopyEngine>(options);
}

}  // namespace oomb::offload
