#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "common/bytes.h"
#include "common/math.h"
#include "memory/cuda/cuda_call.h"
#include "memory/cuda/pinned_resource.h"
#include "memory/first_touch.h"
#include "memory/head_room.h"

namespace oomb::memory {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int kThreadsInHurry = 16;  // that touch while somebody waits for the memory
// Otherwise kernels are launched beside, by threads that want their cores.
constexpr int kThreadsBeside = 4;
constexpr double kPauses = 4;  // times as long as the registration before, unless someone waits

// The memory node nearest to the device, -1 where unknown.
int numa_node_of(int device) {
  char bus[32] = {};
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  std::string path = bus;
  std::transform(path.begin(), path.end(), path.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  path = "/sys/bus/pci/devices/" + path + "/numa_node";
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "r"),
                                                             &std::fclose);
  int node = -1;
  return file && std::fscanf(file.get(), "%d", &node) == 1 ? node : -1;
}

// A preference, not an order: memory elsewhere is better than none.
void prefer_node(std::byte* begin, int64_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  if (node < 0 || node >= 64) return;
  const unsigned long mask = 1ul << node;
  syscall(SYS_mbind, begin, static_cast<unsigned long>(bytes), kPreferred, &mask, 65ul, 0u);
}

}  // namespace

PinnedResource::PinnedResource(const PinnedOptions& options)
    : options_(options), room_({.patient = options.explicit_size}) {
  const DeviceGuard guard(options_.device);
  numa_node_ = numa_node_of(options_.device);
  // Pieces end where slots end and where huge pages end, if the slot size allows both.
  const int64_t unit = std::lcm(options_.slot_bytes, kPage);
  const int64_t huge_unit = std::lcm(unit, kHugePage);
  const int64_t step = huge_unit <= options_.piece_bytes ? huge_unit : unit;
  piece_ = std::max(step, options_.piece_bytes / step * step);
  capacity_ = align_up(options_.capacity, unit);
  if (capacity_ == 0) return;
  void* range = mmap(nullptr, static_cast<size_t>(capacity_ + kHugePage), PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    throw OutOfMemory(concat("no address range of ", human_bytes(capacity_),
                             " for host_memory: ", std::strerror(errno)),
                      capacity_, 0);
  }
  const auto address = reinterpret_cast<uintptr_t>(range);
  base_ = reinterpret_cast<std::byte*>(
      static_cast<uintptr_t>(align_up(static_cast<int64_t>(address), kHugePage)));
  const auto head = static_cast<size_t>(reinterpret_cast<uintptr_t>(base_) - address);
  if (head > 0) munmap(range, head);
  munmap(base_ + align_up(capacity_, kPage), static_cast<size_t>(kHugePage) - head);
}

PinnedResource::~PinnedResource() {
  release();
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(align_up(capacity_, kPage)));
}

int64_t PinnedResource::ready() const {
  const std::lock_guard lock(mutex_);
  return ready_;
}

void PinnedResource::prepare(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  target_ = std::max(target_, std::min(bytes, capacity_));
  if (ready_ >= target_) return;
  failure_ = nullptr;
  if (!thread_.joinable()) {
    stop_ = false;
    thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

void PinnedResource::commit(int64_t bytes) {
  if (bytes <= committed_) return;
  if (bytes > capacity_) {
    throw OutOfMemory(concat("host_memory: needed ", bytes, " bytes, the limit is ", capacity_),
                      bytes, capacity_ - committed_);
  }
  prepare(bytes);
  std::unique_lock lock(mutex_);
  hurry_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return ready_ >= bytes || failure_ != nullptr; });
  hurry_ = false;
  if (ready_ < bytes) {
    const std::exception_ptr failure = std::exchange(failure_, nullptr);
    target_ = ready_;
    std::rethrow_exception(failure);
  }
  committed_ = ready_;
}

// The thread: makes pieces until there is enough, then sleeps.
void PinnedResource::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || (ready_ < target_ && failure_ == nullptr); });
    if (stop_) return;
    const int64_t begin = ready_;
    const int64_t bytes = piece_at(begin);
    const bool hurry = hurry_;
    const bool more = begin + bytes < target_;
    lock.unlock();
    std::exception_ptr failure;
    double seconds = 0;
    try {
      seconds = add_piece(begin, hurry, more);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (failure != nullptr) {
      failure_ = failure;
    } else {
      pieces_.push_back(bytes);
      ready_ += bytes;
    }
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::duration<double>(kPauses * seconds),
                      [this] { return stop_ || hurry_; });
  }
}

int64_t PinnedResource::piece_at(int64_t begin) const {
  return std::min(piece_, capacity_ - begin);
}

double PinnedResource::add_piece(int64_t begin, bool hurry, bool more) {
  try {
    if (touching_.valid()) {
      touching_.get();
    } else {
      touch_piece(begin, hurry);
    }
    const int64_t next = begin + piece_at(begin);
    if (more) {
      touching_ = std::async(std::launch::async, [this, next, hurry] { touch_piece(next, hurry); });
    }
    const auto start = std::chrono::steady_clock::now();
    register_piece(begin);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  } catch (...) {
    if (touching_.valid()) touching_.wait();
    touching_ = {};
    give_back_from(begin);
    throw;
  }
}

void PinnedResource::give_back_from(int64_t begin) {
  if (touched_ <= begin) return;
  const auto size = static_cast<size_t>(touched_ - begin);
  madvise(base_ + begin, size, MADV_DONTNEED);
  mprotect(base_ + begin, size, PROT_NONE);
  touched_ = begin;
}

void PinnedResource::touch_piece(int64_t begin, bool hurry) {
  const int64_t bytes = piece_at(begin);
  std::byte* piece = base_ + begin;
  room_.require(bytes, begin);
  if (mprotect(piece, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) != 0) {
    throw OutOfMemory(
        concat("host memory: ", human_bytes(bytes), " refused: ", std::strerror(errno)), bytes, 0);
  }
  touched_ = begin + bytes;
  prefer_node(piece, bytes, numa_node_);
  if (options_.huge_pages) madvise(piece, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  take_pages(piece, bytes, std::min(hurry ? kThreadsInHurry : kThreadsBeside, cores));
}

void PinnedResource::register_piece(int64_t begin) {
  const int64_t bytes = piece_at(begin);
  try {
    const DeviceGuard guard(options_.device);
    cuda_call("cudaHostRegister", [&] {
      return cudaHostRegister(base_ + begin, static_cast<size_t>(bytes),
                              cudaHostRegisterPortable | cudaHostRegisterMapped);
    });
  } catch (const CudaError& error) {
    throw OutOfMemory(concat("host memory: ", human_bytes(bytes), " could not be pinned beside ",
                             human_bytes(begin), ": ", error.what(), "; lower host_memory"),
                      bytes, read_head_room().available);
  }
}

void PinnedResource::stop_thread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PinnedResource::release() {
  stop_thread();
  if (touching_.valid()) touching_.wait();
  touching_ = {};
  int64_t begin = 0;
  for (const int64_t bytes : pieces_) {
    // A failure can only be that of a broken context, which has unpinned everything anyway.
    if (cudaHostUnregister(base_ + begin) != cudaSuccess) cudaGetLastError();
    begin += bytes;
  }
  give_back_from(0);
  pieces_.clear();
  target_ = ready_ = committed_ = 0;
  failure_ = nullptr;
}

}  // namespace oomb::memory
