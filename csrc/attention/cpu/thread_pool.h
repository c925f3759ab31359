#pragma once

#include <cstdint>
#include <functional>

namespace oomb::attention::cpu {

// Runs task(unit, thread) for every unit in [0, units): unit u on thread u % threads, whatever the
// load, so that a run repeats itself. Returns when all are done; the first exception is rethrown.
// Calls from several threads at once wait for each other. Usable after fork().
void parallel_for(int64_t units, int64_t threads,
                  const std::function<void(int64_t unit, int64_t thread)>& task);

}  // namespace oomb::attention::cpu
