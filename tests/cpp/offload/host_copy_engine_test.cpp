#include "offload/host_copy_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "common/error.h"
#include "offload/cpu_page_manager.h"
#include "offload/worker_lane.h"

namespace oomb::offload {
namespace {

using paging::Lane;
using paging::PageCopy;

constexpr int64_t kSlotBytes = 32;

struct Fixture {
  explicit Fixture(HostCopyOptions options = {})
      : device(8 * kSlotBytes, std::byte{1}), host(8 * kSlotBytes, std::byte{2}), engine([&] {
          options.device_base = device.data();
          options.host_base = host.data();
          options.slot_bytes = kSlotBytes;
          return options;
        }()) {}

  std::vector<std::byte> device, host;
  HostCopyEngine engine;
};

TEST(WorkerLane, RunsTasksInOrder) {
  WorkerLane lane;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(lane.enqueue([&order, i] { order.push_back(i); }), i + 1);
  ASSERT_TRUE(lane.wait_for(100, 60));
  EXPECT_EQ(lane.completed(), 100);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(WorkerLane, WaitTimesOut) {
  WorkerLane lane;
  std::atomic<bool> go = false;
  lane.enqueue([&] {
    while (!go) std::this_thread::yield();
  });
  EXPECT_FALSE(lane.wait_for(1, 0.01));
  go = true;
  EXPECT_TRUE(lane.wait_for(1, 60));
}

TEST(HostCopyEngine, CopiesExactlyTheNamedSlots) {
  Fixture f;
  const PageCopy store[] = {{3, 5}};
  f.engine.copy(Lane::kStore, store);
  f.engine.drain();
  for (int64_t i = 0; i < 8 * kSlotBytes; ++i) {
    ASSERT_EQ(f.host[static_cast<size_t>(i)], std::byte(i / kSlotBytes == 5 ? 1 : 2));
  }
  f.host[0] = std::byte{9};
  const PageCopy load[] = {{7, 0}, {2, 1}};
  f.engine.copy(Lane::kLoad, load);
  f.engine.drain();
  EXPECT_EQ(f.device[7 * kSlotBytes], std::byte{9});
  EXPECT_EQ(f.device[2 * kSlotBytes], std::byte{2});
  EXPECT_EQ(f.device[6 * kSlotBytes], std::byte{1});
}

TEST(HostCopyEngine, WaitHoldsALaneBack) {
  Fixture f({.asynchronous_compute = true});
  std::atomic<bool> go = false;
  f.engine.enqueue_compute([&] {
    while (!go) std::this_thread::yield();
    f.device[0] = std::byte{42};
  });
  f.engine.wait(Lane::kStore, Lane::kCompute, f.engine.mark_compute());
  const PageCopy copy[] = {{0, 0}};
  f.engine.copy(Lane::kStore, copy);
  EXPECT_EQ(f.engine.completed(Lane::kStore), 0);
  go = true;
  f.engine.drain();
  EXPECT_EQ(f.host[0], std::byte{42});
}

TEST(HostCopyEngine, TimeOfTheCallerIsExposedTime) {
  Fixture f({.delay_seed = 1, .max_delay_us = 2000});
  EXPECT_EQ(f.engine.times().waits(), 0);
  const std::vector<PageCopy> copies(20, PageCopy{0, 0});
  f.engine.wait(Lane::kCompute, Lane::kLoad, f.engine.copy(Lane::kLoad, copies));
  EXPECT_GT(f.engine.times().waits(), 0);
  f.engine.times().begin(0);
  EXPECT_EQ(f.engine.times().waits(), 0);
}

TEST(HostCopyEngine, StuckCopyIsReported) {
  Fixture f({.asynchronous_compute = true, .timeout_seconds = 0.02});
  std::atomic<bool> go = false;
  f.engine.enqueue_compute([&] {
    while (!go) std::this_thread::yield();
  });
  EXPECT_THROW(f.engine.drain(), Error);
  go = true;
}

TEST(CpuPageManager, NamesTheSettingOfABadSize) {
  EXPECT_THROW(make_cpu_page_manager({.slot_bytes = 0, .device_slots = 1}), InvalidArgument);
  EXPECT_THROW(make_cpu_page_manager({.slot_bytes = 64, .device_slots = -1}), InvalidArgument);
}

}  // namespace
}  // namespace oomb::offload
