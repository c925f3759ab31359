#include <map>
#include <mutex>

#include "memory/cuda/cuda_call.h"
#include "memory/cuda/registration_context.h"

namespace oomb::memory {

namespace {

// Makes the context current to the calling thread for a scope.
class Current {
 public:
  Current(const ContextApi& api, CUcontext context) : api_(api), status_(api.push(context)) {}
  ~Current() {
    CUcontext popped = nullptr;
    if (status_ == CUDA_SUCCESS) api_.pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  CUresult status() const { return status_; }

 private:
  const ContextApi& api_;
  CUresult status_;
};

void check(const char* name, CUresult status) {
  if (status == CUDA_SUCCESS) return;
  throw CudaError(concat(name, " failed with driver error ", static_cast<int>(status)));
}

}  // namespace

std::shared_ptr<RegistrationContext> RegistrationContext::of(int device) {
  if (fault_due()) return nullptr;
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<RegistrationContext>> contexts;
  const std::lock_guard lock(mutex);
  std::weak_ptr<RegistrationContext>& known = contexts[device];
  std::shared_ptr<RegistrationContext> context = known.lock();
  if (context == nullptr) known = context = make(device);
  return context;
}

std::shared_ptr<RegistrationContext> RegistrationContext::make(int device) {
  const ContextApi* api = context_api();
  if (api == nullptr) return nullptr;
  CUcontext context = nullptr;
  if (api->create(&context, 0, device) != CUDA_SUCCESS) return nullptr;
  CUcontext popped = nullptr;
  api->pop(&popped);  // a new context is current to its maker
  return std::shared_ptr<RegistrationContext>(new RegistrationContext(*api, context));
}

RegistrationContext::~RegistrationContext() { api_.destroy(context_); }

void RegistrationContext::add(std::byte* begin, int64_t bytes) {
  if (fault_due()) throw CudaError("injected failure of cuMemHostRegister");
  const Current current(api_, context_);
  check("cuCtxPushCurrent", current.status());
  // Portable: page-locked for all contexts.
  check("cuMemHostRegister",
        api_.register_host(begin, static_cast<size_t>(bytes), CU_MEMHOSTREGISTER_PORTABLE));
}

void RegistrationContext::remove(std::byte* begin) noexcept {
  // A failure can only be that of a broken context, which has unpinned everything anyway.
  const Current current(api_, context_);
  if (current.status() == CUDA_SUCCESS) api_.unregister_host(begin);
}

}  // namespace oomb::memory
