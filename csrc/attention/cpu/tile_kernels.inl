// Included by exactly one unit per instruction set, which is compiled with that set's flags. All of
// it has internal linkage and no function of the standard library is used: otherwise the linker
// could keep the copy of a better instruction set for everybody.
//
// The arithmetic is written with the compiler's vector types: a sum over keys, rows or the head
// dimension runs in index order in every lane, so the result does not depend on the vector width.

#include <cstdint>

#include "attention/cpu/storage.h"
#include "attention/cpu/tile_kernels.h"

namespace oomb::attention::cpu {
namespace {

constexpr int kPanelVectors = 3;

template <typename Real, int kBytes>
struct Simd {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(Real));
  static constexpr int kPanelRows = kPanelVectors * kLanes;
  using Bits = std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>;
  typedef Real Vec __attribute__((vector_size(kBytes)));
  typedef Real Loose __attribute__((vector_size(kBytes), aligned(alignof(Real)), may_alias));
  typedef Bits BitVec __attribute__((vector_size(kBytes)));

  [[gnu::always_inline]] static Vec load(const Real* source) {
    return *reinterpret_cast<const Loose*>(source);
  }
  [[gnu::always_inline]] static void store(Real* target, Vec value) {
    *reinterpret_cast<Loose*>(target) = value;
  }
  [[gnu::always_inline]] static Vec fill(Real value) { return value - Vec{}; }
  [[gnu::always_inline]] static Vec larger(Vec a, Vec b) { return a > b ? a : b; }
};

// 2^x. Below 2^-125 the result is zero, -inf included; x must stay below 127. NaN stays.
template <typename Real>
struct Exp2Series {
  static constexpr int kDegree = sizeof(Real) == 8 ? 13 : 7;
  Real coefficients[kDegree + 1];
  constexpr Exp2Series() : coefficients() {
    const double ln2 = 0.693147180559945309417;
    double term = 1;
    for (int i = 0; i <= kDegree; ++i) {
      coefficients[i] = static_cast<Real>(term);
      term = term * ln2 / (i + 1);
    }
  }
};
template <typename Real>
constexpr Exp2Series<Real> kExp2Series;

template <typename S, typename Real>
[[gnu::always_inline]] inline typename S::Vec exp2(typename S::Vec x, Real) {
  using Vec = typename S::Vec;
  using BitVec = typename S::BitVec;
  constexpr int kFractionBits = sizeof(Real) == 8 ? 52 : 23;
  constexpr Real kLowest = sizeof(Real) == 8 ? -1021 : -125;
  // Adding it moves the integer part of x into the lowest bits of the sum.
  constexpr Real kShift = static_cast<Real>(int64_t{3} << (kFractionBits - 1));
  const Vec clamped = S::larger(x, S::fill(kLowest));
  const Vec shifted = clamped + kShift;
  const Vec fraction = clamped - (shifted - kShift);  // in [-1/2, 1/2]
  Vec series = S::fill(kExp2Series<Real>.coefficients[Exp2Series<Real>::kDegree]);
#pragma GCC unroll 16
  for (int i = Exp2Series<Real>::kDegree - 1; i >= 0; --i) {
    series = series * fraction + kExp2Series<Real>.coefficients[i];
  }
  const BitVec exponent = reinterpret_cast<BitVec>(shifted) << kFractionBits;
  const Vec result = reinterpret_cast<Vec>(reinterpret_cast<BitVec>(series) + exponent);
  return x >= kLowest ? result : (x < kLowest ? Vec{} : x);
}

// tanh x by 2^y - 1 at y = -2 |x| log2(e), which the series gives to the last digits near 0 too.
template <typename S, typename Real>
[[gnu::always_inline]] inline typename S::Vec tanh(typename S::Vec x, Real) {
  using Vec = typename S::Vec;
  using BitVec = typename S::BitVec;
  constexpr int kFractionBits = sizeof(Real) == 8 ? 52 : 23;
  constexpr Real kLowest = -120;  // there tanh is 1
  constexpr Real kShift = static_cast<Real>(int64_t{3} << (kFractionBits - 1));
  constexpr Real kTwoLog2e = static_cast<Real>(2 * 1.44269504088896340736);
  const Vec y = (x < Real{0} ? x : -x) * kTwoLog2e;
  const Vec clamped = S::larger(S::fill(kLowest), y);  // in this order NaN stays
  const Vec shifted = clamped + kShift;
  const Vec fraction = clamped - (shifted - kShift);  // in [-1/2, 1/2]
  Vec series = S::fill(kExp2Series<Real>.coefficients[Exp2Series<Real>::kDegree]);
#pragma GCC unroll 16
  for (int i = Exp2Series<Real>::kDegree - 1; i >= 1; --i) {
    series = series * fraction + kExp2Series<Real>.coefficients[i];
  }
  const BitVec exponent = reinterpret_cast<BitVec>(shifted) << kFractionBits;
  const Vec power = reinterpret_cast<Vec>(reinterpret_cast<BitVec>(S::fill(Real{1})) + exponent);
  const Vec below = (power - Real{1}) + power * (series * fraction);  // 2^y - 1, in (-1, 0]
  const Vec result = -below / (below + Real{2});
  return x < Real{0} ? -result : result;
}

// sum over k of a(i, k) * b[k][n] for kRows rows i and kVectors vectors of columns n. a(i, k) is
// a[i * a_stride + k], or a[k * a_stride + i] where a is read transposed.
template <typename Real, int kBytes, int kRows, int kVectors, bool kTransposed>
struct Block {
  using S = Simd<Real, kBytes>;
  typename S::Vec sums[kRows][kVectors];

  [[gnu::always_inline]] void multiply(int64_t depth, const Real* a, int64_t a_stride,
                                       const Real* b, int64_t b_stride) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) sums[i][j] = typename S::Vec{};
    }
    for (int64_t k = 0; k < depth; ++k) {
      typename S::Vec columns[kVectors];
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) columns[j] = S::load(b + k * b_stride + j * S::kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const Real scalar = kTransposed ? a[k * a_stride + i] : a[i * a_stride + k];
#pragma GCC unroll 16
        for (int j = 0; j < kVectors; ++j) sums[i][j] += scalar * columns[j];
      }
    }
  }
};

// Walks the rows of a product in blocks of kRows, then halves for the rest. finish(i, j, vector)
// takes row i and vector j of the result.
template <typename Real, int kBytes, int kRows, int kVectors, bool kTransposed, typename Finish>
[[gnu::always_inline]] inline void product_rows(int64_t rows, int64_t depth, const Real* a,
                                                int64_t a_stride, const Real* b, int64_t b_stride,
                                                int64_t row, Finish&& finish) {
  for (; row + kRows <= rows; row += kRows) {
    Block<Real, kBytes, kRows, kVectors, kTransposed> block;
    block.multiply(depth, a + (kTransposed ? row : row * a_stride), a_stride, b, b_stride);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) finish(row + i, j, block.sums[i][j]);
    }
  }
  if constexpr (kRows > 1) {
    product_rows<Real, kBytes, kRows / 2, kVectors, kTransposed>(rows, depth, a, a_stride, b,
                                                                 b_stride, row, finish);
  }
}

// The kernels for one vector width. kRows rows x kPanelVectors vectors of sums fill the registers.
template <typename Real, int kBytes, int kRows>
struct Kernels {
  using S = Simd<Real, kBytes>;
  using Vec = typename S::Vec;
  static constexpr int kLanes = S::kLanes;
  static constexpr int64_t kPanelRows = S::kPanelRows;
  static constexpr Real kInfinity = static_cast<Real>(__builtin_inf());

  // Replaces the vector by value where row (vector j of the panel) does not see the key.
  [[gnu::always_inline]] static Vec hide(const RowMask<Real>& mask, int64_t key, int j, Vec vector,
                                         Real value) {
    const Vec position = S::fill(static_cast<Real>(key));
    const Vec first = S::load(mask.first + j * kLanes);
    const Vec last = S::load(mask.last + j * kLanes);
    vector = position < first ? S::fill(value) : vector;
    return position < last ? vector : S::fill(value);
  }

  template <int kVectors>
  static void forward_vectors(const ForwardTile<Real>& t) {
    const int64_t keys = t.tile.keys;
    const Real scale_log2 = t.of_product.scale_log2;
    Vec max[kVectors];
    for (int j = 0; j < kVectors; ++j) max[j] = S::load(t.max + j * kLanes);
    if (t.of_product.cap_log2 > 0) {
      multiply_vectors<kVectors>(keys, t.head_dim, t.tile.k, t.tile.k_stride, t.q, t.scores);
      for (int64_t key = 0; key < keys; ++key) {
#pragma GCC unroll 16
        for (int j = 0; j < kVectors; ++j) {
          Real* at = t.scores + key * kPanelRows + j * kLanes;
          Vec score = t.of_product.cap_log2 * tanh<S>(S::load(at) * t.of_product.per_cap, Real{});
          if (t.mask.masked) score = hide(t.mask, key, j, score, -kInfinity);
          S::store(at, score);
          max[j] = S::larger(score, max[j]);
        }
      }
    } else if (t.mask.masked) {
      product_rows<Real, kBytes, kRows, kVectors, false>(
          keys, t.head_dim, t.tile.k, t.tile.k_stride, t.q, kPanelRows, 0,
          [&](int64_t key, int j, Vec sum) __attribute__((always_inline)) {
            const Vec score = hide(t.mask, key, j, sum * scale_log2, -kInfinity);
            S::store(t.scores + key * kPanelRows + j * kLanes, score);
            max[j] = S::larger(score, max[j]);
          });
    } else {
      product_rows<Real, kBytes, kRows, kVectors, false>(
          keys, t.head_dim, t.tile.k, t.tile.k_stride, t.q, kPanelRows, 0,
          [&](int64_t key, int j, Vec sum) __attribute__((always_inline)) {
            const Vec score = sum * scale_log2;
            S::store(t.scores + key * kPanelRows + j * kLanes, score);
            max[j] = S::larger(score, max[j]);
          });
    }
    Vec rescale[kVectors], sum[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      rescale[j] = exp2<S>(S::load(t.max + j * kLanes) - max[j], Real{});
      sum[j] = Vec{};
      S::store(t.max + j * kLanes, max[j]);
    }
    for (int64_t key = 0; key < keys; ++key) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        Real* score = t.scores + key * kPanelRows + j * kLanes;
        const Vec weight = exp2<S>(S::load(score) - max[j], Real{});
        sum[j] += weight;
        S::store(score, weight);
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      S::store(t.sum + j * kLanes, S::load(t.sum + j * kLanes) * rescale[j] + sum[j]);
    }
    product_rows<Real, kBytes, kRows, kVectors, true>(
        t.head_dim, keys, t.tile.v, t.tile.v_stride, t.scores, kPanelRows, 0,
        [&](int64_t d, int j, Vec value) __attribute__((always_inline)) {
          Real* target = t.acc + d * kPanelRows + j * kLanes;
          S::store(target, S::load(target) * rescale[j] + value);
        });
  }

  // target[i][n] += sum over the panel's rows r of weights[i][r] * rows[r][n]
  template <int kVectors>
  [[gnu::always_inline]] static void add_columns(const BackwardTile<Real>& t, const Real* weights,
                                                 const Real* rows, Real* target) {
    product_rows<Real, kBytes, kRows, kVectors, false>(
        t.tile.keys, t.rows, weights, kPanelRows, rows, t.padded_dim, 0,
        [&](int64_t key, int j, Vec value) __attribute__((always_inline)) {
          Real* cell = target + key * t.padded_dim + j * kLanes;
          S::store(cell, S::load(cell) + value);
        });
  }

  static void add_to_keys(const BackwardTile<Real>& t, const Real* weights, const Real* rows,
                          Real* target) {
    int64_t vectors = t.padded_dim / kLanes;
    while (vectors > 0) {
      // Two rather than three where three would leave one: a block of one vector waits for loads.
      const int64_t step = vectors == 4 ? 2 : (vectors > 3 ? 3 : vectors);
      if (step == 3) add_columns<3>(t, weights, rows, target);
      if (step == 2) add_columns<2>(t, weights, rows, target);
      if (step == 1) add_columns<1>(t, weights, rows, target);
      rows += step * kLanes;
      target += step * kLanes;
      vectors -= step;
    }
  }

  template <int kVectors>
  static void backward_vectors(const BackwardTile<Real>& t) {
    const int64_t keys = t.tile.keys;
    const Scores<Real> of_product = t.of_product;
    product_rows<Real, kBytes, kRows, kVectors, false>(
        keys, t.head_dim, t.tile.k, t.tile.k_stride, t.q_t, kPanelRows, 0,
        [&](int64_t key, int j, Vec sum)
            __attribute__((always_inline)) { S::store(t.p + key * kPanelRows + j * kLanes, sum); });
    product_rows<Real, kBytes, kRows, kVectors, false>(
        keys, t.head_dim, t.tile.v, t.tile.v_stride, t.do_t, kPanelRows, 0,
        [&](int64_t key, int j, Vec sum) __attribute__((always_inline)) {
          S::store(t.ds + key * kPanelRows + j * kLanes, sum);
        });
    Vec lse[kVectors], delta[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      lse[j] = S::load(t.lse_log2 + j * kLanes);
      delta[j] = S::load(t.delta + j * kLanes);
    }
    for (int64_t key = 0; key < keys; ++key) {
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        Real* p = t.p + key * kPanelRows + j * kLanes;
        Real* ds = t.ds + key * kPanelRows + j * kLanes;
        Vec score = S::load(p) * of_product.scale_log2, slope = S::fill(Real{1});
        if (of_product.cap_log2 > 0) {
          const Vec part = tanh<S>(S::load(p) * of_product.per_cap, Real{});
          score = of_product.cap_log2 * part;
          slope = Real{1} - part * part;
        }
        Vec weight = exp2<S>(score - lse[j], Real{});
        if (t.mask.masked) weight = hide(t.mask, key, j, weight, 0);
        S::store(p, weight);
        S::store(ds, weight * (S::load(ds) - delta[j]) * slope);
      }
    }
    if (t.dq != nullptr) {
      product_rows<Real, kBytes, kRows, kVectors, true>(
          t.head_dim, keys, t.tile.k, t.tile.k_stride, t.ds, kPanelRows, 0,
          [&](int64_t d, int j, Vec value) __attribute__((always_inline)) {
            Real* cell = t.dq + d * kPanelRows + j * kLanes;
            S::store(cell, S::load(cell) + value);
          });
    }
    if (t.dk != nullptr) {
      add_to_keys(t, t.p, t.d_o, t.dv);
      add_to_keys(t, t.ds, t.q, t.dk);
    }
  }

  static void forward(const ForwardTile<Real>& t) {
    if (t.vectors == 3) forward_vectors<3>(t);
    if (t.vectors == 2) forward_vectors<2>(t);
    if (t.vectors == 1) forward_vectors<1>(t);
  }

  static void backward(const BackwardTile<Real>& t) {
    if (t.vectors == 3) backward_vectors<3>(t);
    if (t.vectors == 2) backward_vectors<2>(t);
    if (t.vectors == 1) backward_vectors<1>(t);
  }

  template <int kVectors>
  static void multiply_vectors(int64_t rows, int64_t depth, const Real* a, int64_t a_stride,
                               const Real* b, Real* c) {
    product_rows<Real, kBytes, kRows, kVectors, false>(
        rows, depth, a, a_stride, b, kPanelRows, 0,
        [&](int64_t row, int j, Vec sum)
            __attribute__((always_inline)) { S::store(c + row * kPanelRows + j * kLanes, sum); });
  }

  static void multiply(int64_t rows, int64_t depth, const Real* a, int64_t a_stride, const Real* b,
                       int64_t vectors, Real* c) {
    if (vectors == 3) multiply_vectors<3>(rows, depth, a, a_stride, b, c);
    if (vectors == 2) multiply_vectors<2>(rows, depth, a, a_stride, b, c);
    if (vectors == 1) multiply_vectors<1>(rows, depth, a, a_stride, b, c);
  }

  template <typename Storage>
  static void widen_rows(const void* source, int64_t source_stride, int64_t rows, int64_t columns,
                         Real* target) {
    for (int64_t row = 0; row < rows; ++row) {
      const Storage* from = static_cast<const Storage*>(source) + row * source_stride;
      Real* to = target + row * columns;
      for (int64_t column = 0; column < columns; ++column) to[column] = cpu::widen(from[column]);
    }
  }

  static void widen(DType dtype, const void* source, int64_t source_stride, int64_t rows,
                    int64_t columns, Real* target) {
    if constexpr (sizeof(Real) == 8) {
      widen_rows<double>(source, source_stride, rows, columns, target);
    } else if (dtype == DType::kBFloat16) {
      widen_rows<BFloat16>(source, source_stride, rows, columns, target);
    } else if (dtype == DType::kFloat16) {
      widen_rows<Half>(source, source_stride, rows, columns, target);
    } else {
      widen_rows<float>(source, source_stride, rows, columns, target);
    }
  }

  static TileKernels<Real> table() {
    return {kLanes, kPanelRows, &forward, &backward, &multiply, &widen};
  }
};

template <int kBytes, int kRows>
InstructionSet make_instruction_set(const char* name) {
  return {name, Kernels<float, kBytes, kRows>::table(), Kernels<double, kBytes, kRows>::table()};
}

}  // namespace
}  // namespace oomb::attention::cpu
