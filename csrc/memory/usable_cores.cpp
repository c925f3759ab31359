#include "memory/usable_cores.h"

#include <algorithm>
#include <fstream>
#include <thread>

namespace oomb::memory {

int usable_cores(const std::string& quota_file) {
  const int there = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  // "<quota> <period>" in microseconds, or "max <period>".
  std::ifstream file(quota_file);
  double quota = 0;
  double period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return there;
  return std::clamp(static_cast<int>(quota / period), 1, there);
}

}  // namespace oomb::memory
