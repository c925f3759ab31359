#pragma once

// Tensors of any library that speaks DLPack, without its headers. The view is not owning: it is
// good while the Python argument lives, which is the whole call.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "common/dtype.h"

namespace oomb::bindings {

struct Device {
  bool cuda = false;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};
std::string name_of(const Device& device);

// Element types that appear in a signature; the first four have a DType.
enum class Element : int32_t { kFloat64, kFloat32, kFloat16, kBFloat16, kInt32, kUInt8, kOther };
const char* name_of(Element element);
Element element_of(DType dtype);

struct Tensor {
  static constexpr int kMaxDims = 6;
  const char* name = "";  // of the argument
  void* data = nullptr;
  Device device;
  Element element = Element::kOther;
  int ndim = 0;
  std::array<int64_t, kMaxDims> shape{};
  std::array<int64_t, kMaxDims> strides{};  // in elements

  DType dtype() const;  // refuses integers
};

// Sizes of a tensor's dimensions, kAny where any will do.
struct Extents {
  static constexpr int64_t kAny = -1;
  Extents(std::initializer_list<int64_t> values) : ndim(static_cast<int>(values.size())) {
    std::copy(values.begin(), values.end(), sizes.begin());
  }
  std::array<int64_t, Tensor::kMaxDims> sizes{};
  int ndim;
};

// What a tensor must look like, checked in this order: ndim, device, dtype, shape, strides.
struct Expected {
  Extents shape;
  Device device;
  Element element = Element::kOther;
  bool contiguous = false;    // else only the last dimension
  bool strided_rows = false;  // contiguous but for the first dimension, a slice of a wider table
};
void check(const Tensor& tensor, const Expected& expected);

// The tensor behind an argument; refuses what is none, and other numbers of dimensions.
Tensor to_tensor(pybind11::handle object, const char* name, int ndim);

// Null pointer where the argument is None.
std::optional<Tensor> to_optional_tensor(pybind11::handle object, const char* name, int ndim);

}  // namespace oomb::bindings
