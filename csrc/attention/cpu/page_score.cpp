#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu/buffer.h"
#include "attention/cpu/cpu.h"
#include "attention/cpu/storage.h"
#include "attention/cpu/thread_pool.h"
#include "attention/cpu/tile_kernels.h"
#include "common/error.h"
#include "common/math.h"

namespace oomb::attention::cpu {
namespace {

// Scores of all past pages for one query block and one kv head. The query vectors, one for the
// block or one per token, are columns of a panel; the pages' summaries are its rows.
template <typename Storage>
class PageScore {
 public:
  using Real = RealOf<Storage>;

  explicit PageScore(const PageScoreParams& params)
      : p_(params),
        shape_(params.shape),
        kernels_(tile_kernels<Real>()),
        pages_(ceil_div(params.num_tokens, params.shape.page_size)),
        blocks_(ceil_div(params.shape.chunk, params.shape.page_size)),
        group_(params.shape.query_heads / params.shape.kv_heads) {
    expect(params.score_heads == 1 || params.score_heads == shape_.kv_heads, "scores",
           concat("1 or ", shape_.kv_heads, " heads"), params.score_heads);
  }

  void run() const {
    if (pages_ == 0) return;
    parallel_for(shape_.batch * blocks_, num_threads(),
                 [&](int64_t unit, int64_t) { score_block(unit / blocks_, unit % blocks_); });
  }

 private:
  void score_block(int64_t batch, int64_t block) const {
    const int64_t first_row = block * shape_.page_size;
    int64_t end_row = std::min(shape_.chunk, first_row + shape_.page_size);
    int64_t keys = p_.num_tokens;
    if (p_.visibility.num_keys != nullptr) {
      const int64_t real = p_.visibility.num_keys[batch];
      keys = std::min(keys, real);
      end_row = std::clamp(real - p_.num_tokens, first_row, end_row);
    }
    const int64_t first_key =
        p_.visibility.first_key != nullptr
            ? std::max(0, p_.visibility.first_key[batch * shape_.chunk + first_row])
            : 0;
    // Candidates: pages [begin, end).
    const int64_t begin = std::min(first_key / shape_.page_size, pages_);
    const int64_t end = std::max(begin, ceil_div(std::max<int64_t>(keys, 0), shape_.page_size));

    const Scratch scratch(kernels_, pages_, shape_.head_dim);
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      Real* scores =
          static_cast<Real*>(p_.scores) +
          ((batch * blocks_ + block) * p_.score_heads + (p_.score_heads == 1 ? 0 : head)) * pages_;
      if (p_.score_heads > 1 || head == 0) {
        std::fill_n(scores, pages_, -std::numeric_limits<Real>::infinity());
        std::fill(scores + begin, scores + end, Real{0});
      }
      if (begin == end) continue;
      kernels_.widen(
          p_.dtype,
          static_cast<const Storage*>(p_.summary) +
              ((batch * p_.summary_stride + begin) * shape_.kv_heads + head) * shape_.head_dim,
          shape_.kv_heads * shape_.head_dim, end - begin, shape_.head_dim, scratch.summaries.get());
      if (p_.kind == ScoreKind::kBlockMean) {
        add_block_mean(batch, head, first_row, end_row, end - begin, scratch, scores + begin);
      } else {
        add_token_softmax(batch, head, first_row, end_row, end - begin, scratch, scores + begin);
      }
    }
  }

  struct Scratch {
    Scratch(const TileKernels<Real>& kernels, int64_t pages, int64_t head_dim)
        : summaries(pages * head_dim),
          panel(head_dim * kernels.panel_rows),
          products(pages * kernels.panel_rows) {}
    Buffer<Real> summaries;  // [candidates, D]
    Buffer<Real> panel;      // [D, panel_rows]
    Buffer<Real> products;   // [candidates, panel_rows]
  };

  // Adds the group's queries of a token to column `lane` of the panel.
  void add_query(int64_t batch, int64_t head, int64_t token, int64_t lane, Real* panel) const {
    for (int64_t h = head * group_; h < (head + 1) * group_; ++h) {
      const Storage* q = static_cast<const Storage*>(p_.q) + batch * p_.q_strides.batch +
                         h * p_.q_strides.head + token * p_.q_strides.token;
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        panel[d * kernels_.panel_rows + lane] += widen(q[d]);
      }
    }
  }

  void add_block_mean(int64_t batch, int64_t head, int64_t first_row, int64_t end_row,
                      int64_t candidates, const Scratch& s, Real* scores) const {
    const int64_t width = kernels_.panel_rows;
    std::fill_n(s.panel.get(), shape_.head_dim * width, Real{0});
    for (int64_t token = first_row; token < end_row; ++token) {
      add_query(batch, head, token, 0, s.panel.get());
    }
    kernels_.multiply(candidates, shape_.head_dim, s.summaries.get(), shape_.head_dim,
                      s.panel.get(), 1, s.products.get());
    const Real count = static_cast<Real>(std::max<int64_t>(1, (end_row - first_row) * group_));
    for (int64_t page = 0; page < candidates; ++page) {
      scores[page] += s.products.get()[page * width] / count;
    }
  }

  void add_token_softmax(int64_t batch, int64_t head, int64_t first_row, int64_t end_row,
                         int64_t candidates, const Scratch& s, Real* scores) const {
    const int64_t width = kernels_.panel_rows;
    for (int64_t token = first_row; token < end_row; token += width) {
      const int64_t tokens = std::min(width, end_row - token);
      std::fill_n(s.panel.get(), shape_.head_dim * width, Real{0});
      for (int64_t i = 0; i < tokens; ++i) add_query(batch, head, token + i, i, s.panel.get());
      kernels_.multiply(candidates, shape_.head_dim, s.summaries.get(), shape_.head_dim,
                        s.panel.get(), ceil_div(tokens, kernels_.lanes), s.products.get());
      for (int64_t i = 0; i < tokens; ++i) {
        Real* column = s.products.get() + i;
        Real max = column[0];
        for (int64_t page = 1; page < candidates; ++page) {
          max = std::max(max, column[page * width]);
        }
        Real sum = 0;
        for (int64_t page = 0; page < candidates; ++page) {
          sum += column[page * width] = std::exp(column[page * width] - max);
        }
        for (int64_t page = 0; page < candidates; ++page) {
          scores[page] += column[page * width] / sum;
        }
      }
    }
  }

  const PageScoreParams& p_;
  const Shape& shape_;
  const TileKernels<Real>& kernels_;
  const int64_t pages_;
  const int64_t blocks_;
  const int64_t group_;
};

}  // namespace

void page_score(const PageScoreParams& params) {
  dispatch_storage(params.dtype, [&]<typename Storage>() { PageScore<Storage>(params).run(); });
}

int64_t page_score_workspace_bytes(const PageScoreParams&) { return 0; }

}  // namespace oomb::attention::cpu
