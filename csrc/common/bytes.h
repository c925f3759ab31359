#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>

namespace oomb {

constexpr int64_t kKiB = int64_t{1} << 10;
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

// "0 B", "1023 B", "1.50 KiB", "40.00 GiB": for messages, not for parsing back.
inline std::string human_bytes(int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  const bool negative = bytes < 0;
  double value = negative ? -static_cast<double>(bytes) : static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%s%.0f %s" : "%s%.2f %s",
                negative ? "-" : "", value, kUnits[unit]);
  return text.data();
}

}  // namespace oomb
