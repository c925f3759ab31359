#include <algorithm>
#include <array>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "memory/cuda/cuda_call.h"
#include "offload/cuda/cuda_copy_engine.h"
#include "offload/cuda/cuda_lane.h"
#include "offload/cuda/event_pool.h"
#include "offload/cuda/slot_kernels.h"

namespace oomb::offload {

namespace {

using memory::cuda_call;
using paging::Lane;
using paging::PageCopy;
using paging::Ticket;

// More batches than this in a lane keep the caller waiting: descriptors of queued copies take
// memory of the driver, and a queue of this length hides every latency.
constexpr int64_t kBatchesInFlight = 64;
constexpr size_t kMeasuresInFlight = 256;
constexpr uint64_t kMaxDelayCycles = 400'000;

class CudaCopyEngine final : public paging::CopyEngine {
 public:
  explicit CudaCopyEngine(const CudaCopyOptions& options)
      : options_(options), random_(options.delay_seed.value_or(0)) {}

  ~CudaCopyEngine() override {
    for (CudaLane* lane : {&compute_, &store_, &load_}) lane->abandon();
    for (const Measure& measure : measures_) {
      timers_.give_back(measure.begin);
      timers_.give_back(measure.end);
    }
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
    if (options_.delay_seed && random_() % 2 == 0) {
      launch_spin(static_cast<int64_t>(random_() % kMaxDelayCycles), target.stream());
    }
    if (!batched_ || sizes_.size() == 1) {
      copy_one_by_one(target.stream());
    } else {
      copy_batch(target.stream());
    }
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
    const auto wait_for_event = [&] {
      cuda_call("cudaStreamWaitEvent",
                [&] { return cudaStreamWaitEvent(lane(waiter).stream(), event, 0); });
    };
    if (waiter != Lane::kCompute || measures_.size() >= kMeasuresInFlight) {
      wait_for_event();
      harvest();
      return;
    }
    // The time between two events around the wait is time in which compute stood still.
    Measure measure = {timers_.take(), nullptr};
    try {
      measure.end = timers_.take();
      cuda_call("cudaEventRecord",
                [&] { return cudaEventRecord(measure.begin, compute_.stream()); });
      wait_for_event();
      cuda_call("cudaEventRecord", [&] { return cudaEventRecord(measure.end, compute_.stream()); });
    } catch (...) {
      timers_.give_back(measure.begin);
      if (measure.end != nullptr) timers_.give_back(measure.end);
      throw;
    }
    measures_.push_back(measure);
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

  int64_t events_created() const override { return events_.created() + timers_.created(); }

  double exposed_seconds() override {
    harvest();
    return exposed_seconds_;
  }
  void reset_statistics() override {
    harvest();
    exposed_seconds_ = 0;
  }

 private:
  struct Measure {
    cudaEvent_t begin;
    cudaEvent_t end;
  };

  CudaLane& lane(Lane which) {
    return which == Lane::kCompute ? compute_ : which == Lane::kStore ? store_ : load_;
  }

  // Addresses and sizes of the batch; slots in a row in both tiers become one copy.
  void collect(Lane which, std::span<const PageCopy> pages) {
    destinations_.clear();
    sources_.clear();
    sizes_.clear();
    for (size_t i = 0; i < pages.size(); ++i) {
      const PageCopy& page = pages[i];
      const bool in_row = i > 0 && page.device_slot == pages[i - 1].device_slot + 1 &&
                          page.host_slot == pages[i - 1].host_slot + 1 && may_merge(page.host_slot);
      if (in_row) {
        sizes_.back() += static_cast<size_t>(options_.slot_bytes);
        continue;
      }
      std::byte* device = options_.device_base + page.device_slot * options_.slot_bytes;
      std::byte* host = options_.host_base + page.host_slot * options_.slot_bytes;
      destinations_.push_back(which == Lane::kStore ? host : device);
      sources_.push_back(which == Lane::kStore ? device : host);
      sizes_.push_back(static_cast<size_t>(options_.slot_bytes));
    }
  }

  // A copy must not run from one registered piece of host memory into the next. Pieces begin at
  // multiples of 2 MiB or, with slots that do not divide that, anywhere: then nothing is merged.
  bool may_merge(memory::Slot host_slot) const {
    constexpr int64_t kPieceAlignment = int64_t{2} << 20;
    if (kPieceAlignment % options_.slot_bytes != 0) return false;
    return host_slot * options_.slot_bytes % kPieceAlignment != 0;
  }

  void copy_one_by_one(cudaStream_t stream) {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      cuda_call("cudaMemcpyAsync", [&] {
        return cudaMemcpyAsync(destinations_[i], sources_[i], sizes_[i], cudaMemcpyDefault, stream);
      });
    }
  }

  void copy_batch(cudaStream_t stream) {
#if CUDART_VERSION >= 12080
    // Sources are read in stream order: any other order could pass the waits issued before.
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    if (options_.overlap_hint) attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
    cudaError_t status = cudaSuccess;
    if (memory::fault_due()) throw CudaError("injected failure of cudaMemcpyBatchAsync");
#if CUDART_VERSION >= 13000
    status = cudaMemcpyBatchAsync(destinations_.data(), sources_.data(), sizes_.data(),
                                  sizes_.size(), &attributes, &first, 1, stream);
#else
    size_t failed = 0;
    status =
        cudaMemcpyBatchAsync(destinations_.data(), const_cast<void**>(sources_.data()),
                             sizes_.data(), sizes_.size(), &attributes, &first, 1, &failed, stream);
#endif
    if (status != cudaErrorNotSupported && status != cudaErrorCallRequiresNewerDriver) {
      check_cuda(status, "cudaMemcpyBatchAsync");
      return;
    }
    cudaGetLastError();
#endif
    batched_ = false;
    copy_one_by_one(stream);
  }

  void harvest() {
    while (!measures_.empty() && cudaEventQuery(measures_.front().end) == cudaSuccess) {
      float milliseconds = 0;
      const Measure measure = measures_.front();
      if (cudaEventElapsedTime(&milliseconds, measure.begin, measure.end) == cudaSuccess) {
        exposed_seconds_ += milliseconds * 1e-3;
      }
      timers_.give_back(measure.begin);
      timers_.give_back(measure.end);
      measures_.pop_front();
    }
  }

  CudaCopyOptions options_;
  bool batched_ = options_.batched;
  std::mt19937_64 random_;
  EventPool events_{false};
  EventPool timers_{true};
  CudaLane compute_{events_, false};
  CudaLane store_{events_, true};
  CudaLane load_{events_, true};
  std::vector<void*> destinations_;
  std::vector<const void*> sources_;
  std::vector<size_t> sizes_;
  std::vector<paging::TableChange> last_changes_;
  std::deque<Measure> measures_;
  double exposed_seconds_ = 0;
  int32_t* tables_ = nullptr;
  int64_t table_capacity_ = 0;
};

}  // namespace

std::unique_ptr<paging::CopyEngine> make_cuda_copy_engine(const CudaCopyOptions& options) {
  const DeviceGuard guard(options.device);
  return std::make_unique<CudaCopyEngine>(options);
}

}  // namespace oomb::offload
