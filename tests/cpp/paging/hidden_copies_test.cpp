// Copies hide behind compute: whole calls in virtual time, with the costs of Qwen2.5-7B on an H200.
// The bounds are what the host tier may cost a training step: dense 1 %, sparse 5 %.

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "paging/copy_engine.h"
#include "paging/timed_call.h"
#include "support/timed_copy_engine.h"

namespace oomb::paging {
namespace {

// Fewer layers than the model's 28 and fewer chunks than a long context's, so that a call takes a
// fraction of a second; one layer's pages then weigh more in the device tier, which is harder.
constexpr int32_t kLayers = 14;
constexpr int32_t kChunks = 24;

constexpr int64_t kDense = 0;
constexpr int64_t kSparse = 64;  // pages per query block

constexpr testing::CopyCosts kUsual = {};
constexpr testing::CopyCosts kSlow = {.slot_seconds = 9e-6};  // 28 GB/s each way

struct Cost {  // shares of what the same kernels take back to back
  double waits;
  double extra;  // also what it costs the host to issue copies, and waves beyond one
  double copies;
};

Cost cost_of(int64_t budget, const testing::CopyCosts& link) {
  TimedCall call({kLayers, kChunks, budget, /*device_share=*/0.26, link});
  call.fill();
  call.sweep();
  const double ideal = call.ideal_seconds();
  return {call.statistics().exposed_copy_seconds / ideal, call.seconds() / ideal - 1,
          call.copy_seconds() / ideal};
}

void expect_hidden(int64_t budget, const testing::CopyCosts& link, double waits, double extra) {
  const Cost cost = cost_of(budget, link);
  EXPECT_LE(cost.waits, waits);
  EXPECT_LE(cost.extra, extra);
  EXPECT_GT(cost.copies, 10 * extra) << "too few copies to be worth hiding";
}

TEST(HiddenCopies, Dense) { expect_hidden(kDense, kUsual, 0.001, 0.002); }
TEST(HiddenCopies, Sparse) { expect_hidden(kSparse, kUsual, 0.002, 0.012); }

// Where the link only just suffices, layers must share what the tier holds.
TEST(HiddenCopies, SparseOverASlowerLink) { expect_hidden(kSparse, kSlow, 0.004, 0.015); }

TEST(HiddenCopies, NothingToHideWhenEverythingFits) {
  for (const int64_t budget : {kDense, kSparse}) {
    TimedCall call({kLayers, kChunks, budget, /*device_share=*/1});
    call.fill();
    call.sweep();
    EXPECT_EQ(call.statistics().exposed_copy_seconds, 0);
    EXPECT_EQ(call.copy_seconds(), 0);
  }
}

// A tier that holds less than half of what one layer reads: TimedCall checks every wave.
TEST(HiddenCopies, WavesFitATierSmallerThanAVisit) {
  for (const int64_t budget : {kDense, kSparse}) {
    TimedCall call({/*layers=*/2, kChunks, budget, /*device_share=*/0.2});
    call.fill();
    call.sweep();
  }
}

//     load     [ 3 + 4 * 2 ]
//     compute  [ 5 ]......[ 1 ]
//     store    .............[ 3 + 1 * 2 ]
TEST(TimedCopyEngine, LanesWaitForEachOther) {
  testing::TimedCopyEngine engine({.slot_seconds = 2,
                                   .batch_seconds = 3,
                                   .issue_seconds = 0,
                                   .record_seconds = 0,
                                   .filled_seconds = 0});
  const Ticket loaded = engine.copy(Lane::kLoad, std::vector<PageCopy>(4));
  engine.compute(5);
  engine.wait(Lane::kCompute, Lane::kLoad, loaded);
  EXPECT_EQ(engine.times().waits(), 6);
  engine.compute(1);
  EXPECT_EQ(engine.compute_end(), 12);
  engine.wait(Lane::kStore, Lane::kCompute, engine.mark_compute());
  const Ticket stored = engine.copy(Lane::kStore, std::vector<PageCopy>(1));
  engine.let_host_wait_until(16.5);
  EXPECT_EQ(engine.completed(Lane::kLoad), loaded);
  EXPECT_LT(engine.completed(Lane::kStore), stored);
  engine.let_host_wait_until(17);
  EXPECT_EQ(engine.completed(Lane::kStore), stored);
  engine.wait(Lane::kCompute, Lane::kLoad, loaded);
  EXPECT_EQ(engine.times().waits(), 6) << "what is over is not waited for";
}

}  // namespace
}  // namespace oomb::paging
