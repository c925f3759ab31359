// The CPU kernels against the definition, and the bits that nothing may change.

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "attention/paged_problem.h"
#include "attention/reference.h"
#include "common/error.h"

namespace oomb::testing {
namespace {

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {.name = "Plain"},
      {.name = "OneToken", .chunk = 1},
      {.name = "OneTokenAlone", .chunk = 1, .past = 0},
      {.name = "NoPast", .past = 0},
      {.name = "OnePage", .past = 16},
      {.name = "ThreePagesAnd9", .past = 3 * 16 + 9},
      {.name = "PageOf128Keys17Left", .batch = 1, .chunk = 70, .page = 128, .past = 3 * 128 + 17},
      {.name = "PageOfOne", .chunk = 5, .page = 1, .past = 7},
      {.name = "PageOf13", .chunk = 30, .page = 13, .past = 40},
      {.name = "Heads1To1", .query_heads = 3, .kv_heads = 3},
      {.name = "Group3", .query_heads = 6, .kv_heads = 2, .chunk = 37},
      {.name = "Group4", .batch = 2, .query_heads = 8, .kv_heads = 2},
      {.name = "Group7", .query_heads = 7, .kv_heads = 1, .chunk = 33},
      {.name = "Dim1", .head_dim = 1},
      {.name = "Dim21", .head_dim = 21},
      {.name = "Dim80", .chunk = 20, .head_dim = 80},
      {.name = "Dim256", .query_heads = 2, .chunk = 18, .head_dim = 256},
      {.name = "Window", .past = 3 * 16 + 9, .window = 20},
      {.name = "WindowOfOne", .window = 1},
      {.name = "WindowInsideChunk", .chunk = 50, .window = 5},
      {.name = "Documents", .batch = 2, .documents = {0, 13, 50, 61, 80}},
      {.name = "DocumentsFromChunk", .documents = {48}},
      {.name = "Padding", .batch = 3, .num_keys = {88, 61, 20}},
      {.name = "EmptySequence", .batch = 2, .num_keys = {88, 0}},
      {.name = "NothingToSee", .batch = 2, .documents = {40}, .num_keys = {88, 30}},
      {.name = "Listed", .past = 6 * 16, .listed = {0, 2, 5}},
      {.name = "ListedPerHead",
       .batch = 2,
       .past = 6 * 16,
       .listed = {1, 2, 3},
       .list_per_head = true},
      {.name = "ListedTailAndWindow", .past = 5 * 16 + 3, .window = 70, .listed = {0, 3, 5}},
      {.name = "SomeWithoutGradient", .past = 6 * 16, .no_gradient = {0, 3}},
      {.name = "Capped", .past = 3 * 16 + 9, .cap = 1.5},
      {.name = "CappedFarAway", .batch = 2, .query_heads = 6, .chunk = 37, .cap = 50},
      {.name = "Everything",
       .batch = 2,
       .query_heads = 6,
       .kv_heads = 2,
       .chunk = 53,
       .past = 6 * 16 + 5,
       .window = 60,
       .documents = {0, 20, 110},
       .num_keys = {154, 118},
       .listed = {0, 3, 4, 6},
       .list_per_head = true,
       .no_gradient = {4}},
      {.name = "CappedAndHidden",
       .batch = 2,
       .query_heads = 6,
       .chunk = 53,
       .past = 6 * 16 + 5,
       .window = 60,
       .documents = {0, 20, 110},
       .num_keys = {154, 118},
       .listed = {0, 3, 4, 6},
       .list_per_head = true,
       .no_gradient = {4},
       .cap = 2.5},
  };
  return all;
}

class AttentionTest : public ::testing::TestWithParam<Case> {
 protected:
  void TearDown() override { attention::cpu::set_num_threads(2); }
};

template <typename Real>
void expect_near(const Results<Real>& got, const Results<double>& expected, double bound) {
  EXPECT_LE(relative_error(got.o, expected.o), bound) << "o";
  EXPECT_LE(relative_error(got.lse, expected.lse), bound) << "lse";
  EXPECT_LE(relative_error(got.dq, expected.dq), bound) << "dq";
  EXPECT_LE(relative_error(got.dk, expected.dk), bound) << "dk";
  EXPECT_LE(relative_error(got.dv, expected.dv), bound) << "dv";
}

TEST_P(AttentionTest, Float64EqualsDefinition) {
  Problem<double, double> problem(GetParam());
  const Results<double> got = problem.run();
  expect_near(got, reference(problem), 3e-15 * 10);
}

TEST_P(AttentionTest, Float32EqualsDefinition) {
  Problem<float, float> problem(GetParam());
  const Results<float> got = problem.run();
  expect_near(got, reference(problem), 3e-6);
}

TEST_P(AttentionTest, HalfStorageRoundsOnlyOutputs) {
  // d_score takes its mean from the rounded o: twice the unit of the type.
  Problem<BFloat16, float> bfloat16(GetParam());
  expect_near(bfloat16.run(), reference(bfloat16), 0x1p-7);
  Problem<Half, float> half(GetParam());
  expect_near(half.run(), reference(half), 0x1p-10);
  Problem<BFloat16, BFloat16> rounded(GetParam());
  expect_near(rounded.run(), reference(rounded), 0x1p-6);
}

template <typename Storage, typename Gradient>
void expect_waves_and_slots_change_nothing(const Case& c) {
  Problem<Storage, Gradient> problem(c);
  const auto whole = problem.run();
  for (int64_t border = 0; border <= c.pages(); ++border) {
    EXPECT_EQ(problem.run({border}), whole) << "wave border " << border;
  }
  std::vector<int64_t> every_page(static_cast<size_t>(c.pages()));
  std::iota(every_page.begin(), every_page.end(), 0);
  EXPECT_EQ(problem.run(every_page), whole);
  Problem<Storage, Gradient> moved(c, 17);
  EXPECT_TRUE(c.past == 0 || moved.block_table != problem.block_table);
  EXPECT_EQ(moved.run(), whole);
}

TEST_P(AttentionTest, WavesAndSlotsChangeNoBit) {
  expect_waves_and_slots_change_nothing<float, float>(GetParam());
  expect_waves_and_slots_change_nothing<double, double>(GetParam());
  expect_waves_and_slots_change_nothing<BFloat16, BFloat16>(GetParam());
}

TEST_P(AttentionTest, ThreadsChangeNoBit) {
  Problem<float, float> problem(GetParam());
  attention::cpu::set_num_threads(1);
  const auto alone = problem.run();
  for (const int64_t threads : {2, 3, 7}) {
    attention::cpu::set_num_threads(threads);
    EXPECT_EQ(problem.run(), alone) << threads << " threads";
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(AttentionSelectionTest, ListOfAllPagesIsDense) {
  for (Case c : cases()) {
    if (!c.listed.empty() || c.past == 0) continue;
    SCOPED_TRACE(c.name);
    Problem<float, float> dense(c);
    c.listed.resize(static_cast<size_t>(c.pages()));
    std::iota(c.listed.begin(), c.listed.end(), 0);
    Problem<float, float> listed(c);
    EXPECT_EQ(listed.run(), dense.run());
  }
}

TEST(AttentionErrorTest, ListsThatAreNoListsOfPastPages) {
  const std::vector<std::vector<int32_t>> bad = {
      {1, 1, -1}, {2, 1, -1}, {0, 3, -1}, {-2, 0, -1}, {0, -1, 1}};
  for (const auto& list : bad) {
    Problem<float, float> problem({.chunk = 16, .listed = {0, 1}});
    problem.selection = list;
    EXPECT_THROW(problem.forward(), InvalidArgument) << ::testing::PrintToString(list);
  }
}

TEST(AttentionErrorTest, PageThatIsNotResident) {
  for (const int32_t slot : {-1, 5}) {
    Problem<float, float> problem({});
    problem.run();
    problem.block_table[1] = slot;
    EXPECT_THROW(problem.forward(), InvalidArgument);
    EXPECT_THROW(problem.backward(), InvalidArgument);
  }
}

TEST(AttentionErrorTest, PagesThatNobodySeesMayBeAbsent) {
  Problem<double, double> window({.chunk = 16, .window = 20});
  window.block_table[0] = -1;
  expect_near(window.run(), reference(window), 1e-13);
  Problem<double, double> listed({.listed = {0, 2}});
  listed.block_table[1] = -1;
  expect_near(listed.run(), reference(listed), 1e-13);
}

TEST(AttentionErrorTest, StateIsNeededBetweenWaves) {
  Problem<float, float> problem({});
  attention::ForwardParams params = problem.forward_params();
  params.last_wave = false;
  EXPECT_THROW(attention::cpu::forward(params), InvalidArgument);
}

}  // namespace
}  // namespace oomb::testing
