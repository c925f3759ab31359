#pragma once

// What one launch of the sm_90a forward kernel receives, by value.

#include <cuda.h>

#include <cstdint>

#include "attention/params.h"

namespace oomb::attention::sm90 {

struct ForwardArgs {
  CUtensorMap q_map, k_map, v_map;  // own chunk: (d, token, head, batch)
  CUtensorMap pool_map;             // pages: (d, row)

  const int32_t* block_table;
  const int32_t* selection;
  const int32_t* first_key;
  const int32_t* num_keys;
  int64_t table_stride;
  int32_t selection_heads, budget;
  int32_t rows_per_slot, num_slots;

  int32_t batch, query_heads, kv_heads, group;
  int32_t chunk, num_past;
  int32_t num_pages;             // ceil(num_past / page size)
  int32_t page_begin, page_end;  // of this wave, within the past
  int32_t window;

  int32_t blocks;  // query blocks: ceil(chunk / page size)
  int32_t units;   // set by the launcher
  bool heads_outermost;
  bool own_chunk, first_wave, last_wave;

  float scale, scale_log2;
  float* acc;
  float* max;
  float* sum;
  void* o;
  float* lse;
  Strides o_strides;
};

// One launcher per (head dim, page size), each in a file of its own.
void launch_forward_d64_p64(const ForwardArgs& args, void* stream);
void launch_forward_d64_p128(const ForwardArgs& args, void* stream);
void launch_forward_d128_p64(const ForwardArgs& args, void* stream);
void launch_forward_d128_p128(const ForwardArgs& args, void* stream);
void launch_forward_d256_p64(const ForwardArgs& args, void* stream);
void launch_forward_d256_p128(const ForwardArgs& args, void* stream);

}  // namespace oomb::attention::sm90
