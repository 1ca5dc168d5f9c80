// A bfloat16 matrix as tile_product wants it.
#ifndef POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_AMX_H_
#define POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_AMX_H_

#include <cstdint>

#include "common/tile_product.h"

namespace poptransformer {

struct BfloatMatrix {
  const Bfloat16* values;  // [O, I]
  int64_t out_features, in_features;
};

namespace amx {
// TileProductArgs::fill_panel for a BfloatMatrix.
void FillPanel(const void* weights, int64_t block, Bfloat16* panel);
}  // namespace amx

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_AMX_H_
