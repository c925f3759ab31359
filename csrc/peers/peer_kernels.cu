#include <algorithm>
#include <initializer_list>

#include "common/cuda_check.h"
#include "common/math.h"
#include "peers/peer_kernels.h"

namespace oomb::peers {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 2;  // on a multiprocessor, so that registers suffice
constexpr int kUnroll = 4;
constexpr int kLooksBetween = 64;  // host memory is far

__device__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// Where a word of a copy comes from and goes to.
struct Place {
  int64_t source, target;
};

template <typename Word>
__device__ Place place_of(const RowCopy& copy, uint32_t word, uint32_t words_of_row) {
  const auto heads = static_cast<uint32_t>(copy.heads), batch = static_cast<uint32_t>(copy.batch);
  const uint32_t row = word / words_of_row;
  const uint32_t rows_of_heads = row / heads;
  const int64_t head = row - rows_of_heads * heads;
  const int64_t token = rows_of_heads / batch;
  const int64_t sequence = rows_of_heads % batch;
  const int64_t inside = int64_t{word - row * words_of_row} * static_cast<int64_t>(sizeof(Word));
  const auto at = [&](const Spacing& spacing) {
    return token * spacing.token + sequence * spacing.batch + head * spacing.head + inside;
  };
  return {at(copy.in_source), at(copy.in_target)};
}

// This block's share of a copy that the blocks of a row of the grid make together.
template <typename Word>
__device__ void copy_share(const RowCopy& copy) {
  const auto words_of_row = static_cast<uint32_t>(copy.row_bytes / sizeof(Word));
  const auto words = static_cast<uint32_t>(copy.tokens * copy.batch * copy.heads) * words_of_row;
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < words; i += kUnroll * step) {
    Word held[kUnroll];
    std::byte* target[kUnroll];
#pragma unroll
    for (uint32_t j = 0; j < kUnroll; ++j) {
      target[j] = nullptr;
      if (i + j * step >= words) continue;
      const Place place = place_of<Word>(copy, i + j * step, words_of_row);
      held[j] = *reinterpret_cast<const Word*>(copy.source + place.source);
      target[j] = copy.target + place.target;
    }
#pragma unroll
    for (uint32_t j = 0; j < kUnroll; ++j) {
      if (target[j] != nullptr) *reinterpret_cast<Word*>(target[j]) = held[j];
    }
  }
}

template <typename Word>
__global__ void __launch_bounds__(kThreads, kBlocks)
    copy_kernel(const __grid_constant__ RowCopies copies) {
  copy_share<Word>(copies.copy[blockIdx.y]);
}

// A thread for each rank. Clock cycles tell the time: the global timer takes a microsecond to read.
__global__ void meet_kernel(const __grid_constant__ Meeting meeting) {
  const int other = static_cast<int>(threadIdx.x);
  if (other >= meeting.ranks || other == meeting.rank) return;
  __threadfence_system();
  store_release(meeting.theirs[other], meeting.number);
  const int64_t begin = clock64();
  auto* halt = reinterpret_cast<volatile int*>(meeting.halt);
  for (int look = 1; load_acquire(meeting.ours[other]) < meeting.number; ++look) {
    if (look % kLooksBetween != 0) continue;
    if (*halt != static_cast<int>(Halt::kNone)) return;
    if (clock64() - begin > meeting.limit_cycles) {
      *halt = static_cast<int>(Halt::kTimedOut);
      return;
    }
  }
}

// The widest word in which all rows begin and end.
int64_t word_of(const RowCopies& copies) {
  auto all = uintptr_t{16};
  for (const RowCopy* copy = copies.copy; copy != copies.copy + copies.count; ++copy) {
    all |= reinterpret_cast<uintptr_t>(copy->source) | reinterpret_cast<uintptr_t>(copy->target);
    all |= static_cast<uintptr_t>(copy->row_bytes);
    for (const Spacing& spacing : {copy->in_source, copy->in_target}) {
      all |= static_cast<uintptr_t>(spacing.token | spacing.batch | spacing.head);
    }
  }
  return static_cast<int64_t>(all & (~all + 1));
}

// So many blocks of a copy keep a link busy; small copies need fewer.
constexpr int64_t kMostBlocks = 64;

dim3 grid_of(const RowCopies& copies, int64_t word) {
  int64_t most = 0;
  for (const RowCopy* copy = copies.copy; copy != copies.copy + copies.count; ++copy) {
    most = std::max(most, copy->tokens * copy->batch * copy->heads * (copy->row_bytes / word));
  }
  const int64_t blocks = ceil_div(most, int64_t{kThreads * kUnroll});
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, kMostBlocks)),
              static_cast<unsigned>(copies.count));
}

}  // namespace

void launch_copies(const RowCopies& copies, cudaStream_t stream) {
  if (copies.count == 0) return;
  const int64_t word = word_of(copies);
  const dim3 grid = grid_of(copies, word);
  if (word == 16) {
    copy_kernel<uint4><<<grid, kThreads, 0, stream>>>(copies);
  } else if (word >= 4) {
    copy_kernel<uint32_t><<<grid, kThreads, 0, stream>>>(copies);
  } else {
    copy_kernel<uint8_t><<<grid, kThreads, 0, stream>>>(copies);
  }
  check_launch("copy_kernel");
}

void launch_meeting(const Meeting& meeting, cudaStream_t stream) {
  static_assert(kMostRanks <= 32);
  meet_kernel<<<1, 32, 0, stream>>>(meeting);
  check_launch("meet_kernel");
}

}  // namespace oomb::peers
