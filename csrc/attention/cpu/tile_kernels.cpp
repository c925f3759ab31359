#include "attention/cpu/tile_kernels.h"

#include <cstdlib>
#include <string>

#include "common/error.h"

namespace oomb::attention::cpu {
namespace {

InstructionSet choose() {
  const char* asked = std::getenv("OOMB_CPU_ISA");
  const std::string name = asked == nullptr ? "" : asked;
  const bool known = name.empty() || name == "generic" || name == "avx2" || name == "avx512";
  expect(known, "OOMB_CPU_ISA", "generic, avx2 or avx512", name);
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  expect(name != "avx2" || avx2, "OOMB_CPU_ISA", "an instruction set of this machine", name);
  expect(name != "avx512" || avx512, "OOMB_CPU_ISA", "an instruction set of this machine", name);
  if (name == "avx512" || (name.empty() && avx512)) return avx512_instruction_set();
  if (name == "avx2" || (name.empty() && avx2)) return avx2_instruction_set();
#endif
  return generic_instruction_set();
}

}  // namespace

const InstructionSet& chosen_instruction_set() {
  static const InstructionSet chosen = choose();
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
