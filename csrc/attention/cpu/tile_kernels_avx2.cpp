#include "attention/cpu/tile_kernels.inl"

namespace oomb::attention::cpu {

InstructionSet avx2_instruction_set() { return make_instruction_set<32, 4>("avx2"); }

}  // namespace oomb::attention::cpu
