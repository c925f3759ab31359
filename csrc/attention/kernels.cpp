#include "attention/kernels.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>

#include "common/error.h"

namespace oomb::attention {
namespace {

constexpr int64_t kWidestFastHead = 512;

template <typename Params>
const Kernels& choose(Preference all, const Params& params, int capability, const Kernels* forced) {
  if (forced != nullptr) {
    expect(forced->takes(params, capability), "OOMB_ATTENTION",
           concat("an implementation that takes ", describe(params.shape, params.dtype, params.cap),
                  " on compute capability ", capability / 10, ".", capability % 10),
           forced->name);
    return *forced;
  }
  for (const Kernels* kernels : all) {
    if (kernels->takes(params, capability)) return *kernels;
  }
  throw InvalidArgument(concat("q: expected what some kernels take, got ",
                               describe(params.shape, params.dtype, params.cap)));
}

}  // namespace

std::string describe(const Shape& shape, DType dtype, double cap) {
  const std::string capped = cap > 0 ? concat(", scores capped at ", cap) : "";
  return concat(name_of(dtype), ", head dim ", shape.head_dim, ", pages of ", shape.page_size,
                " tokens", capped);
}

const Kernels& kernels_named(Preference all, const std::string& name) {
  std::string names;
  for (size_t i = 0; i < all.size(); ++i) {
    if (name == all[i]->name) return *all[i];
    names += concat(i == 0 ? "" : i + 1 == all.size() ? " or " : ", ", all[i]->name);
  }
  throw InvalidArgument(concat("OOMB_ATTENTION: expected ", names, ", got ", name));
}

int64_t common_key_tile(Preference all) {
  int64_t tile = 1;
  for (const Kernels* kernels : all) tile = std::lcm(tile, kernels->key_tile);
  return tile;
}

std::vector<int64_t> fast_page_sizes(Preference all) {
  std::optional<std::vector<int64_t>> common;
  for (const Kernels* kernels : all) {
    if (kernels->fast_for == nullptr) continue;
    const auto sizes = kernels->page_sizes;
    if (!common) {
      common.emplace(sizes.begin(), sizes.end());
      continue;
    }
    std::vector<int64_t> both;
    std::ranges::set_intersection(*common, sizes, std::back_inserter(both));
    common = std::move(both);
  }
  return common.value_or(std::vector<int64_t>{});
}

int64_t padded_head_dim(Preference all, int64_t head_dim, int capability) {
  const int64_t widest = std::min(2 * head_dim, kWidestFastHead);
  for (int64_t dim = head_dim; dim <= widest; ++dim) {
    for (const Kernels* kernels : all) {
      if (kernels->fast_head_dim != nullptr && kernels->fast_head_dim(dim, capability)) return dim;
    }
  }
  return head_dim;
}

std::string describe_fast(Preference all) {
  std::string text;
  for (const Kernels* kernels : all) {
    if (kernels->fast_for == nullptr) continue;
    text += concat(text.empty() ? "" : "; ", kernels->name, ": ", kernels->fast_for);
  }
  return text;
}

const Kernels& choose_kernels(Preference all, const ForwardParams& params, int capability,
                              const Kernels* forced) {
  return choose(all, params, capability, forced);
}

const Kernels& choose_kernels(Preference all, const BackwardParams& params, int capability,
                              const Kernels* forced) {
  return choose(all, params, capability, forced);
}

}  // namespace oomb::attention
