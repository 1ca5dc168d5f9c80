// A packed matrix as tile_product wants it.
#ifndef POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_AMX_H_
#define POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_AMX_H_

#include "common/tile_product.h"

namespace poptransformer {
namespace amx {
// TileProductArgs::fill_panel for PackedLinearArgs: values of a block, rounded to bfloat16.
void FillPackedPanel(const void* weights, int64_t block, Bfloat16* panel);
}  // namespace amx
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_AMX_H_
