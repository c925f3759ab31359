#include "memory/head_room.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <cstdlib>
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

// Of a file with a field and its number in each line; 0: it has none, or cannot be read.
int64_t read_field(const std::string& path, const std::string& field) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto end = line.find_first_of(": ");
    if (end == std::string::npos || line.substr(0, end) != field) continue;
    return std::strtoll(line.c_str() + std::min(line.size(), line.find_first_of("0123456789")),
                        nullptr, 10);
  }
  return 0;
}

// Room in the control group: its limit less what is used and cannot be dropped (file cache can).
int64_t cgroup_room(const std::string& unified) {
  const int64_t limit = read_number(unified + "memory.max", kUnlimited);
  if (limit != kUnlimited) {
    return limit - (read_number(unified + "memory.current", 0) -
                    read_field(unified + "memory.stat", "file"));
  }
  const std::string legacy = unified + "memory/";
  const int64_t old_limit = read_number(legacy + "memory.limit_in_bytes", kUnlimited);
  // "No limit" is a number close to 2^63 there.
  if (old_limit > (int64_t{1} << 60)) return kUnlimited;
  return old_limit - (read_number(legacy + "memory.usage_in_bytes", 0) -
                      read_field(legacy + "memory.stat", "total_cache"));
}

}  // namespace

HeadRoom read_head_room() { return head_room_of("/proc/meminfo", "/sys/fs/cgroup/"); }

HeadRoom head_room_of(const std::string& meminfo, const std::string& cgroup) {
  HeadRoom room = {.available = read_field(meminfo, "MemAvailable") * 1024,
                   .total = read_field(meminfo, "MemTotal") * 1024};
  struct sysinfo system = {};
  if (room.total == 0 && sysinfo(&system) == 0) {
    const int64_t unit = system.mem_unit;
    room.total = static_cast<int64_t>(system.totalram) * unit;
    room.available = static_cast<int64_t>(system.freeram + system.bufferram) * unit;
  }
  room.available = std::min(room.available, std::max<int64_t>(0, cgroup_room(cgroup)));
  return room;
}

}  // namespace oomb::memory
