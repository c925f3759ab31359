#include <algorithm>

#include "common/cuda_check.h"
#include "common/math.h"
#include "offload/cuda/slot_kernels.h"

namespace oomb::offload {

namespace {

// Kernel parameters hold 4 KiB on every device.
constexpr int kSlotsPerLaunch = 960;
constexpr int kChangesPerLaunch = 480;

struct SlotList {
  int32_t slot[kSlotsPerLaunch];
};

struct ChangeList {
  int32_t entry[kChangesPerLaunch];
  int32_t value[kChangesPerLaunch];
};

// Block (x, y) fills a part of slot y, 16 bytes at a time where the slot size allows.
__global__ void fill_slots(std::byte* pool, int64_t slot_bytes,
                           const __grid_constant__ SlotList list, uint32_t word) {
  std::byte* slot = pool + list.slot[blockIdx.y] * slot_bytes;
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  if (slot_bytes % 16 == 0) {
    const uint4 words = {word, word, word, word};
    for (int64_t i = first; i < slot_bytes / 16; i += stride) {
      reinterpret_cast<uint4*>(slot)[i] = words;
    }
  } else {
    for (int64_t i = first; i < slot_bytes; i += stride) slot[i] = std::byte(word & 0xFF);
  }
}

// Block (x, y) copies a part of what slot y holds of the memory's bytes.
template <bool kToSlots, typename Pool, typename Memory>
__global__ void copy_slots(Pool* pool, int64_t slot_bytes, const __grid_constant__ SlotList list,
                           Memory* memory, int64_t bytes) {
  const int64_t offset = blockIdx.y * slot_bytes;
  const int64_t size = min(slot_bytes, bytes - offset);
  Pool* slot = pool + list.slot[blockIdx.y] * slot_bytes;
  Memory* piece = memory + offset;
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  const bool wide =
      (reinterpret_cast<uintptr_t>(slot) | reinterpret_cast<uintptr_t>(piece)) % 16 == 0;
  const int64_t words = wide ? size / 16 : 0;
  for (int64_t i = first; i < words; i += stride) {
    if constexpr (kToSlots) {
      reinterpret_cast<uint4*>(slot)[i] = reinterpret_cast<const uint4*>(piece)[i];
    } else {
      reinterpret_cast<uint4*>(piece)[i] = reinterpret_cast<const uint4*>(slot)[i];
    }
  }
  for (int64_t i = 16 * words + first; i < size; i += stride) {
    if constexpr (kToSlots) {
      slot[i] = piece[i];
    } else {
      piece[i] = slot[i];
    }
  }
}

template <bool kToSlots, typename Pool, typename Memory>
void launch_copy_slots(Pool* pool, int64_t slot_bytes, std::span<const memory::Slot> slots,
                       Memory* memory, int64_t bytes, cudaStream_t stream) {
  while (!slots.empty() && bytes > 0) {
    const auto part = slots.first(std::min<size_t>(kSlotsPerLaunch, slots.size()));
    SlotList list;
    std::copy(part.begin(), part.end(), list.slot);
    const int64_t size = std::min(bytes, static_cast<int64_t>(part.size()) * slot_bytes);
    const auto filled = static_cast<unsigned>(ceil_div(size, slot_bytes));
    const auto parts = static_cast<unsigned>(std::clamp<int64_t>(slot_bytes / 16384, 1, 64));
    copy_slots<kToSlots>
        <<<dim3(parts, filled), 256, 0, stream>>>(pool, slot_bytes, list, memory, size);
    check_launch("copy_slots");
    slots = slots.subspan(part.size());
    memory += size;
    bytes -= size;
  }
}

__global__ void update_entries(int32_t* tables, const __grid_constant__ ChangeList list,
                               int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) tables[list.entry[i]] = list.value[i];
}

__global__ void copy_words(const int32_t* source, int32_t* destination, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < count) destination[i] = source[i];
}

__global__ void spin(int64_t cycles) {
  const int64_t start = clock64();
  while (clock64() - start < cycles) {
  }
}

}  // namespace

void launch_spin(int64_t cycles, cudaStream_t stream) {
  spin<<<1, 1, 0, stream>>>(cycles);
  check_launch("spin");
}

void launch_copy_mapped(const int32_t* source, int32_t* destination, int64_t count,
                        cudaStream_t stream) {
  if (count == 0) return;
  copy_words<<<static_cast<unsigned>(ceil_div(count, 256)), 256, 0, stream>>>(source, destination,
                                                                              count);
  check_launch("copy_words");
}

void launch_fill(std::byte* pool, int64_t slot_bytes, std::span<const memory::Slot> slots,
                 uint8_t value, cudaStream_t stream) {
  const uint32_t word = value * 0x01010101u;
  for (size_t begin = 0; begin < slots.size(); begin += kSlotsPerLaunch) {
    const size_t count = std::min<size_t>(kSlotsPerLaunch, slots.size() - begin);
    SlotList list;
    std::copy_n(slots.begin() + static_cast<std::ptrdiff_t>(begin), count, list.slot);
    const auto parts = static_cast<unsigned>(std::clamp<int64_t>(slot_bytes / 16384, 1, 64));
    fill_slots<<<dim3(parts, static_cast<unsigned>(count)), 256, 0, stream>>>(pool, slot_bytes,
                                                                              list, word);
    check_launch("fill_slots");
  }
}

void launch_pack(std::byte* pool, int64_t slot_bytes, std::span<const memory::Slot> slots,
                 const std::byte* source, int64_t bytes, cudaStream_t stream) {
  launch_copy_slots<true>(pool, slot_bytes, slots, source, bytes, stream);
}

void launch_unpack(const std::byte* pool, int64_t slot_bytes, std::span<const memory::Slot> slots,
                   std::byte* target, int64_t bytes, cudaStream_t stream) {
  launch_copy_slots<false>(pool, slot_bytes, slots, target, bytes, stream);
}

void launch_table_update(int32_t* tables, std::span<const paging::TableChange> changes,
                         cudaStream_t stream) {
  for (size_t begin = 0; begin < changes.size(); begin += kChangesPerLaunch) {
    const size_t count = std::min<size_t>(kChangesPerLaunch, changes.size() - begin);
    ChangeList list;
    for (size_t i = 0; i < count; ++i) {
      list.entry[i] = static_cast<int32_t>(changes[begin + i].entry);
      list.value[i] = changes[begin + i].value;
    }
    update_entries<<<static_cast<unsigned>(ceil_div(static_cast<int64_t>(count), 128)), 128, 0,
                     stream>>>(tables, list, static_cast<int>(count));
    check_launch("update_entries");
  }
}

}  // namespace oomb::offload
