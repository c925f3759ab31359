#include "memory/head_room.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace oomb::memory {

namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// A file that holds one number, or "max".
int64_t read_number(const std::string& path, int64_t otherwise) {
  std::ifstream file(path);
  std::string text;
  if (!(file >> text) || text == "max") return otherwise;
  try {
    return std::stoll(text);
  } catch (const std::exception&) {
    return otherwise;
  }
}

int64_t read_field(const std::string& path, const std::string& field) {
  std::ifstream file(path);
  std::string name;
  int64_t value = 0;
  for (std::string line; std::getline(file, line);) {
    const auto end = line.find_first_of(": ");
    if (line.substr(0, end) != field) continue;
    value = std::stoll(line.substr(line.find_first_of("0123456789")));
    break;
  }
  return value;
}

// Room in the control group: its limit less what is used and cannot be dropped (file cache can).
int64_t cgroup_room() {
  const std::string unified = "/sys/fs/cgroup/";
  const int64_t limit = read_number(unified + "memory.max", kUnlimited);
  if (limit != kUnlimited) {
    return limit - (read_number(unified + "memory.current", 0) -
                    read_field(unified + "memory.stat", "file"));
  }
  const std::string legacy = "/sys/fs/cgroup/memory/";
  const int64_t old_limit = read_number(legacy + "memory.limit_in_bytes", kUnlimited);
  // "No limit" is a number close to 2^63 there.
  if (old_limit > (int64_t{1} << 60)) return kUnlimited;
  return old_limit - (read_number(legacy + "memory.usage_in_bytes", 0) -
                      read_field(legacy + "memory.stat", "total_cache"));
}

}  // namespace

HeadRoom read_head_room() {
  HeadRoom room;
  room.available = std::min(read_field("/proc/meminfo", "MemAvailable") * 1024,
                            std::max<int64_t>(0, cgroup_room()));
  room.total = read_field("/proc/meminfo", "MemTotal") * 1024;
  return room;
}

}  // namespace oomb::memory
