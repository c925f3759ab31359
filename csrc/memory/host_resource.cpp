#include "memory/host_resource.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/bytes.h"
#include "common/error.h"
#include "common/math.h"

namespace oomb::memory {

HostResource::HostResource(int64_t capacity) : capacity_(align_up(capacity, kGranularity)) {
  if (capacity_ == 0) return;
  void* range = mmap(nullptr, static_cast<size_t>(capacity_), PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) {
    throw OutOfMemory(
        concat("no address range of ", human_bytes(capacity_), ": ", std::strerror(errno)),
        capacity_, 0);
  }
  base_ = static_cast<std::byte*>(range);
}

HostResource::~HostResource() {
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(capacity_));
}

void HostResource::commit(int64_t bytes) {
  if (bytes > capacity_) {
    throw OutOfMemory(
        concat("a range of ", human_bytes(capacity_), " cannot hold ", human_bytes(bytes)), bytes,
        capacity_);
  }
  const int64_t target = std::min(align_up(bytes, kGranularity), capacity_);
  if (target <= committed_) return;
  const auto grown = static_cast<size_t>(target - committed_);
  if (mprotect(base_ + committed_, grown, PROT_READ | PROT_WRITE) != 0) {
    throw OutOfMemory(concat("host memory: needed ", human_bytes(static_cast<int64_t>(grown)),
                             " more beside ", human_bytes(committed_), ": ", std::strerror(errno)),
                      static_cast<int64_t>(grown), 0);
  }
  committed_ = target;
}

void HostResource::release() {
  if (committed_ == 0) return;
  // MADV_DONTNEED hands the pages back at once; PROT_NONE makes a stale pointer fault.
  madvise(base_, static_cast<size_t>(committed_), MADV_DONTNEED);
  mprotect(base_, static_cast<size_t>(committed_), PROT_NONE);
  committed_ = 0;
}

}  // namespace oomb::memory
