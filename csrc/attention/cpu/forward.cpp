#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "attention/cpu/buffer.h"
#include "attention/cpu/cpu.h"
#include "attention/cpu/key_source.h"
#include "attention/cpu/panel_copy.h"
#include "attention/cpu/panels.h"
#include "attention/cpu/storage.h"
#include "attention/cpu/thread_pool.h"
#include "attention/cpu/tile_kernels.h"
#include "attention/cpu/wave.h"
#include "common/error.h"
#include "common/math.h"

namespace oomb::attention::cpu {
namespace {

// Maximum of no scores: finite, so that differences of maxima are never inf - inf.
template <typename Real>
constexpr Real kNoScore = std::numeric_limits<Real>::lowest() / 2;

// One unit of work is a query block of one kv head: all its panels, tile by tile.
template <typename Storage>
class Forward {
 public:
  using Real = RealOf<Storage>;

  explicit Forward(const ForwardParams& params)
      : p_(params),
        shape_(params.shape),
        wave_(params.shape, params.visibility, params.past, params.own_chunk),
        kernels_(tile_kernels<Real>()),
        source_{static_cast<const Storage*>(params.k), static_cast<const Storage*>(params.v),
                params.k_strides, params.v_strides, params.past.kv_pool},
        blocks_(ceil_div(params.shape.chunk, params.shape.page_size)) {
    const bool one_wave = params.first_wave && params.last_wave;
    expect(one_wave || (params.state.acc && params.state.max && params.state.sum), "acc, max, sum",
           "tensors to carry between waves", "none");
  }

  void run() {
    const int64_t pairs = shape_.batch * shape_.kv_heads;
    const int64_t threads = num_threads();
    std::vector<Scratch> scratch;
    for (int64_t i = 0; i < threads; ++i) scratch.emplace_back(*this);
    // Late blocks see more of the own chunk: with them first, the threads' shares are even.
    parallel_for(blocks_ * pairs, threads, [&](int64_t unit, int64_t thread) {
      const int64_t pair = unit % pairs;
      run_block(pair / shape_.kv_heads, pair % shape_.kv_heads, blocks_ - 1 - unit / pairs,
                scratch[static_cast<size_t>(thread)]);
    });
  }

 private:
  struct Scratch {
    explicit Scratch(const Forward& f)
        : reader(f.shape_, f.wave_, f.source_, f.kernels_, f.p_.dtype) {
      const int64_t lanes = f.kernels_.panel_rows;
      const int64_t block_rows =
          std::min(f.shape_.page_size, f.shape_.chunk) * (f.shape_.query_heads / f.shape_.kv_heads);
      const int64_t panels = ceil_div(block_rows, lanes);
      q = Buffer<Real>(panels * f.shape_.head_dim * lanes);
      acc = Buffer<Real>(panels * f.shape_.head_dim * lanes);
      max = Buffer<Real>(panels * lanes);
      sum = Buffer<Real>(panels * lanes);
      scores = Buffer<Real>(f.wave_.longest_tile() * lanes);
      first = Buffer<Real>(lanes);
      last = Buffer<Real>(lanes);
    }
    TileReader<Storage> reader;
    Buffer<Real> q, acc, max, sum, scores, first, last;
  };

  void run_block(int64_t batch, int64_t kv_head, int64_t block, Scratch& s) const {
    const int64_t width = kernels_.panel_rows;
    const int64_t panel_size = shape_.head_dim * width;
    const Panels panels(shape_, p_.visibility, p_.past.num_tokens, kernels_.lanes, width, batch,
                        kv_head, block, block + 1);
    for (int64_t i = 0; i < panels.size(); ++i) {
      load_transposed(panels, i, kernels_.lanes, width, shape_.head_dim,
                      static_cast<const Storage*>(p_.q), p_.q_strides, batch,
                      s.q.get() + i * panel_size);
      load_state(panels, i, batch, s);
    }
    for (const Tile& tile : wave_.tiles(batch)) {
      if (!wave_.attends(batch, block, kv_head, tile)) continue;
      KeyTile<Real> keys;
      for (int64_t i = 0; i < panels.size(); ++i) {
        const Cover cover = panels.cover(i, tile);
        if (cover == Cover::kNone) continue;
        if (keys.keys == 0) keys = s.reader.read(batch, kv_head, tile);
        ForwardTile<Real> t;
        t.tile = keys;
        t.mask = {cover == Cover::kPart, s.first.get(), s.last.get()};
        if (t.mask.masked) panels.fill_mask(i, tile, s.first.get(), s.last.get());
        t.head_dim = shape_.head_dim;
        t.vectors = panels[i].vectors;
        t.of_product = {p_.scale, p_.cap};
        t.q = s.q.get() + i * panel_size;
        t.scores = s.scores.get();
        t.acc = s.acc.get() + i * panel_size;
        t.max = s.max.get() + i * width;
        t.sum = s.sum.get() + i * width;
        kernels_.forward(t);
      }
    }
    for (int64_t i = 0; i < panels.size(); ++i) {
      if (p_.last_wave) {
        store_output(panels, i, batch, s);
      } else {
        store_state(panels, i, batch, s);
      }
    }
  }

  void load_state(const Panels& panels, int64_t i, int64_t batch, Scratch& s) const {
    const int64_t width = kernels_.panel_rows;
    Real* acc = s.acc.get() + i * shape_.head_dim * width;
    Real* max = s.max.get() + i * width;
    Real* sum = s.sum.get() + i * width;
    std::fill_n(max, width, kNoScore<Real>);
    std::fill_n(sum, width, Real{0});
    if (p_.first_wave) {
      std::fill_n(acc, shape_.head_dim * width, Real{0});
      return;
    }
    load_transposed(panels, i, kernels_.lanes, width, shape_.head_dim,
                    static_cast<const Real*>(p_.state.acc),
                    contiguous_strides(shape_, shape_.head_dim), batch, acc);
    for (int64_t r = 0; r < panels[i].rows; ++r) {
      const int64_t at = stat_index(batch, panels.rows(i)[r]);
      max[r] = static_cast<const Real*>(p_.state.max)[at];
      sum[r] = static_cast<const Real*>(p_.state.sum)[at];
    }
  }

  void store_state(const Panels& panels, int64_t i, int64_t batch, Scratch& s) const {
    const int64_t width = kernels_.panel_rows;
    std::fill_n(s.first.get(), width, Real{1});
    store_transposed(panels, i, width, shape_.head_dim, s.acc.get() + i * shape_.head_dim * width,
                     s.first.get(), static_cast<Real*>(p_.state.acc),
                     contiguous_strides(shape_, shape_.head_dim), batch);
    for (int64_t r = 0; r < panels[i].rows; ++r) {
      const int64_t at = stat_index(batch, panels.rows(i)[r]);
      static_cast<Real*>(p_.state.max)[at] = s.max.get()[i * width + r];
      static_cast<Real*>(p_.state.sum)[at] = s.sum.get()[i * width + r];
    }
  }

  void store_output(const Panels& panels, int64_t i, int64_t batch, Scratch& s) const {
    const int64_t width = kernels_.panel_rows;
    Real* factor = s.first.get();
    for (int64_t r = 0; r < panels[i].rows; ++r) {
      const Real sum = s.sum.get()[i * width + r];
      const Real max = s.max.get()[i * width + r];
      const bool any_key = sum != 0;  // NaN is not 0
      factor[r] = any_key ? 1 / sum : 0;
      static_cast<Real*>(p_.lse)[stat_index(batch, panels.rows(i)[r])] =
          any_key
              ? static_cast<Real>((max + std::log2(static_cast<double>(sum))) * std::numbers::ln2)
              : -std::numeric_limits<Real>::infinity();
    }
    store_transposed(panels, i, width, shape_.head_dim, s.acc.get() + i * shape_.head_dim * width,
                     factor, static_cast<Storage*>(p_.o), p_.o_strides, batch);
  }

  int64_t stat_index(int64_t batch, const Panels::Row& row) const {
    return (batch * shape_.query_heads + row.head) * shape_.chunk + row.token;
  }

  const ForwardParams& p_;
  const Shape& shape_;
  const Wave wave_;
  const TileKernels<Real>& kernels_;
  const KeySource<Storage> source_;
  const int64_t blocks_;
};

}  // namespace

void forward(const ForwardParams& params) {
  dispatch_storage(params.dtype, [&]<typename Storage>() { Forward<Storage>(params).run(); });
}

const char* instruction_set() { return chosen_instruction_set().name; }

}  // namespace oomb::attention::cpu
