#pragma once

#include <cstddef>
#include <cstdint>

namespace oomb::memory {

// Where the memory of one tier comes from: a contiguous address range of fixed extent whose memory
// arrives from the front in steps.
//
//     base()                    committed()                          capacity()
//     |======= usable ==========|-------- addresses only ------------|
//
// Resources are composed by wrapping: LimitedResource(StatisticsResource(HostResource)).
// An address once committed stays valid until release().
class MemoryResource {
 public:
  MemoryResource() = default;
  MemoryResource(const MemoryResource&) = delete;
  MemoryResource& operator=(const MemoryResource&) = delete;
  virtual ~MemoryResource() = default;

  virtual std::byte* base() const = 0;
  virtual int64_t capacity() const = 0;
  virtual int64_t committed() const = 0;
  // Bytes that take memory: what is committed, and what prepare() has had made beyond that.
  virtual int64_t ready() const { return committed(); }

  // The amounts commit() likes to be asked for are multiples of this.
  virtual int64_t granularity() const = 0;

  // Makes at least [0, bytes) usable; never shrinks. Throws OutOfMemory and changes nothing when
  // the memory is not to be had.
  virtual void commit(int64_t bytes) = 0;

  // Tells that [0, bytes) will be wanted before long, and no more than the latest call says; a
  // resource that is slow to grow begins now, or stops.
  virtual void prepare(int64_t) {}

  // Gives all memory back and keeps the address range.
  virtual void release() = 0;
  // False: release() only forgets; the memory goes with the resource.
  virtual bool gives_back() const { return true; }
};

}  // namespace oomb::memory
