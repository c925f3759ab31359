#include <cuda_bf16.h>

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

// Divides numbers below 2^31: n / d = n (1 + m / 2^32) / 2^shift, with m rounded up. Without the
// divisions of every word, which take longer than to move it, few multiprocessors suffice.
class Divider {
 public:
  __device__ explicit Divider(int64_t divisor) {
    divisor_ = static_cast<uint32_t>(divisor);
    shift_ = 32 - __clz(static_cast<int>(divisor_ - 1));
    const uint64_t over = ((uint64_t{1} << shift_) - divisor_) << 32;
    multiplier_ = static_cast<uint32_t>(over / divisor_) + 1;
  }

  __device__ uint32_t quotient(uint32_t number) const {
    return (__umulhi(number, multiplier_) + number) >> shift_;
  }

  __device__ uint32_t rest(uint32_t number, uint32_t quotient) const {
    return number - quotient * divisor_;
  }

 private:
  uint32_t divisor_ = 1, shift_ = 0, multiplier_ = 1;
};

// Where a word of a copy comes from and goes to.
struct Place {
  int64_t source, target;
};

struct RowShape {
  Divider words, heads, batch;
};

template <typename Word>
__device__ Place place_of(const RowCopy& copy, const RowShape& shape, uint32_t word) {
  const uint32_t row = shape.words.quotient(word);
  const uint32_t rows_of_heads = shape.heads.quotient(row);
  const uint32_t tokens = shape.batch.quotient(rows_of_heads);
  const int64_t head = shape.heads.rest(row, rows_of_heads), token = tokens;
  const int64_t sequence = shape.batch.rest(rows_of_heads, tokens);
  const int64_t inside = int64_t{shape.words.rest(word, row)} * static_cast<int64_t>(sizeof(Word));
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
  const RowShape shape{Divider(words_of_row), Divider(copy.heads), Divider(copy.batch)};
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < words; i += kUnroll * step) {
    Word held[kUnroll];
    std::byte* target[kUnroll];
#pragma unroll
    for (uint32_t j = 0; j < kUnroll; ++j) {
      target[j] = nullptr;
      if (i + j * step >= words) continue;
      const Place place = place_of<Word>(copy, shape, i + j * step);
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

// In registers a word of 16 bytes is added up in fp32, and rounded once.
template <typename Value>
__global__ void __launch_bounds__(kThreads, kBlocks)
    part_sum_kernel(const __grid_constant__ PartSum sum) {
  constexpr int kValues = sizeof(uint4) / sizeof(Value);
  constexpr int kWords = 16 / kValues;  // at once: as many sums as there are registers for
  const int64_t words = sum.bytes / static_cast<int64_t>(sizeof(uint4));
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += kWords * step) {
    float totals[kWords][kValues] = {};
#pragma unroll 1
    for (int rank = 0; rank < sum.count; ++rank) {
      const auto* part = reinterpret_cast<const uint4*>(sum.parts[rank]);
      uint4 held[kWords];
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        if (i + j * step < words) held[j] = part[i + j * step];
      }
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const auto* values = reinterpret_cast<const Value*>(&held[j]);
#pragma unroll
        for (int k = 0; k < kValues; ++k) {
          const auto value = static_cast<float>(values[k]);
          totals[j][k] = rank == 0 ? value : totals[j][k] + value;  // 0 + -0 would be 0
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      if (i + j * step >= words) continue;
      uint4 word;
      auto* values = reinterpret_cast<Value*>(&word);
#pragma unroll
      for (int k = 0; k < kValues; ++k) values[k] = static_cast<Value>(totals[j][k]);
      for (int target = 0; target < sum.count; ++target) {
        reinterpret_cast<uint4*>(sum.targets[target])[i + j * step] = word;
      }
    }
  }
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

// Blocks of threads for so many words, at most `most`.
unsigned blocks_for(int64_t words, int64_t most) {
  const int64_t blocks = ceil_div(words, int64_t{kThreads * kUnroll});
  return static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, std::max<int64_t>(most, 1)));
}

dim3 grid_of(const RowCopies& copies, int64_t word, int most_blocks) {
  int64_t most = 0;
  for (const RowCopy* copy = copies.copy; copy != copies.copy + copies.count; ++copy) {
    most = std::max(most, copy->tokens * copy->batch * copy->heads * (copy->row_bytes / word));
  }
  const int64_t blocks = most_blocks > 0 ? most_blocks / copies.count : kMostBlocks;
  return dim3(blocks_for(most, blocks), static_cast<unsigned>(copies.count));
}

}  // namespace

void launch_copies(const RowCopies& copies, int most_blocks, cudaStream_t stream) {
  if (copies.count == 0) return;
  const int64_t word = word_of(copies);
  const dim3 grid = grid_of(copies, word, most_blocks);
  if (word == 16) {
    copy_kernel<uint4><<<grid, kThreads, 0, stream>>>(copies);
  } else if (word >= 4) {
    copy_kernel<uint32_t><<<grid, kThreads, 0, stream>>>(copies);
  } else {
    copy_kernel<uint8_t><<<grid, kThreads, 0, stream>>>(copies);
  }
  check_launch("copy_kernel");
}

void launch_part_sum(const PartSum& sum, DType dtype, int most_blocks, cudaStream_t stream) {
  const int64_t words = sum.bytes / static_cast<int64_t>(sizeof(uint4));
  const unsigned blocks = blocks_for(words, most_blocks > 0 ? most_blocks : 2 * kMostBlocks);
  if (dtype == DType::kFloat32) {
    part_sum_kernel<float><<<blocks, kThreads, 0, stream>>>(sum);
  } else {
    part_sum_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(sum);
  }
  check_launch("part_sum_kernel");
}

void launch_meeting(const Meeting& meeting, cudaStream_t stream) {
  static_assert(kMostRanks <= 32);
  meet_kernel<<<1, 32, 0, stream>>>(meeting);
  check_launch("meet_kernel");
}

}  // namespace oomb::peers
