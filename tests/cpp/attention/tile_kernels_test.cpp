// The inner loops of every instruction set this machine has, one tile at a time.

#include "attention/cpu/tile_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <ostream>
#include <random>
#include <vector>

#include "attention/reference.h"
#include "common/error.h"
#include "common/math.h"

namespace oomb::attention::cpu {

static std::ostream& operator<<(std::ostream& stream, const InstructionSet& set) {
  return stream << set.name;
}

namespace {

template <typename Real>
const TileKernels<Real>& kernels_of(const InstructionSet& set) {
  if constexpr (sizeof(Real) == 8) {
    return set.double_precision;
  } else {
    return set.single_precision;
  }
}

class TileKernelsTest : public ::testing::TestWithParam<InstructionSet> {
 protected:
  template <typename Real>
  std::vector<Real> random(int64_t size) {
    std::normal_distribution<double> normal;
    std::vector<Real> values;
    for (int64_t i = 0; i < size; ++i) values.push_back(static_cast<Real>(normal(generator_)));
    return values;
  }

  // Runs a tile of the given logarithms (base 2) against weights: exp2 of their distance to 0.
  template <typename Real>
  std::vector<Real> exp2_of(const std::vector<Real>& exponents) {
    const TileKernels<Real>& kernels = kernels_of<Real>(GetParam());
    const int64_t width = kernels.panel_rows;
    const auto keys = static_cast<int64_t>(exponents.size());
    std::vector<Real> q(static_cast<size_t>(width), 1), acc(q.size(), 0), sum(q.size(), 0);
    std::vector<Real> max(q.size(), 0), scores(static_cast<size_t>(keys * width));
    ForwardTile<Real> tile;
    tile.tile = {keys, exponents.data(), exponents.data(), 1, 1};
    tile.head_dim = 1;
    tile.vectors = 1;
    tile.of_product.scale_log2 = 1;
    tile.q = q.data();
    tile.scores = scores.data();
    tile.acc = acc.data();
    tile.max = max.data();
    tile.sum = sum.data();
    kernels.forward(tile);
    std::vector<Real> result;
    for (int64_t key = 0; key < keys; ++key) {
      result.push_back(scores[static_cast<size_t>(key * width)]);
    }
    return result;
  }

  template <typename Real>
  void expect_exp2_accurate(Real lowest, double bound) {
    std::vector<Real> exponents;
    for (int i = 0; i <= 20000; ++i) exponents.push_back(lowest * static_cast<Real>(i) / 20000);
    const std::vector<Real> got = exp2_of(exponents);
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const long double exact = std::exp2(static_cast<long double>(exponents[i]));
      worst = std::max(worst, static_cast<double>(std::abs((got[i] - exact) / exact)));
    }
    EXPECT_LE(worst, bound);
    const Real infinity = std::numeric_limits<Real>::infinity();
    EXPECT_EQ(exp2_of<Real>({0, -infinity, 2 * lowest, -1, -2}),
              (std::vector<Real>{1, 0, 0, Real{0.5}, Real{0.25}}));
  }

  // The largest score of one key that has the product q . k, base 2, under a cap.
  template <typename Real>
  Real capped(Real product, double cap) {
    const TileKernels<Real>& kernels = kernels_of<Real>(GetParam());
    const auto width = static_cast<size_t>(kernels.panel_rows);
    std::vector<Real> q(width, 1), acc(width, 0), sum(width, 0), scores(width);
    std::vector<Real> max(width, std::numeric_limits<Real>::lowest() / 2);
    ForwardTile<Real> tile;
    tile.tile = {1, &product, &product, 1, 1};
    tile.head_dim = 1;
    tile.vectors = 1;
    tile.of_product = {1.0, cap};
    tile.q = q.data();
    tile.scores = scores.data();
    tile.acc = acc.data();
    tile.max = max.data();
    tile.sum = sum.data();
    kernels.forward(tile);
    return max[0];
  }

  // From scores a cap leaves alone to those it holds, all to the last digits.
  template <typename Real>
  void expect_cap_accurate(double bound) {
    const double cap = 50;
    double worst = 0;
    for (int i = -300; i <= 300; ++i) {
      const double size = cap * std::exp2(std::abs(i) / 10.0 - 25);  // up to 32 caps
      const auto product = static_cast<Real>(i < 0 ? -size : size);
      const long double exact = cap * std::numbers::log2e_v<long double> *
                                std::tanh(static_cast<long double>(product) / cap);
      const long double got = capped(product, cap);
      worst = std::max(worst, static_cast<double>(std::abs((got - exact) / exact)));
    }
    EXPECT_LE(worst, bound);
    EXPECT_EQ(capped(Real{0}, cap), Real{0});
    EXPECT_EQ(capped(std::numeric_limits<Real>::infinity(), cap),
              static_cast<Real>(cap * std::numbers::log2e));
  }

  // All shapes of blocks: rows with rests of 1, 2 and 4, one to three vectors.
  template <typename Real>
  void expect_product(double bound) {
    const TileKernels<Real>& kernels = kernels_of<Real>(GetParam());
    for (const int64_t rows : {1, 3, 8, 23}) {
      for (int64_t vectors = 1; vectors <= 3; ++vectors) {
        const int64_t depth = 19, stride = 21, width = kernels.panel_rows;
        const auto a = random<Real>(rows * stride), b = random<Real>(depth * width);
        std::vector<Real> c(static_cast<size_t>(rows * width), Real{-7});
        kernels.multiply(rows, depth, a.data(), stride, b.data(), vectors, c.data());
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < width; ++j) {
            double sum = 0;
            for (int64_t k = 0; k < depth; ++k) {
              sum += static_cast<double>(a[static_cast<size_t>(i * stride + k)]) *
                     static_cast<double>(b[static_cast<size_t>(k * width + j)]);
            }
            const Real got = c[static_cast<size_t>(i * width + j)];
            if (j < vectors * kernels.lanes) {
              EXPECT_NEAR(got, sum, bound * 10) << i << ", " << j;
            } else {
              EXPECT_EQ(got, Real{-7}) << "written past the panel's vectors";
            }
          }
        }
      }
    }
  }

  // One backward tile against loops, for head dims that are padded to whole vectors.
  template <typename Real>
  void expect_backward(int64_t head_dim, bool masked, double bound);

 private:
  std::mt19937 generator_{3};
};

template <typename Real>
void TileKernelsTest::expect_backward(int64_t head_dim, bool masked, double bound) {
  const TileKernels<Real>& kernels = kernels_of<Real>(GetParam());
  const int64_t width = kernels.panel_rows, keys = 13, rows = width - 1;
  const int64_t padded = align_up(head_dim, kernels.lanes);
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  const auto index = [](int64_t i) { return static_cast<size_t>(i); };
  const auto k = random<Real>(keys * head_dim), v = random<Real>(keys * head_dim);
  std::vector<Real> q_t(index(head_dim * width)), do_t = q_t, dq = random<Real>(head_dim * width);
  std::vector<Real> q(index(width * padded)), d_o = q;
  const auto q_rows = random<Real>(rows * head_dim), do_rows = random<Real>(rows * head_dim);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t d = 0; d < head_dim; ++d) {
      q_t[index(d * width + r)] = q[index(r * padded + d)] = q_rows[index(r * head_dim + d)];
      do_t[index(d * width + r)] = d_o[index(r * padded + d)] = do_rows[index(r * head_dim + d)];
    }
  }
  std::vector<Real> lse(index(width), std::numeric_limits<Real>::infinity());
  std::vector<Real> delta(index(width), 0), first(index(width), 0), last(index(width), 0);
  for (int64_t r = 0; r < rows; ++r) {
    lse[index(r)] = static_cast<Real>(2 + r % 3);
    delta[index(r)] = static_cast<Real>(r % 5) / 4;
    first[index(r)] = static_cast<Real>(r % 4);
    last[index(r)] = static_cast<Real>(keys - r % 6);
  }
  std::vector<Real> p(index(keys * width)), ds = p;
  std::vector<Real> dk(index(keys * padded), 1), dv(index(keys * padded), 2), dq_before = dq;
  BackwardTile<Real> tile;
  tile.tile = {keys, k.data(), v.data(), head_dim, head_dim};
  tile.mask = {masked, first.data(), last.data()};
  tile.head_dim = head_dim;
  tile.padded_dim = padded;
  tile.vectors = width / kernels.lanes;
  tile.rows = rows;
  tile.of_product.scale_log2 = static_cast<Real>(scale);
  tile.q_t = q_t.data();
  tile.do_t = do_t.data();
  tile.q = q.data();
  tile.d_o = d_o.data();
  tile.lse_log2 = lse.data();
  tile.delta = delta.data();
  tile.p = p.data();
  tile.ds = ds.data();
  tile.dk = dk.data();
  tile.dv = dv.data();
  tile.dq = dq.data();
  kernels.backward(tile);

  std::vector<double> dk_want(index(keys * head_dim), 1), dv_want(index(keys * head_dim), 2);
  std::vector<double> dq_want(dq_before.begin(), dq_before.end());
  for (int64_t key = 0; key < keys; ++key) {
    for (int64_t r = 0; r < rows; ++r) {
      if (masked && (key < r % 4 || key >= keys - r % 6)) continue;
      double score = 0, d_weight = 0;
      for (int64_t d = 0; d < head_dim; ++d) {
        score += double{k[index(key * head_dim + d)]} * double{q_rows[index(r * head_dim + d)]};
        d_weight += double{v[index(key * head_dim + d)]} * double{do_rows[index(r * head_dim + d)]};
      }
      const double weight = std::exp2(score * scale - double{lse[index(r)]});
      const double d_score = weight * (d_weight - double{delta[index(r)]});
      for (int64_t d = 0; d < head_dim; ++d) {
        dv_want[index(key * head_dim + d)] += weight * double{do_rows[index(r * head_dim + d)]};
        dk_want[index(key * head_dim + d)] += d_score * double{q_rows[index(r * head_dim + d)]};
        dq_want[index(d * width + r)] += d_score * double{k[index(key * head_dim + d)]};
      }
    }
  }
  // What the padding of the rows and lanes without a row hold is not looked at.
  std::vector<Real> dk_got, dv_got;
  for (int64_t key = 0; key < keys; ++key) {
    for (int64_t d = 0; d < head_dim; ++d) {
      dk_got.push_back(dk[index(key * padded + d)]);
      dv_got.push_back(dv[index(key * padded + d)]);
    }
  }
  EXPECT_LE(testing::relative_error(dk_got, dk_want), bound);
  EXPECT_LE(testing::relative_error(dv_got, dv_want), bound);
  EXPECT_LE(testing::relative_error(dq, dq_want), bound);
}

TEST_P(TileKernelsTest, Exp2IsAccurateToTheLastBits) {
  expect_exp2_accurate<float>(-125, 1.2e-7);
  expect_exp2_accurate<double>(-1021, 4.5e-16);
}

TEST_P(TileKernelsTest, SoftCapIsAccurateToTheLastBits) {
  expect_cap_accurate<float>(5e-7);
  expect_cap_accurate<double>(1e-15);
}

TEST_P(TileKernelsTest, ProductOfEveryBlockShape) {
  expect_product<float>(1e-6);
  expect_product<double>(1e-14);
}

TEST_P(TileKernelsTest, BackwardOfOneTile) {
  for (const int64_t head_dim : {1, 16, 21, 64, 80, 112, 128}) {
    for (const bool masked : {false, true}) {
      SCOPED_TRACE(head_dim);
      expect_backward<float>(head_dim, masked, 2e-6);
      expect_backward<double>(head_dim, masked, 4e-15);
    }
  }
}

TEST_P(TileKernelsTest, IsFoundByName) {
  EXPECT_STREQ(instruction_set_named(GetParam().name).name, GetParam().name);
}

TEST(InstructionSetTest, BestWithoutANameAndNoneOfAnUnknownOne) {
  EXPECT_STREQ(instruction_set_named(nullptr).name, usable_instruction_sets().front().name);
  EXPECT_STREQ(instruction_set_named("").name, usable_instruction_sets().front().name);
  EXPECT_STREQ(usable_instruction_sets().back().name, "generic");
  EXPECT_THROW(instruction_set_named("mmx"), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Sets, TileKernelsTest, ::testing::ValuesIn(usable_instruction_sets()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace oomb::attention::cpu
