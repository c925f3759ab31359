#pragma once

// Arithmetic on sizes that a caller has named: a result that does not fit is the caller's mistake,
// not an overflow.

#include <cstdint>

#include "common/error.h"

namespace oomb {

// Products of sizes stay below this, so that sums of a few of them fit an int64_t too.
constexpr int64_t kMostElements = int64_t{1} << 60;

// The product of sizes of at least 0, at most kMostElements.
template <typename... Sizes>
int64_t checked_product(const char* argument, Sizes... sizes) {
  int64_t product = 1;
  bool fits = true;
  const auto multiply = [&](int64_t size) {
    fits = fits && !__builtin_mul_overflow(product, size, &product) && product <= kMostElements;
  };
  (multiply(static_cast<int64_t>(sizes)), ...);
  if (!fits) {
    std::string factors;
    ((factors += concat(factors.empty() ? "" : " x ", sizes)), ...);
    expect(false, argument, "sizes whose product is at most 2^60", factors);
  }
  return product;
}

}  // namespace oomb
