// The pieces of tiled programs that are compiled for AVX-512 with AMX.
#ifndef POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_AMX_H_
#define POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_AMX_H_

#include "step_program/step_program_kernel.h"

namespace poptransformer {
namespace amx {

// As ProgramKernels::finish, also into tiles.
void Finish(const FinishArgs& args);

}  // namespace amx
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_AMX_H_
