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

void expect_hidden(int64_t budget, double bound) {
  // A launch more where nothing is in flight would alone cost a dense step more than 1 %.
  TimedCall call(
      {kLayers, kChunks, budget, /*device_share=*/0.2, {}, {.own_alone = OwnAlone::kInFlight}});
  call.fill();
  call.sweep();
  const double ideal = call.ideal_seconds();
  EXPECT_LE(call.statistics().exposed_copy_seconds, bound * ideal);
  // Also what it costs the host to issue them, and waves beyond one.
  EXPECT_LE(call.seconds() - ideal, bound * ideal);
  EXPECT_GT(call.copy_seconds(), 3 * bound * ideal) << "too few copies to be worth hiding";
}

TEST(HiddenCopies, Dense) { expect_hidden(kDense, 0.01); }

TEST(HiddenCopies, Sparse) { expect_hidden(kSparse, 0.05); }

// Seconds of a call that measures its link, as a share of one that loads a fixed amount ahead.
double measured_over_fixed(int64_t budget, const testing::CopyCosts& link) {
  std::vector<double> seconds;
  for (const bool measured : {true, false}) {
    TimedCall call(
        {kLayers, kChunks, budget, /*device_share=*/0.2, link, {.measured_prefetch = measured}});
    call.fill();
    call.sweep();
    seconds.push_back(call.seconds());
  }
  return seconds[0] / seconds[1];
}

TEST(HiddenCopies, PrefetchDepthFollowsTheLink) {
  const testing::CopyCosts usual = {};
  testing::CopyCosts slow, fast, late;
  slow.slot_seconds = 22e-6;   // 12 GB/s
  fast.slot_seconds = 1.3e-6;  // 200 GB/s
  late.batch_seconds = 1e-3;
  EXPECT_LT(measured_over_fixed(kDense, usual), 0.998);
  EXPECT_LT(measured_over_fixed(kDense, slow), 0.98);
  EXPECT_LT(measured_over_fixed(kDense, fast), 1);
  EXPECT_LT(measured_over_fixed(kDense, late), 0.995);
  EXPECT_LT(measured_over_fixed(kSparse, usual), 0.985);
  EXPECT_LT(measured_over_fixed(kSparse, slow), 1);
  EXPECT_LT(measured_over_fixed(kSparse, fast), 1);
  EXPECT_LT(measured_over_fixed(kSparse, late), 0.96);
}

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
  EXPECT_EQ(engine.exposed().total(), 6);
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
  EXPECT_EQ(engine.exposed().total(), 6) << "what is over is not waited for";
}

}  // namespace
}  // namespace oomb::paging
