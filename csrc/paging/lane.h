#pragma once

#include <cstdint>

namespace oomb::paging {

// The three queues in which work on pages runs. Each runs its work in the order of issue; between
// them nothing is ordered but by waits.
enum class Lane : uint8_t { kCompute, kStore, kLoad };
constexpr int kNumLanes = 3;

// A point in a lane: everything issued to it up to then. Tickets of one lane increase; 0 is
// "nothing".
using Ticket = int64_t;

}  // namespace oomb::paging
