#include "attention/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <mutex>

#include "common/error.h"

#if OOMB_WITH_CUDA
#include "attention/pages/pages.h"
#include "attention/plain/plain.h"
#include "attention/sm80/sm80.h"
#include "attention/sm90/backward.h"
#include "attention/sm90/forward.h"
#include "common/cuda_check.h"
#endif

namespace oomb::attention::cuda {
namespace {

struct Settings {
  std::mutex mutex;
  std::optional<Implementation> forced;
  std::function<void(const std::string&)> warning_hook = [](const std::string& text) {
    std::cerr << "oomb: " << text << '\n';
  };
  std::atomic<bool> warnings = true;
  std::atomic<bool> warned = false;

  Settings() {
    const char* name = std::getenv("OOMB_ATTENTION");
    if (name != nullptr && *name != '\0') forced = implementation_from(name);
  }
};

Settings& settings() {
  static Settings instance;
  return instance;
}

}  // namespace

const char* name_of(Implementation implementation) {
  switch (implementation) {
    case Implementation::kSm90: return "sm90";
    case Implementation::kSm80: return "sm80";
    case Implementation::kPlain: return "plain";
  }
  return "unknown";
}

Implementation implementation_from(const std::string& name) {
  for (const auto candidate :
       {Implementation::kSm90, Implementation::kSm80, Implementation::kPlain}) {
    if (name == name_of(candidate)) return candidate;
  }
  throw InvalidArgument(concat("OOMB_ATTENTION: expected sm90, sm80 or plain, got ", name));
}

void force(std::optional<Implementation> implementation) {
  const std::lock_guard lock(settings().mutex);
  settings().forced = implementation;
}

std::optional<Implementation> forced() {
  const std::lock_guard lock(settings().mutex);
  return settings().forced;
}

void set_warning_hook(std::function<void(const std::string&)> hook) {
  const std::lock_guard lock(settings().mutex);
  settings().warning_hook = std::move(hook);
}

void set_warnings(bool wanted) { settings().warnings = wanted; }

#if OOMB_WITH_CUDA

namespace {

int device_of(const void* pointer) {
  cudaPointerAttributes attributes{};
  if (pointer != nullptr) {
    check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeDevice) return attributes.device;
  }
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  return current;
}

int compute_capability(int device) {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "cudaDeviceGetAttribute");
  return major * 10 + minor;
}

void check_device(int device) {
  const int capability = compute_capability(device);
  expect(capability >= 80, "device", "a GPU of compute capability 8.0 or newer",
         concat("cuda:", device, " of ", capability / 10, ".", capability % 10));
}

void check_shape(const Shape& shape) {
  expect(shape.head_dim >= 1 && shape.head_dim <= 256, "head_dim", "1 to 256", shape.head_dim);
  expect(shape.page_size >= 1, "page_size", "at least 1", shape.page_size);
  expect(shape.kv_heads >= 1 && shape.query_heads % shape.kv_heads == 0, "query_heads",
         concat("a multiple of the ", shape.kv_heads, " kv heads"), shape.query_heads);
}

std::string describe(const Shape& shape, DType dtype) {
  return concat(oomb::name_of(dtype), ", head dim ", shape.head_dim, ", pages of ", shape.page_size,
                " tokens");
}

void warn_once(const Shape& shape, DType dtype) {
  if (!settings().warnings || settings().warned.exchange(true)) return;
  std::function<void(const std::string&)> hook;
  {
    const std::lock_guard lock(settings().mutex);
    hook = settings().warning_hook;
  }
  if (hook) {
    hook(
        concat("attention with ", describe(shape, dtype),
               " has no fast kernel on this GPU: the plain one runs, which is correct and slow. "
               "Fast ones take bfloat16 or float16, head dim 64, 96 or 128, and pages of 64 or 128 "
               "tokens"));
  }
}

bool takes(Implementation implementation, const ForwardParams& params, int capability) {
  switch (implementation) {
    case Implementation::kSm90: return capability / 10 == 9 && sm90::forward_supported(params);
    case Implementation::kSm80: return sm80::forward_supported(params);
    case Implementation::kPlain: return true;
  }
  return false;
}

bool takes(Implementation implementation, const BackwardParams& params, int capability) {
  switch (implementation) {
    case Implementation::kSm90: return capability / 10 == 9 && sm90::backward_supported(params);
    case Implementation::kSm80: return sm80::backward_supported(params);
    case Implementation::kPlain: return true;
  }
  return false;
}

template <typename Params>
Implementation choose(const Params& params, bool warn) {
  check_shape(params.shape);
  const int device = device_of(params.q);
  check_device(device);
  const int capability = compute_capability(device);
  if (const auto wanted = forced()) {
    expect(takes(*wanted, params, capability), "OOMB_ATTENTION",
           concat("an implementation that takes ", describe(params.shape, params.dtype),
                  " on compute capability ", capability / 10, ".", capability % 10),
           name_of(*wanted));
    return *wanted;
  }
  for (const auto candidate : {Implementation::kSm90, Implementation::kSm80}) {
    if (takes(candidate, params, capability)) return candidate;
  }
  if (warn) warn_once(params.shape, params.dtype);
  return Implementation::kPlain;
}

// Runs a page operation on the device that holds `pointer`.
template <typename Params>
void on_device_of(const void* pointer, void (*operation)(const Params&), const Params& params) {
  const int device = device_of(pointer);
  check_device(device);
  const DeviceGuard guard(device);
  operation(params);
}

}  // namespace

Implementation implementation_of(const ForwardParams& params) { return choose(params, false); }
Implementation implementation_of(const BackwardParams& params) { return choose(params, false); }

void forward(const ForwardParams& params) {
  const Implementation implementation = choose(params, true);
  const DeviceGuard guard(device_of(params.q));
  switch (implementation) {
    case Implementation::kSm90: return sm90::forward(params);
    case Implementation::kSm80: return sm80::forward(params);
    case Implementation::kPlain: return plain::forward(params);
  }
}

void backward(const BackwardParams& params) {
  const Implementation implementation = choose(params, true);
  const DeviceGuard guard(device_of(params.q));
  switch (implementation) {
    case Implementation::kSm90: return sm90::backward(params);
    case Implementation::kSm80: return sm80::backward(params);
    case Implementation::kPlain: return plain::backward(params);
  }
}

int64_t forward_workspace_bytes(const ForwardParams& params) {
  if (choose(params, false) != Implementation::kSm80) return 0;
  const DeviceGuard guard(device_of(params.q));
  return sm80::forward_workspace_bytes(params);
}

int64_t backward_workspace_bytes(const BackwardParams& params) {
  const Implementation implementation = choose(params, false);
  const DeviceGuard guard(device_of(params.q));
  switch (implementation) {
    case Implementation::kSm90: return sm90::backward_workspace_bytes(params);
    case Implementation::kSm80: return sm80::backward_workspace_bytes(params);
    case Implementation::kPlain: return plain::backward_workspace_bytes(params);
  }
  return 0;
}

void page_write(const PageWriteParams& params) {
  check_shape(params.shape);
  on_device_of(params.k, pages::page_write, params);
}

void page_gradient_read(const PageGradientReadParams& params) {
  check_shape(params.shape);
  on_device_of(params.dk, pages::page_gradient_read, params);
}

void page_score(const PageScoreParams& params) {
  check_shape(params.shape);
  on_device_of(params.q, pages::page_score, params);
}

int64_t page_score_workspace_bytes(const PageScoreParams& params) {
  return pages::page_score_workspace_bytes(params);
}

void page_select(const PageSelectParams& params) {
  on_device_of(params.scores, pages::page_select, params);
}

#else

namespace {

[[noreturn]] void no_cuda() {
  throw Error(
      "attention on a CUDA tensor: this build of oomb has no CUDA support; install it again with "
      "OOMB_CUDA=on");
}

}  // namespace

Implementation implementation_of(const ForwardParams&) { no_cuda(); }
Implementation implementation_of(const BackwardParams&) { no_cuda(); }
void forward(const ForwardParams&) { no_cuda(); }
void backward(const BackwardParams&) { no_cuda(); }
int64_t forward_workspace_bytes(const ForwardParams&) { no_cuda(); }
int64_t backward_workspace_bytes(const BackwardParams&) { no_cuda(); }
void page_write(const PageWriteParams&) { no_cuda(); }
void page_gradient_read(const PageGradientReadParams&) { no_cuda(); }
void page_score(const PageScoreParams&) { no_cuda(); }
int64_t page_score_workspace_bytes(const PageScoreParams&) { no_cuda(); }
void page_select(const PageSelectParams&) { no_cuda(); }

#endif

}  // namespace oomb::attention::cuda
