#pragma once

// Attention and its gradients from the definition, in double: one query row at a time, over the
// list of keys it sees. Shares nothing with the kernels but the inputs.

#include <cmath>
#include <limits>
#include <vector>

#include "attention/paged_problem.h"

namespace oomb::testing {

template <typename Storage, typename Gradient>
bool sees(const Problem<Storage, Gradient>& problem, int64_t b, int64_t kv_head, int64_t row,
          int64_t key) {
  const Case& c = problem.c;
  if (key > c.past + row) return false;
  if (c.window > 0 && key <= c.past + row - c.window) return false;
  if (!c.documents.empty() && key < problem.first_key[static_cast<size_t>(b * c.chunk + row)]) {
    return false;
  }
  if (!c.num_keys.empty() && key >= c.num_keys[static_cast<size_t>(b)]) return false;
  if (c.listed.empty() || key >= c.past) return true;
  const size_t skip = c.list_per_head && kv_head == c.kv_heads - 1 ? 1 : 0;
  for (size_t i = skip; i < c.listed.size(); ++i) {
    if (c.listed[i] == key / c.page) return true;
  }
  return false;
}

template <typename Storage, typename Gradient>
Results<double> reference(const Problem<Storage, Gradient>& problem) {
  const Case& c = problem.c;
  Results<double> r;
  r.o.assign(problem.q.size(), 0.0);
  r.dq = r.o;
  r.dk.assign(problem.k.size(), 0.0);
  r.dv = r.dk;
  const auto value = [](const std::vector<Storage>& tensor, int64_t i) {
    return static_cast<double>(widen(tensor[static_cast<size_t>(i)]));
  };
  const auto dot = [&](const std::vector<Storage>& a, int64_t i, const std::vector<Storage>& b,
                       int64_t j) {
    double sum = 0;
    for (int64_t d = 0; d < c.head_dim; ++d) sum += value(a, i + d) * value(b, j + d);
    return sum;
  };
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.query_heads; ++h) {
      const int64_t kv_head = h / (c.query_heads / c.kv_heads);
      for (int64_t row = 0; row < c.chunk; ++row) {
        const int64_t query = problem.at(c.query_heads, c.chunk, b, h, row);
        std::vector<int64_t> keys;
        std::vector<double> weights, slopes;  // slopes: of the soft cap
        double max = -std::numeric_limits<double>::infinity();
        for (int64_t key = 0; key < c.tokens(); ++key) {
          if (!sees(problem, b, kv_head, row, key)) continue;
          keys.push_back(problem.at(c.kv_heads, c.tokens(), b, kv_head, key));
          const double score = dot(problem.q, query, problem.k, keys.back()) * problem.scale;
          weights.push_back(c.cap > 0 ? c.cap * std::tanh(score / c.cap) : score);
          slopes.push_back(c.cap > 0 ? 1 - std::pow(weights.back() / c.cap, 2) : 1.0);
          max = std::max(max, weights.back());
        }
        if (keys.empty()) {
          r.lse.push_back(-std::numeric_limits<double>::infinity());
          continue;
        }
        double sum = 0;
        for (double& weight : weights) sum += weight = std::exp(weight - max);
        r.lse.push_back(max + std::log(sum));
        double mean = 0;  // of the weights' gradients
        std::vector<double> d_weights;
        for (size_t i = 0; i < keys.size(); ++i) {
          weights[i] /= sum;
          d_weights.push_back(dot(problem.d_o, query, problem.v, keys[i]));
          mean += weights[i] * d_weights[i];
        }
        const auto statistic = static_cast<size_t>((b * c.query_heads + h) * c.chunk + row);
        const double d_lse = static_cast<double>(problem.d_lse[statistic]);
        for (size_t i = 0; i < keys.size(); ++i) {
          const double d_score =
              weights[i] * (d_weights[i] - mean + d_lse) * slopes[i] * problem.scale;
          const int64_t page = (keys[i] / c.head_dim) % c.tokens() / c.page;
          const bool wanted =
              (keys[i] / c.head_dim) % c.tokens() >= c.past || problem.has_gradient(page);
          for (int64_t d = 0; d < c.head_dim; ++d) {
            const auto q_at = static_cast<size_t>(query + d);
            const auto k_at = static_cast<size_t>(keys[i] + d);
            r.o[q_at] += weights[i] * value(problem.v, keys[i] + d);
            r.dq[q_at] += d_score * value(problem.k, keys[i] + d);
            if (wanted) r.dk[k_at] += d_score * value(problem.q, query + d);
            if (wanted) r.dv[k_at] += weights[i] * value(problem.d_o, query + d);
          }
        }
      }
    }
  }
  return r;
}

// ||a - b|| / ||b||; what is infinite or NaN must be the same in both.
template <typename Real>
double relative_error(const std::vector<Real>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double value = static_cast<double>(a[i]);
    if (!std::isfinite(value) || !std::isfinite(b[i])) {
      if (value != b[i]) return std::numeric_limits<double>::infinity();
      continue;
    }
    difference += (value - b[i]) * (value - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(norm > 0 ? difference / norm : difference);
}

}  // namespace oomb::testing
