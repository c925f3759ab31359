#pragma once

// One chunk over a paged past: random inputs, a pool whose other slots hold NaN, a run through the
// CPU kernels in one or several waves.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "attention/cpu/cpu.h"
#include "attention/cpu/storage.h"
#include "attention/params.h"
#include "common/math.h"

namespace oomb::testing {

using attention::cpu::BFloat16;
using attention::cpu::Half;
using attention::cpu::narrow;
using attention::cpu::RealOf;
using attention::cpu::widen;

struct Case {
  const char* name = "";
  int64_t batch = 1, query_heads = 4, kv_heads = 2, chunk = 40, head_dim = 16, page = 16;
  int64_t past = 48;
  int64_t window = 0;
  std::vector<int32_t> documents = {};  // first token of every document, in all sequences
  std::vector<int32_t> num_keys = {};   // per sequence
  std::vector<int32_t> listed = {};     // pages every query block attends to; empty: all
  bool list_per_head = false;           // the last kv head's lists lack their first page
  std::vector<int32_t> no_gradient = {};
  double cap = 0;  // of scaled scores, which lie within about 4

  int64_t pages() const { return ceil_div(past, page); }
  int64_t blocks() const { return ceil_div(chunk, page); }
  int64_t tokens() const { return past + chunk; }
};

inline std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name; }

template <typename Storage>
constexpr DType dtype_of() {
  if (std::is_same_v<Storage, double>) return DType::kFloat64;
  if (std::is_same_v<Storage, float>) return DType::kFloat32;
  return std::is_same_v<Storage, Half> ? DType::kFloat16 : DType::kBFloat16;
}

// Everything that comes out of a forward and a backward, gradients of past keys included.
template <typename Real>
struct Results {
  std::vector<Real> o, lse, dq;  // [B, Hq, C, D], [B, Hq, C]
  std::vector<Real> dk, dv;      // [B, Hkv, N + C, D]
  bool operator==(const Results&) const = default;
};

// Gradient pages as Gradient; dK and dV of a page lie in two units of their own.
template <typename Storage, typename Gradient>
class Problem {
 public:
  using Real = RealOf<Storage>;
  static constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

  explicit Problem(const Case& c, unsigned slot_seed = 0) : c(c) {
    std::mt19937 generator(1);
    std::normal_distribution<double> normal;
    const auto fill = [&](std::vector<Storage>& values, int64_t size) {
      values.resize(static_cast<size_t>(size));
      for (Storage& value : values) value = narrow<Storage>(static_cast<Real>(normal(generator)));
    };
    fill(q, c.batch * c.query_heads * c.chunk * c.head_dim);
    fill(d_o, c.batch * c.query_heads * c.chunk * c.head_dim);
    fill(k, c.batch * c.kv_heads * c.tokens() * c.head_dim);
    fill(v, c.batch * c.kv_heads * c.tokens() * c.head_dim);
    for (int64_t i = 0; i < c.batch * c.query_heads * c.chunk; ++i) {
      d_lse.push_back(static_cast<Real>(normal(generator)));
    }
    scale = 1.3 / std::sqrt(static_cast<double>(c.head_dim));
    make_first_keys();
    make_selection();
    poison_padding();
    fill_pool(slot_seed);
  }

  // Index of a row in [B, heads, tokens, D].
  int64_t at(int64_t heads, int64_t tokens, int64_t b, int64_t h, int64_t token) const {
    return ((b * heads + h) * tokens + token) * c.head_dim;
  }

  bool has_gradient(int64_t page) const {
    return std::find(c.no_gradient.begin(), c.no_gradient.end(), page) == c.no_gradient.end();
  }

  attention::ForwardParams forward_params() const {
    attention::ForwardParams p;
    p.shape = shape();
    p.visibility = visibility();
    p.past = past();
    p.dtype = dtype_of<Storage>();
    p.scale = scale;
    p.cap = c.cap;
    p.q = q.data();
    p.k = k.data() + c.past * c.head_dim;
    p.v = v.data() + c.past * c.head_dim;
    p.q_strides = p.o_strides = query_strides();
    p.k_strides = p.v_strides = key_strides();
    return p;
  }

  // Waves end at the given pages; the last one at the end of the past.
  void forward(const std::vector<int64_t>& borders = {}) {
    attention::ForwardParams p = forward_params();
    std::vector<Storage> output(q.size(), narrow<Storage>(static_cast<Real>(kNaN)));
    lse.assign(d_lse.size(), static_cast<Real>(kNaN));
    std::vector<Real> acc(q.size(), static_cast<Real>(kNaN)), max = lse, sum = lse;
    p.state = {acc.data(), max.data(), sum.data()};
    p.o = output.data();
    p.lse = lse.data();
    for_each_wave(borders, p, [&] { attention::cpu::forward(p); });
    o = std::move(output);
  }

  void backward(const std::vector<int64_t>& borders = {}) {
    attention::BackwardParams p;
    const attention::ForwardParams f = forward_params();
    p.shape = f.shape;
    p.visibility = f.visibility;
    p.past = f.past;
    p.dtype = f.dtype;
    p.scale = f.scale;
    p.cap = f.cap;
    p.q = f.q;
    p.k = f.k;
    p.v = f.v;
    p.q_strides = p.o_strides = p.do_strides = p.dq_strides = f.q_strides;
    p.k_strides = p.v_strides = f.k_strides;
    p.o = o.data();
    p.d_o = d_o.data();
    p.lse = lse.data();
    p.d_lse = d_lse.data();
    dkv_pool.assign(dkv_pool.size(), narrow<Gradient>(static_cast<RealOf<Gradient>>(kNaN)));
    for (const int32_t unit : dkv_table) {
      if (unit >= 0) std::fill_n(dkv_pool.begin() + unit * unit_size(), unit_size(), Gradient{});
    }
    p.grads.dkv_pool = dkv_pool.data();
    p.grads.dkv_unit_bytes = unit_size() * static_cast<int64_t>(sizeof(Gradient));
    p.grads.dkv_table = dkv_table.data();
    p.grads.dtype = dtype_of<Gradient>();
    p.grads.rounding_seed = 11;
    const Storage poison = narrow<Storage>(static_cast<Real>(kNaN));
    dq.assign(q.size(), poison);
    own_dk.assign(static_cast<size_t>(c.batch * c.kv_heads * c.chunk * c.head_dim), poison);
    own_dv = own_dk;
    std::vector<Real> dq_acc(q.size(), static_cast<Real>(kNaN));
    std::vector<Real> delta(lse.size(), static_cast<Real>(kNaN));
    p.dq = dq.data();
    p.dk = own_dk.data();
    p.dv = own_dv.data();
    p.dk_strides =
        p.dv_strides = {c.kv_heads * c.chunk * c.head_dim, c.chunk * c.head_dim, c.head_dim};
    p.dq_acc = dq_acc.data();
    p.delta = delta.data();
    for_each_wave(borders, p, [&] { attention::cpu::backward(p); });
  }

  Results<Real> results() const {
    Results<Real> r;
    for (const Storage value : o) r.o.push_back(widen(value));
    for (const Storage value : dq) r.dq.push_back(widen(value));
    r.lse = lse;
    r.dk = all_gradients(0, own_dk);
    r.dv = all_gradients(1, own_dv);
    return r;
  }

  Results<Real> run(const std::vector<int64_t>& borders = {}) {
    forward(borders);
    backward(borders);
    return results();
  }

  const Case c;
  double scale = 1;
  std::vector<Storage> q, k, v, d_o;
  std::vector<Real> d_lse;
  std::vector<int32_t> first_key;    // [B, C] or empty
  std::vector<int32_t> selection;    // [B, Q, heads, budget] or empty
  std::vector<int32_t> block_table;  // [B, pages]
  std::vector<int32_t> dkv_table;    // [B, pages, 2]
  std::vector<Storage> pool;
  std::vector<Gradient> dkv_pool;
  std::vector<Storage> o, dq, own_dk, own_dv;
  std::vector<Real> lse;

 private:
  int64_t unit_size() const { return c.kv_heads * c.page * c.head_dim; }
  int64_t slots() const { return c.batch * c.pages() + 2; }

  attention::Shape shape() const {
    return {c.batch, c.query_heads, c.kv_heads, c.chunk, c.head_dim, c.page};
  }
  attention::Visibility visibility() const {
    return {c.window, first_key.empty() ? nullptr : first_key.data(),
            c.num_keys.empty() ? nullptr : c.num_keys.data()};
  }
  attention::Strides query_strides() const {
    return {c.query_heads * c.chunk * c.head_dim, c.chunk * c.head_dim, c.head_dim};
  }
  attention::Strides key_strides() const {
    return {c.kv_heads * c.tokens() * c.head_dim, c.tokens() * c.head_dim, c.head_dim};
  }

  attention::PastPages past() const {
    attention::PastPages past;
    past.kv_pool = pool.data();
    past.kv_slot_bytes = 2 * unit_size() * static_cast<int64_t>(sizeof(Storage));
    past.kv_num_slots = slots();
    past.block_table = block_table.data();
    past.table_stride = c.pages();
    past.num_tokens = c.past;
    past.page_end = c.pages();
    if (!selection.empty()) {
      past.selection = selection.data();
      past.selection_heads = c.list_per_head ? c.kv_heads : 1;
      past.budget = static_cast<int64_t>(c.listed.size()) + 1;
    }
    return past;
  }

  template <typename Params, typename Launch>
  void for_each_wave(const std::vector<int64_t>& borders, Params& p, const Launch& launch) const {
    for (size_t i = 0; i <= borders.size(); ++i) {
      p.first_wave = p.own_chunk = i == 0;
      p.last_wave = i == borders.size();
      p.past.page_begin = i == 0 ? 0 : borders[i - 1];
      p.past.page_end = i == borders.size() ? c.pages() : borders[i];
      launch();
    }
  }

  void make_first_keys() {
    if (c.documents.empty()) return;
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t row = 0; row < c.chunk; ++row) {
        int32_t start = 0;
        for (const int32_t document : c.documents) {
          if (document <= c.past + row) start = std::max(start, document);
        }
        first_key.push_back(start);
      }
    }
  }

  void make_selection() {
    if (c.listed.empty()) return;
    const int64_t heads = c.list_per_head ? c.kv_heads : 1;
    for (int64_t row = 0; row < c.batch * c.blocks() * heads; ++row) {
      const int skip = c.list_per_head && row % heads == heads - 1 ? 1 : 0;
      selection.insert(selection.end(), c.listed.begin() + skip, c.listed.end());
      selection.insert(selection.end(), static_cast<size_t>(1 + skip), -1);
    }
  }

  void poison_padding() {
    const Storage poison = narrow<Storage>(static_cast<Real>(kNaN));
    for (int64_t b = 0; b < static_cast<int64_t>(c.num_keys.size()); ++b) {
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        const int64_t begin = at(c.kv_heads, c.tokens(), b, h, c.num_keys[static_cast<size_t>(b)]);
        const int64_t end = at(c.kv_heads, c.tokens(), b, h + 1, 0);
        std::fill(k.begin() + begin, k.begin() + end, poison);
        std::fill(v.begin() + begin, v.begin() + end, poison);
      }
    }
  }

  void fill_pool(unsigned slot_seed) {
    std::mt19937 generator(slot_seed);
    std::vector<int32_t> order(static_cast<size_t>(slots()));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), generator);
    block_table.assign(order.begin(), order.begin() + c.batch * c.pages());
    std::vector<int32_t> units(static_cast<size_t>(2 * slots()));
    std::iota(units.begin(), units.end(), 0);
    std::shuffle(units.begin(), units.end(), generator);
    dkv_table.assign(units.begin(), units.begin() + 2 * c.batch * c.pages());
    dkv_pool.resize(static_cast<size_t>(2 * slots() * unit_size()));
    pool.assign(static_cast<size_t>(2 * slots() * unit_size()),
                narrow<Storage>(static_cast<Real>(kNaN)));
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t page = 0; page < c.pages(); ++page) {
        const auto entry = static_cast<size_t>(b * c.pages() + page);
        if (!has_gradient(page)) dkv_table[2 * entry] = dkv_table[2 * entry + 1] = -1;
        const int64_t begin = page * c.page;
        const int64_t count = std::min(c.page, c.past - begin) * c.head_dim;
        auto slot = pool.begin() + block_table[entry] * 2 * unit_size();
        for (const std::vector<Storage>* tensor : {&k, &v}) {
          for (int64_t h = 0; h < c.kv_heads; ++h, slot += c.page * c.head_dim) {
            std::copy_n(tensor->begin() + at(c.kv_heads, c.tokens(), b, h, begin), count, slot);
          }
        }
      }
    }
  }

  std::vector<Real> all_gradients(int64_t kind, const std::vector<Storage>& own) const {
    std::vector<Real> all(k.size(), Real{0});
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        for (int64_t token = 0; token < c.tokens(); ++token) {
          const int64_t page = token / c.page;
          for (int64_t d = 0; d < c.head_dim; ++d) {
            Real& value = all[static_cast<size_t>(at(c.kv_heads, c.tokens(), b, h, token) + d)];
            if (token >= c.past) {
              const int64_t i = at(c.kv_heads, c.chunk, b, h, token - c.past) + d;
              value = widen(own[static_cast<size_t>(i)]);
            } else if (has_gradient(page)) {
              const int32_t unit =
                  dkv_table[static_cast<size_t>((b * c.pages() + page) * 2 + kind)];
              const int64_t i =
                  unit * unit_size() + (h * c.page + token - page * c.page) * c.head_dim + d;
              value = static_cast<Real>(widen(dkv_pool[static_cast<size_t>(i)]));
            }
          }
        }
      }
    }
    return all;
  }
};

}  // namespace oomb::testing
