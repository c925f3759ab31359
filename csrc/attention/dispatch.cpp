#include "attention/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <iostream>
#include <mutex>

#include "attention/kernels.h"
#include "attention/plain/kernels.h"
#include "attention/sm80/kernels.h"
#include "attention/sm90/kernels.h"
#include "common/error.h"

#if OOMB_WITH_CUDA
#include "attention/pages/pages.h"
#include "common/cuda_check.h"
#endif

namespace oomb::attention::cuda {
namespace {

// The first that take a call run it.
constexpr const Kernels* kPreference[] = {
    &sm90::kKernels,
    &sm80::kKernels,
    &sm80::kSmallKernels,
    &plain::kKernels,
};

struct Settings {
  std::mutex mutex;
  const Kernels* forced = nullptr;
  std::function<void(const std::string&)> warning_hook = [](const std::string& text) {
    std::cerr << "oomb: " << text << '\n';
  };
  std::atomic<bool> warned = false;

  Settings() {
    const char* name = std::getenv("OOMB_ATTENTION");
    if (name != nullptr && *name != '\0') forced = &kernels_named(kPreference, name);
  }
};

Settings& settings() {
  static Settings instance;
  return instance;
}

}  // namespace

void force(const std::optional<std::string>& name) {
  const Kernels* kernels = name ? &kernels_named(kPreference, *name) : nullptr;
  const std::lock_guard lock(settings().mutex);
  settings().forced = kernels;
}

int64_t key_tile() { return common_key_tile(kPreference); }

std::vector<int64_t> fast_page_sizes() { return attention::fast_page_sizes(kPreference); }

int64_t padded_head_dim(int64_t head_dim, int capability) {
  return attention::padded_head_dim(kPreference, head_dim, capability);
}

void set_warning_hook(std::function<void(const std::string&)> hook) {
  const std::lock_guard lock(settings().mutex);
  settings().warning_hook = std::move(hook);
}

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

// Four tiles of whole rows have to fit into shared memory.
int64_t largest_head_dim(DType dtype) { return dtype == DType::kFloat64 ? 256 : 512; }

void check_shape(const Shape& shape, int64_t largest) {
  expect(shape.head_dim >= 1 && shape.head_dim <= largest, "head_dim", concat("1 to ", largest),
         shape.head_dim);
  expect(shape.page_size >= 1, "page_size", "at least 1", shape.page_size);
  expect(shape.kv_heads >= 1 && shape.query_heads % shape.kv_heads == 0, "query_heads",
         concat("a multiple of the ", shape.kv_heads, " kv heads"), shape.query_heads);
}

void warn_once(const Shape& shape, DType dtype, double cap) {
  if (settings().warned.exchange(true)) return;
  std::function<void(const std::string&)> hook;
  {
    const std::lock_guard lock(settings().mutex);
    hook = settings().warning_hook;
  }
  if (hook) {
    hook(concat("attention with ", describe(shape, dtype, cap),
                " has no fast kernel on this GPU: the plain one runs, which is correct and slow. "
                "Fast ones take: ",
                describe_fast(kPreference)));
  }
}

template <typename Params>
const Kernels& choose(const Params& params, bool warn) {
  check_shape(params.shape, largest_head_dim(params.dtype));
  const int device = device_of(params.q);
  check_device(device);
  const Kernels* forced = nullptr;
  {
    const std::lock_guard lock(settings().mutex);
    forced = settings().forced;
  }
  const Kernels& chosen = choose_kernels(kPreference, params, compute_capability(device), forced);
  if (warn && chosen.fast_for == nullptr && forced == nullptr)
    warn_once(params.shape, params.dtype, params.cap);
  return chosen;
}

template <typename Params>
void run(const Params& params) {
  const Kernels& kernels = choose(params, true);
  const DeviceGuard guard(device_of(params.q));
  kernels.run(params);
}

template <typename Params>
int64_t workspace_bytes(const Params& params) {
  const Kernels& kernels = choose(params, false);
  const DeviceGuard guard(device_of(params.q));
  return kernels.workspace_bytes(params);
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

void forward(const ForwardParams& params) { run(params); }
void backward(const BackwardParams& params) { run(params); }
int64_t forward_workspace_bytes(const ForwardParams& params) { return workspace_bytes(params); }
int64_t backward_workspace_bytes(const BackwardParams& params) { return workspace_bytes(params); }

void page_write(const PageWriteParams& params) {
  check_shape(params.shape, largest_head_dim(params.dtype));
  on_device_of(params.k, pages::page_write, params);
}

void page_gradient_read(const PageGradientReadParams& params) {
  check_shape(params.shape, largest_head_dim(params.dtype));
  on_device_of(params.dk, pages::page_gradient_read, params);
}

void page_score(const PageScoreParams& params) {
  check_shape(params.shape, 1024);  // bounds of keys have twice their head dim
  on_device_of(params.q, pages::page_score, params);
}

int64_t page_score_workspace_bytes(const PageScoreParams& params) {
  const DeviceGuard guard(device_of(params.q));
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
