#include "attention/cpu/tile_kernels.inl"

namespace oomb::attention::cpu {

InstructionSet avx512_instruction_set() { return make_instruction_set<64, 8>("avx512"); }

}  // namespace oomb::attention::cpu
