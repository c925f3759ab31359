#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "peers/peer_exchange.h"

namespace oomb::peers {

// Flags of a rank stand in lines of their own.
constexpr int64_t kFlagStride = 128;

struct RowCopies {
  RowCopy copy[kMostPieces];
  int count = 0;
};
static_assert(sizeof(RowCopies) <= 4096);  // what a kernel's parameters may be

// All ranks come to the same place in their streams: each tells the others what it has done before,
// and sees what they have.
struct Meeting {
  uint64_t* theirs[kMostRanks];      // this rank's flag at each rank
  const uint64_t* ours[kMostRanks];  // each rank's flag here
  uint64_t number = 0;               // of the exchange, from 1
  int* halt = nullptr;               // in host memory: a Halt
  int64_t limit_cycles = 0;
  int ranks = 0, rank = 0;
};

void launch_copies(const RowCopies& copies, cudaStream_t stream);
void launch_meeting(const Meeting& meeting, cudaStream_t stream);

}  // namespace oomb::peers
