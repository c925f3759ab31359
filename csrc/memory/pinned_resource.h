#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "memory/first_touch.h"
#include "memory/head_room.h"
#include "memory/memory_resource.h"
#include "memory/registrar.h"
#include "memory/room_check.h"

namespace oomb::memory {

struct PinnedOptions {
  int64_t capacity = 0;
  // Memory is touched and registered in pieces of at most this size: while one is registered nobody
  // can launch kernels on the device.
  int64_t piece_bytes = int64_t{128} << 20;
  int64_t slot_bytes = 1;  // no slot lies across two pieces
  bool huge_pages = true;  // as long as they come at some speed
  // The size was asked for by name: the head room read now is not the last word, see RoomCheck.
  bool explicit_size = false;
  int numa_node = -1;  // preferred, where known
  // Threads that touch, see below; 0: by the number of cores.
  int threads_in_hurry = 0;
  int threads_beside = 0;
  std::function<void(std::byte*, int64_t, int)> touch = take_pages;
  std::function<HeadRoom()> read_room = read_head_room;
};

// A thread that touches waits for the machine most of the time, in a virtual one above all, so that
// many are needed: at most 64 while somebody waits for the memory, of which some cores are left to
// those who launch kernels; at most 32 beside others.
int threads_in_hurry(int cores);
int threads_beside(int cores);

// Page-locked host memory. Reserved as addresses, then piece by piece: head room checked, huge
// pages asked for, touched by several threads, registered. That is several times as fast as
// cudaHostAlloc.
//
//     |== committed ==|== ready ==|-- being made by the thread --|----- addresses only -----|
//
// prepare() tells how much will be needed from now on: a thread goes ahead, and commit() waits for
// it only where it is overtaken. Failures of the thread are thrown by the commit() that meets them.
//
// Registering holds up every launch of a kernel, the more so while others touch memory, so that it
// pauses after each piece, and the next is touched in the pause:
//
//     thread   | register 1 |-- touch 2 --|-- rest of the pause --| register 2 |-- touch 3 -- ...
//
// Once it is overtaken the thread is in a hurry until the next prepare(): touching is pause enough,
// and more threads do it. Who waited for one piece, as a page manager does, is back for the next
// before long. Who commits many at once, at rest, launches nothing meanwhile and gets them faster:
//
//     thread   | register 1 | register 2 | register 3 |
//     touches  |-- 2 --|    |-- 3 --|
class PinnedResource final : public MemoryResource {
 public:
  PinnedResource(PinnedOptions options, std::unique_ptr<Registrar> registrar);
  ~PinnedResource() override;

  std::byte* base() const override { return base_; }
  int64_t capacity() const override { return capacity_; }
  int64_t committed() const override { return committed_; }
  int64_t ready() const override;
  int64_t granularity() const override { return piece_; }
  void commit(int64_t bytes) override;
  void prepare(int64_t bytes) override;
  void release() override;

  // Where memory is in fragments the system moves it together for every huge page, which can take
  // a minute per gigabyte: after a piece slower than 128 MiB/s small ones are taken.
  bool asks_for_huge_pages() const { return huge_pages_; }

 private:
  using Clock = std::chrono::steady_clock;

  void aim_at(int64_t bytes);  // the new target; mutex_ is held
  void run();
  bool add_piece(int64_t begin, int threads);  // false: it is not wanted any more
  int64_t piece_at(int64_t begin) const;
  void touch_piece(int64_t begin, int threads);
  void touch_meanwhile(int64_t begin);
  void register_piece(int64_t begin);
  void give_back_from(int64_t begin);
  void stop_thread();

  PinnedOptions options_;
  std::unique_ptr<Registrar> registrar_;
  int64_t piece_ = 0;
  int64_t capacity_ = 0;
  std::byte* base_ = nullptr;
  int64_t committed_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t target_ = 0;
  int64_t ready_ = 0;
  int64_t wanted_ = 0;  // by a commit() that waits
  bool hurry_ = false;
  bool stop_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
  std::vector<int64_t> pieces_;  // sizes of what is registered, from the front
  // Of the thread and of touching_, one at a time (and of whoever has joined the thread):
  std::future<void> touching_;  // takes the piece behind the one being registered
  int64_t touched_ = 0;         // pages below this have been taken
  Clock::time_point pause_ends_;
  RoomCheck room_;
  std::atomic<bool> huge_pages_;
};

}  // namespace oomb::memory
