#pragma once

#include <cstddef>
#include <cstdint>

namespace oomb::memory {

// Takes the pages of a fresh private mapping, which the system only does when they are touched for
// the first time; that costs far more than the write. Done by `threads` threads: each takes one
// huge page, then the next that is left, so a slow one holds nobody up. `populate`: by asking the
// system for it, where it can be asked, instead of by writing.
void take_pages(std::byte* begin, int64_t bytes, int threads, bool populate);

}  // namespace oomb::memory
