// Page operations of the CPU: writing, reading gradients, scores and selection.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention/cpu/cpu.h"
#include "attention/params.h"

namespace oomb::attention::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> random(int64_t size, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values;
  for (int64_t i = 0; i < size; ++i) values.push_back(normal(generator));
  return values;
}

size_t index(int64_t i) { return static_cast<size_t>(i); }

TEST(PageWriteTest, RowsMeansAndZerosBehindThem) {
  // Two sequences of 7 tokens in pages of 3; the second has 4 real tokens. Page 1 of the first
  // sequence has no slot: slot 3 stays as it was.
  const Shape shape{2, 2, 2, 7, 5, 3};
  const std::vector<double> k = random(2 * 2 * 7 * 5, 1), v = random(2 * 2 * 7 * 5, 2);
  const std::vector<int32_t> slots = {4, -1, 0, 2, 1, 5}, num_rows = {7, 4};
  const int64_t half = 2 * 3 * 5;
  std::vector<double> pool(index(6 * 2 * half), -9), summary(index(2 * 3 * 2 * 5), -9);
  PageWriteParams params;
  params.shape = shape;
  params.dtype = DType::kFloat64;
  params.k = k.data();
  params.v = v.data();
  params.k_strides = params.v_strides = {2 * 7 * 5, 7 * 5, 5};
  params.page_end = 3;
  params.kv_pool = pool.data();
  params.kv_slot_bytes = 2 * half * 8;
  params.slots = slots.data();
  params.slots_stride = 3;
  params.num_rows = num_rows.data();
  params.summary = summary.data();
  params.summary_stride = 3;
  page_write(params);

  std::vector<double> pool_want(pool.size(), -9), summary_want(summary.size(), -9);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t page = 0; page < 3; ++page) {
      const int32_t slot = slots[index(b * 3 + page)];
      if (slot < 0) continue;
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 5; ++d) {
          double sum = 0, count = 0;
          for (int64_t row = 0; row < 3; ++row) {
            const size_t from = index(((b * 2 + h) * 7 + page * 3 + row) * 5 + d);
            const size_t to = index(slot * 2 * half + (h * 3 + row) * 5 + d);
            const bool real = page * 3 + row < num_rows[index(b)];
            pool_want[to] = real ? k[from] : 0;
            pool_want[to + index(half)] = real ? v[from] : 0;
            if (real) sum += k[from], ++count;
          }
          summary_want[index(((b * 3 + page) * 2 + h) * 5 + d)] = count > 0 ? sum / count : 0;
        }
      }
    }
  }
  EXPECT_EQ(pool, pool_want);
  for (size_t i = 0; i < summary.size(); ++i) EXPECT_NEAR(summary[i], summary_want[i], 1e-15);
}

TEST(PageGradientReadTest, AddsScaledPagesOfTheRange) {
  const Shape shape{1, 2, 2, 7, 5, 3};
  const std::vector<double> before = random(2 * 7 * 5, 1), pages = random(6 * 2 * 3 * 5, 2);
  std::vector<double> dk = before, dv = before, pool = pages;
  const std::vector<int32_t> table = {3, 1, -1, -1, 0, 5};
  PageGradientReadParams params;
  params.shape = shape;
  params.dtype = DType::kFloat64;
  params.grads = {pool.data(), 2 * 3 * 5 * 8, table.data(), DType::kFloat64, 0};
  params.table_stride = 3;
  params.page_begin = 1;
  params.page_end = 3;
  params.scale = 2.5;
  params.dk = dk.data();
  params.dv = dv.data();
  params.dk_strides = params.dv_strides = {2 * 7 * 5, 7 * 5, 5};
  page_gradient_read(params);
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t row = 0; row < 7; ++row) {
      for (int64_t d = 0; d < 5; ++d) {
        const size_t i = index((h * 7 + row) * 5 + d);
        // Only token 6, the first of page 2, is in a page of the range that has a gradient.
        const size_t at = index(h * 3 * 5 + d);
        EXPECT_DOUBLE_EQ(dk[i], before[i] + (row == 6 ? 2.5 * pages[at] : 0));
        EXPECT_DOUBLE_EQ(dv[i], before[i] + (row == 6 ? 2.5 * pages[at + 5 * 30] : 0));
      }
    }
  }
}

struct ScoreCase {
  ScoreKind kind;
  int64_t heads;
  std::vector<int32_t> first_key, num_keys;
};

class PageScoreTest : public ::testing::TestWithParam<ScoreCase> {};

TEST_P(PageScoreTest, EqualsDefinition) {
  const ScoreCase& c = GetParam();
  const int64_t batch = 2, group = 3, kv_heads = 2, chunk = 10, dim = 6, page = 4, past = 4 * 5 + 2;
  const int64_t pages = 6, blocks = 3;
  const std::vector<double> q = random(batch * group * kv_heads * chunk * dim, 1);
  const std::vector<double> summary = random(batch * pages * kv_heads * dim, 2);
  std::vector<double> scores(index(batch * blocks * c.heads * pages), 77);
  PageScoreParams params;
  params.shape = {batch, group * kv_heads, kv_heads, chunk, dim, page};
  params.visibility.first_key = c.first_key.empty() ? nullptr : c.first_key.data();
  params.visibility.num_keys = c.num_keys.empty() ? nullptr : c.num_keys.data();
  params.dtype = DType::kFloat64;
  params.kind = c.kind;
  params.q = q.data();
  params.q_strides = {group * kv_heads * chunk * dim, chunk * dim, dim};
  params.summary = summary.data();
  params.summary_stride = pages;
  params.num_tokens = past;
  params.score_heads = c.heads;
  params.scores = scores.data();
  page_score(params);

  const auto query = [&](int64_t b, int64_t h, int64_t token, int64_t d) {
    return q[index(((b * group * kv_heads + h) * chunk + token) * dim + d)];
  };
  std::vector<double> want(scores.size(), 0);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t real = c.num_keys.empty() ? past + chunk : c.num_keys[index(b)];
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = c.first_key.empty() ? 0 : c.first_key[index(b * chunk + block * page)];
      std::vector<int64_t> tokens;
      for (int64_t t = block * page; t < std::min(chunk, (block + 1) * page); ++t) {
        if (past + t < real) tokens.push_back(t);
      }
      for (int64_t head = 0; head < kv_heads; ++head) {
        const auto dot = [&](int64_t t, int64_t p) {
          double sum = 0;
          for (int64_t g = 0; g < group; ++g) {
            for (int64_t d = 0; d < dim; ++d) {
              sum += query(b, head * group + g, t, d) *
                     summary[index(((b * pages + p) * kv_heads + head) * dim + d)];
            }
          }
          return sum;
        };
        const auto candidate = [&](int64_t p) {
          return (p + 1) * page > first && p * page < std::min(past, real);
        };
        for (int64_t p = 0; p < pages; ++p) {
          double& score =
              want[index(((b * blocks + block) * c.heads + (c.heads == 1 ? 0 : head)) * pages + p)];
          if (!candidate(p)) score = -kInfinity;
          if (!candidate(p) || tokens.empty()) continue;
          for (const int64_t t : tokens) {
            if (c.kind == ScoreKind::kBlockMean) {
              score += dot(t, p) / static_cast<double>(group * static_cast<int64_t>(tokens.size()));
            } else {
              double sum = 0;
              for (int64_t other = 0; other < pages; ++other) {
                if (candidate(other)) sum += std::exp(dot(t, other) - dot(t, p));
              }
              score += 1 / sum;
            }
          }
        }
      }
    }
  }
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isinf(want[i])) {
      EXPECT_EQ(scores[i], want[i]) << i;
    } else {
      EXPECT_NEAR(scores[i], want[i], 1e-13) << i;
    }
  }
}

// Blocks of 4 tokens: the first sequence's second block begins in a document of the chunk.
const std::vector<int32_t> kFirstKeys = {0, 0, 9,  9,  24, 24, 24, 24, 24, 24,
                                         8, 8, 12, 12, 12, 12, 12, 12, 13, 13};

INSTANTIATE_TEST_SUITE_P(
    Cases, PageScoreTest,
    ::testing::Values(ScoreCase{ScoreKind::kBlockMean, 1, {}, {}},
                      ScoreCase{ScoreKind::kBlockMean, 2, kFirstKeys, {32, 27}},
                      ScoreCase{ScoreKind::kBlockMean, 1, kFirstKeys, {32, 13}},
                      ScoreCase{ScoreKind::kTokenSoftmax, 2, {}, {}},
                      ScoreCase{ScoreKind::kTokenSoftmax, 1, kFirstKeys, {32, 27}},
                      ScoreCase{ScoreKind::kTokenSoftmax, 2, kFirstKeys, {0, 13}}));

struct SelectCase {
  std::vector<float> scores;
  int64_t budget, sinks, recent;
  std::vector<int32_t> want;
};

constexpr float kNot = -std::numeric_limits<float>::infinity();

TEST(PageSelectTest, BestPagesSinksAndRecent) {
  const std::vector<SelectCase> cases = {
      {{0.1f, 0.9f, 0.5f, 0.7f}, 2, 0, 0, {1, 3}},
      {{0.9f, 0.9f, 0.9f, 0.9f}, 2, 0, 0, {0, 1}},
      {{0.1f, 0.9f, 0.2f, 0.9f}, 1, 0, 0, {1}},
      {{0.1f, 0.9f}, 3, 0, 0, {0, 1, -1}},
      {{kNot, 0.9f, kNot, -5.0f}, 3, 0, 0, {1, 3, -1}},
      {{kNot, kNot}, 2, 1, 1, {-1, -1}},
      {{0.1f, 0.9f, 0.5f, 0.7f, 0.2f}, 3, 1, 1, {0, 1, 4}},
      {{kNot, 0.1f, 0.9f, 0.5f, 0.0f, kNot}, 3, 1, 1, {1, 2, 4}},
      {{0.1f, 0.9f, 0.5f, 0.7f, 0.2f}, 2, 1, 3, {0, 4}},
      {{0.1f, 0.9f, 0.5f}, 2, 5, 0, {0, 1}},
  };
  for (const SelectCase& c : cases) {
    std::vector<int32_t> selection(index(c.budget), 99);
    PageSelectParams params;
    params.rows = 1;
    params.num_pages = static_cast<int64_t>(c.scores.size());
    params.budget = c.budget;
    params.sink_pages = c.sinks;
    params.recent_pages = c.recent;
    params.scores = c.scores.data();
    params.selection = selection.data();
    page_select(params);
    EXPECT_EQ(selection, c.want) << ::testing::PrintToString(c.scores);
  }
}

}  // namespace
}  // namespace oomb::attention::cpu
