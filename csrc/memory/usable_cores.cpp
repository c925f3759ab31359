#include "memory/usable_cores.h"

#include <algorithm>
#include <fstream>
#include <thread>

namespace oomb::memory {

int usable_cores() {
  const int there = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  // "<quota> <period>" in microseconds, or "max <period>".
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  double quota = 0;
  double period = 0;
  if (!(file >> quota >> period) || quota <= 0 || period <= 0) return there;
  return std::clamp(static_cast<int>(quota / period), 1, there);
}

}  // namespace oomb::memory
