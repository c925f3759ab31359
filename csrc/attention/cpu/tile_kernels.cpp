#include "attention/cpu/tile_kernels.h"

#include <cstdlib>
#include <string>

#include "common/error.h"

namespace oomb::attention::cpu {

std::vector<InstructionSet> usable_instruction_sets() {
  std::vector<InstructionSet> usable;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) usable.push_back(avx512_instruction_set());
  if (avx2) usable.push_back(avx2_instruction_set());
#endif
  usable.push_back(generic_instruction_set());
  return usable;
}

InstructionSet instruction_set_named(const char* name) {
  const std::vector<InstructionSet> usable = usable_instruction_sets();
  if (name == nullptr || *name == '\0') return usable.front();
  std::string names;
  for (const InstructionSet& set : usable) {
    if (std::string(name) == set.name) return set;
    names += names.empty() ? set.name : std::string(", ") + set.name;
  }
  throw InvalidArgument(concat("OOMB_CPU_ISA: expected one of ", names, ", got ", name));
}

const InstructionSet& chosen_instruction_set() {
  static const InstructionSet chosen = instruction_set_named(std::getenv("OOMB_CPU_ISA"));
  return chosen;
}

template <>
const TileKernels<float>& tile_kernels<float>() {
  return chosen_instruction_set().single_precision;
}

template <>
const TileKernels<double>& tile_kernels<double>() {
  return chosen_instruction_set().double_precision;
}

}  // namespace oomb::attention::cpu
