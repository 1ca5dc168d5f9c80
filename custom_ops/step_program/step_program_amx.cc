#include "step_program/step_program_amx.h"

#include "step_program/row_functions.h"

namespace poptransformer {
namespace amx {

void Finish(const FinishArgs& args) { FinishProduct<true>(args); }

}  // namespace amx
}  // namespace poptransformer
