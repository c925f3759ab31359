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

// A part of each rank, and where their sum belongs; all of `bytes`, a multiple of 16.
struct PartSum {
  const std::byte* parts[kMostRanks] = {};  // in the order of ranks
  std::byte* targets[kMostRanks] = {};
  int64_t bytes = 0;
  int count = 0;  // of both
};

// `most_blocks`: of threads; 0: as many as help.
void launch_copies(const RowCopies& copies, int most_blocks, cudaStream_t stream);
void launch_part_sum(const PartSum& sum, DType dtype, int most_blocks, cudaStream_t stream);
void launch_meeting(const Meeting& meeting, cudaStream_t stream);

}  // namespace oomb::peers
