#pragma once

#include <cstddef>
#include <cstdint>

namespace oomb::memory {

// Takes the pages of a fresh private mapping, which the system only does when they are touched for
// the first time; that costs far more than the write. Done by `threads` threads: each takes one
// huge page, then the next that is left, so a slow one holds nobody up. By writing: to ask the
// system for it (MADV_POPULATE_WRITE) is several times slower where many threads do.
void take_pages(std::byte* begin, int64_t bytes, int threads);

}  // namespace oomb::memory
