#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "memory/head_room.h"

namespace oomb::memory {

struct RoomCheckOptions {
  // The size was asked for by name: a machine whose memory grows while it is used (MemTotal) is
  // given time, this long after the last growth.
  bool patient = false;
  std::chrono::milliseconds patience = std::chrono::seconds(10);
  std::chrono::milliseconds interval = std::chrono::milliseconds(50);  // between two looks
  std::function<HeadRoom()> read = read_head_room;
};

// Checks that the machine can give host memory, before it is taken. Used from one thread at a time.
class RoomCheck {
 public:
  explicit RoomCheck(RoomCheckOptions options) : options_(std::move(options)) {}

  // Throws OutOfMemory unless `bytes` can be taken beside `held` that were, with room left for
  // everybody else. May wait; but where that was in vain, not again until there is more in all.
  void require(int64_t bytes, int64_t held);

 private:
  RoomCheckOptions options_;
  int64_t vain_total_ = 0;  // the machine's memory when waiting was given up
};

}  // namespace oomb::memory
