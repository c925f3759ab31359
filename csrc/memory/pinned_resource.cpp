#include "memory/pinned_resource.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <system_error>
#include <utility>

#include "common/bytes.h"
#include "common/error.h"
#include "common/math.h"
#include "memory/head_room.h"
#include "memory/usable_cores.h"

namespace oomb::memory {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int kPauses = 4;  // times as long as the registration before
constexpr int64_t kPiecesBeyond = 2;
constexpr double kSlowTouch = 1.0 / static_cast<double>(int64_t{128} << 20);  // seconds per byte

// A preference, not an order: memory elsewhere is better than none.
void prefer_node(std::byte* begin, int64_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  if (node < 0 || node >= 64) return;
  const unsigned long mask = 1ul << node;
  syscall(SYS_mbind, begin, static_cast<unsigned long>(bytes), kPreferred, &mask, 65ul, 0u);
}

}  // namespace

int threads_in_hurry(int cores) { return std::max(std::min(cores, 16), std::min(cores - 4, 64)); }

int threads_beside(int cores) { return std::max(std::min(cores, 4), std::min(cores / 2, 32)); }

PinnedResource::PinnedResource(PinnedOptions options, std::unique_ptr<Registrar> registrar)
    : options_(std::move(options)),
      registrar_(std::move(registrar)),
      room_({.patient = options_.explicit_size, .read = options_.read_room}),
      huge_pages_(options_.huge_pages) {
  const int cores = usable_cores();
  if (options_.threads_in_hurry == 0) options_.threads_in_hurry = threads_in_hurry(cores);
  if (options_.threads_beside == 0) options_.threads_beside = threads_beside(cores);
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
  hurry_ = false;
  aim_at(bytes);
}

void PinnedResource::aim_at(int64_t bytes) {
  target_ = std::min(bytes, capacity_);
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
    throw OutOfMemory(concat("host_memory: needed ", human_bytes(bytes), ", the limit is ",
                             human_bytes(capacity_)),
                      bytes, capacity_ - committed_);
  }
  std::unique_lock lock(mutex_);
  const bool overtaken = ready_ < bytes;
  // What was foretold is used up: growth stays a little ahead all the same.
  aim_at(bytes <= target_ ? target_ : bytes + kPiecesBeyond * piece_);
  hurry_ = hurry_ || overtaken;
  wanted_ = bytes;
  changed_.wait(lock, [&] { return ready_ >= bytes || failure_ != nullptr; });
  wanted_ = 0;
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
    const int threads = hurry_ ? options_.threads_in_hurry : options_.threads_beside;
    lock.unlock();
    bool added = false;
    std::exception_ptr failure;
    try {
      added = add_piece(begin, threads);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    if (added) {
      pieces_.push_back(piece_at(begin));
      ready_ += piece_at(begin);
    }
    failure_ = std::move(failure);  // nothing of it stays with this thread
    changed_.notify_all();
  }
}

int64_t PinnedResource::piece_at(int64_t begin) const {
  return std::min(piece_, capacity_ - begin);
}

bool PinnedResource::add_piece(int64_t begin, int threads) {
  try {
    if (touching_.valid()) touching_.get();
    if (touched_ <= begin) touch_piece(begin, threads);
    const int64_t end = begin + piece_at(begin);
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, pause_ends_, [this] { return stop_ || hurry_; });
    const bool wanted = !stop_ && target_ > begin;
    const bool more_is_waited_for = end < wanted_;
    lock.unlock();
    if (!wanted) {
      give_back_from(begin);
      return false;
    }
    if (more_is_waited_for) touch_meanwhile(end);
    const auto start = Clock::now();
    register_piece(begin);
    pause_ends_ = Clock::now() + kPauses * (Clock::now() - start);
    return true;
  } catch (...) {
    if (touching_.valid()) touching_.wait();
    touching_ = {};
    give_back_from(begin);
    throw;
  }
}

void PinnedResource::touch_meanwhile(int64_t begin) {
  try {
    touching_ = std::async(std::launch::async,
                           [=, this] { touch_piece(begin, options_.threads_in_hurry); });
  } catch (const std::system_error&) {
    // No thread to be had: the piece is touched when its turn comes.
  }
}

void PinnedResource::give_back_from(int64_t begin) {
  if (touched_ <= begin) return;
  const auto size = static_cast<size_t>(touched_ - begin);
  madvise(base_ + begin, size, MADV_DONTNEED);
  mprotect(base_ + begin, size, PROT_NONE);
  touched_ = begin;
}

void PinnedResource::touch_piece(int64_t begin, int threads) {
  const int64_t bytes = piece_at(begin);
  std::byte* piece = base_ + begin;
  room_.require(bytes, begin);
  if (mprotect(piece, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) != 0) {
    throw OutOfMemory(
        concat("host memory: ", human_bytes(bytes), " refused: ", std::strerror(errno)), bytes, 0);
  }
  touched_ = begin + bytes;
  prefer_node(piece, bytes, options_.numa_node);
  if (huge_pages_) madvise(piece, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  const auto start = Clock::now();
  options_.touch(piece, bytes, threads);
  const std::chrono::duration<double> taken = Clock::now() - start;
  if (taken.count() > kSlowTouch * static_cast<double>(bytes)) huge_pages_ = false;
}

void PinnedResource::register_piece(int64_t begin) {
  const int64_t bytes = piece_at(begin);
  try {
    registrar_->add(base_ + begin, bytes);
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
    registrar_->remove(base_ + begin);
    begin += bytes;
  }
  give_back_from(0);
  pieces_.clear();
  target_ = ready_ = committed_ = 0;
  huge_pages_ = options_.huge_pages;
}

}  // namespace oomb::memory
