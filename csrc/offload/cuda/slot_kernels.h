#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "memory/slot_pool.h"
#include "paging/copy_engine.h"

namespace oomb::offload {

// Small kernels on slots and tables. What they work on travels as kernel parameters: a copy of a
// few bytes to the device would wait behind every page on its way there.

void launch_fill(std::byte* pool, int64_t slot_bytes, std::span<const memory::Slot> slots,
                 uint8_t value, cudaStream_t stream);

// Copies `bytes` bytes between memory and slots, as CopyEngine::pack and unpack.
void launch_pack(std::byte* pool, int64_t slot_bytes, std::span<const memory::Slot> slots,
                 const std::byte* source, int64_t bytes, cudaStream_t stream);
void launch_unpack(const std::byte* pool, int64_t slot_bytes, std::span<const memory::Slot> slots,
                   std::byte* target, int64_t bytes, cudaStream_t stream);

void launch_table_update(int32_t* tables, std::span<const paging::TableChange> changes,
                         cudaStream_t stream);

// Copies a few words between the device and mapped host memory, either way: a copy by the copy
// engines would wait behind every page that is on its way.
void launch_copy_mapped(const int32_t* source, int32_t* destination, int64_t count,
                        cudaStream_t stream);

// Keeps the stream busy for about this many clock cycles (tests).
void launch_spin(int64_t cycles, cudaStream_t stream);

}  // namespace oomb::offload
