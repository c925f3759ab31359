#pragma once

// The part of the DLPack binary interface (major version 1) that is read here.

#include <cstdint>

namespace oomb::bindings::dlpack {

constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;
constexpr uint8_t kInt = 0;
constexpr uint8_t kUInt = 1;
constexpr uint8_t kFloat = 2;
constexpr uint8_t kBFloat = 4;

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_index;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};

// A capsule "dltensor" holds one of these; who does not take it over leaves it to the capsule.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*release)(ManagedTensor*);
};

// The table of functions behind the type attribute __dlpack_c_exchange_api__.
struct ExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  ExchangeApi* previous;
  void (*allocate)();
  void (*from_object)();
  void (*to_object)();
  int (*view_of_object)(void* object, Tensor* view);  // non-owning; sets a Python error on failure
  void (*current_stream)();
};

}  // namespace oomb::bindings::dlpack
