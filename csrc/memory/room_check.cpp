#include "memory/room_check.h"

#include <algorithm>
#include <thread>

#include "common/bytes.h"
#include "common/error.h"

namespace oomb::memory {

namespace {

using Clock = std::chrono::steady_clock;

// Room left for everybody else, the kernel included.
int64_t reserve_for_others(int64_t total) { return std::max(int64_t{512} * kMiB, total / 64); }

}  // namespace

void RoomCheck::require(int64_t bytes, int64_t held) {
  HeadRoom room = options_.read();
  auto last_growth = Clock::now();
  while (room.available < bytes + reserve_for_others(room.total)) {
    // Waiting helps only where memory grows; asking for a little more is what makes it grow.
    const bool may_grow = options_.patient && room.available > bytes && room.total > vain_total_;
    if (!may_grow || Clock::now() - last_growth >= options_.patience) {
      if (may_grow) vain_total_ = room.total;
      throw OutOfMemory(
          concat("host memory: needed ", human_bytes(bytes), " (", bytes, " bytes) more beside ",
                 human_bytes(held), " pinned, the machine has ", human_bytes(room.available),
                 " available of ", human_bytes(room.total), ", ",
                 human_bytes(reserve_for_others(room.total)),
                 " of it kept for others; lower host_memory or the number of tokens"),
          bytes, room.available);
    }
    std::this_thread::sleep_for(options_.interval);
    const HeadRoom now = options_.read();
    if (now.total > room.total) last_growth = Clock::now();
    room = now;
  }
}

}  // namespace oomb::memory
