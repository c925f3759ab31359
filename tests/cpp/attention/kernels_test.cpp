// The choice among kernels, with folders that do not exist: what they declare is all that counts.

#include "attention/kernels.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "common/error.h"

namespace oomb::attention {
namespace {

int fast_runs = 0, plain_runs = 0;

constexpr Kernels kPlain = {
    .name = "everywhere",
    .key_tile = 1,
    .takes_forward = [](const ForwardParams&, int) { return true; },
    .takes_backward = [](const BackwardParams&, int) { return true; },
    .forward = [](const ForwardParams&) { ++plain_runs; },
    .backward = [](const BackwardParams&) { ++plain_runs; },
};

constexpr int64_t kNewerPages[] = {32, 64, 128};
constexpr int64_t kOlderPages[] = {64, 128, 256};

// For another GPU, calling those above where it has none of its own.
constexpr Kernels kNewer = {
    .name = "newer",
    .key_tile = 192,
    .fast_for = "new things",
    .page_sizes = kNewerPages,
    .fast_head_dim = [](int64_t dim,
                        int capability) { return dim == 128 && capability / 10 == 12; },
    .takes_forward = [](const ForwardParams& params,
                        int capability) { return capability / 10 == 12 && params.scale > 0; },
    .takes_backward = [](const BackwardParams&, int capability) { return capability / 10 == 12; },
    .forward = [](const ForwardParams&) { ++fast_runs; },
    .backward = kPlain.backward,
    .forward_workspace_bytes = [](const ForwardParams& params) { return params.shape.chunk; },
};

constexpr Kernels kOlder = {
    .name = "older",
    .key_tile = 128,
    .fast_for = "old things",
    .page_sizes = kOlderPages,
    .fast_head_dim = [](int64_t dim, int) { return dim == 64 || dim == 256; },
    .takes_forward = [](const ForwardParams& params, int) { return params.shape.head_dim == 64; },
    .takes_backward = [](const BackwardParams&, int) { return false; },
    .forward = kPlain.forward,
    .backward = kPlain.backward,
};

constexpr std::array<const Kernels*, 3> kAll = {&kNewer, &kOlder, &kPlain};

std::string chosen(int capability, double scale, int64_t head_dim) {
  ForwardParams params;
  params.scale = scale;
  params.shape.head_dim = head_dim;
  return choose_kernels(kAll, params, capability, nullptr).name;
}

TEST(KernelsTest, TheFirstThatTakeACallRunIt) {
  EXPECT_EQ(chosen(120, 1.0, 64), "newer");
  EXPECT_EQ(chosen(90, 1.0, 64), "older");
  EXPECT_EQ(chosen(120, -1.0, 64), "older");
  EXPECT_EQ(chosen(120, -1.0, 80), "everywhere");
  EXPECT_STREQ(choose_kernels(kAll, BackwardParams{}, 121, nullptr).name, "newer");
  EXPECT_STREQ(choose_kernels(kAll, BackwardParams{}, 80, nullptr).name, "everywhere");
}

TEST(KernelsTest, RunsWhatIsDeclared) {
  fast_runs = plain_runs = 0;
  ForwardParams forward;
  forward.shape.chunk = 77;
  const Kernels& newer = choose_kernels(kAll, forward, 120, nullptr);
  newer.run(forward);
  EXPECT_EQ(fast_runs, 1);
  newer.run(BackwardParams{});  // those of the plain ones
  EXPECT_EQ(plain_runs, 1);
  EXPECT_EQ(newer.workspace_bytes(forward), 77);
  EXPECT_EQ(newer.workspace_bytes(BackwardParams{}), 0);
}

TEST(KernelsTest, ForcedOnesRunOrRefuse) {
  ForwardParams params;
  params.dtype = DType::kBFloat16;
  params.shape.head_dim = 80;
  params.shape.page_size = 32;
  EXPECT_EQ(&choose_kernels(kAll, params, 120, &kPlain), &kPlain);
  try {
    choose_kernels(kAll, params, 86, &kOlder);
    FAIL() << "expected a refusal";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(),
                 "OOMB_ATTENTION: expected an implementation that takes bfloat16, head dim 80, "
                 "pages of 32 tokens on compute capability 8.6, got older");
  }
  params.cap = 50;
  try {
    choose_kernels(kAll, params, 86, &kOlder);
    FAIL() << "expected a refusal";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("32 tokens, scores capped at 50 on"),
              std::string::npos)
        << error.what();
  }
}

TEST(KernelsTest, NamesAreThoseDeclared) {
  EXPECT_EQ(&kernels_named(kAll, "older"), &kOlder);
  try {
    kernels_named(kAll, "fast");
    FAIL() << "expected a refusal";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "OOMB_ATTENTION: expected newer, older or everywhere, got fast");
  }
}

TEST(KernelsTest, WavesSuitTheStepsOfAllOfThem) {
  EXPECT_EQ(common_key_tile(kAll), 384);
  EXPECT_EQ(common_key_tile(Preference(kAll).subspan(1)), 128);
}

TEST(KernelsTest, HeadsArePaddedToTheNextThatIsFast) {
  EXPECT_EQ(padded_head_dim(kAll, 40, 90), 64);
  EXPECT_EQ(padded_head_dim(kAll, 64, 90), 64);
  EXPECT_EQ(padded_head_dim(kAll, 65, 120), 128);
  EXPECT_EQ(padded_head_dim(kAll, 192, 120), 256);
  EXPECT_EQ(padded_head_dim(kAll, 128, 90), 256);
  EXPECT_EQ(padded_head_dim(kAll, 127, 90), 127);  // not to more than twice
  EXPECT_EQ(padded_head_dim(kAll, 257, 120), 257);
  EXPECT_EQ(padded_head_dim(Preference(kAll).subspan(2), 80, 120), 80);
}

TEST(KernelsTest, FastOnesSayWhatTheyTake) {
  EXPECT_EQ(fast_page_sizes(kAll), (std::vector<int64_t>{64, 128}));
  EXPECT_EQ(fast_page_sizes(Preference(kAll).subspan(2)), std::vector<int64_t>{});
  EXPECT_EQ(describe_fast(kAll), "newer: new things; older: old things");
}

}  // namespace
}  // namespace oomb::attention
