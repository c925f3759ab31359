#include "attention/cpu/tile_kernels.inl"

namespace oomb::attention::cpu {

InstructionSet generic_instruction_set() { return make_instruction_set<16, 4>("generic"); }

}  // namespace oomb::attention::cpu
