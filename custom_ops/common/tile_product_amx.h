// The pieces of tile_product that are compiled for AVX-512 with AMX.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_

#include <cstdint>

#include "common/tile_product.h"

namespace poptransformer {
namespace amx {

constexpr int64_t kRowBlock = 32;  // rows of x that are multiplied together

// Rows begin .. end of x as bfloat16, in tiles [M / 16, steps, 16, 32], zeros past I and past M: rows that lie a multiple of 4 KiB
// apart would push each other out of the first-level cache.
void RoundRows(const TileProductArgs& args, Bfloat16* rows, int64_t begin, int64_t end);

// out[:, 16 * block .. 16 * (block + num_blocks)), one or two blocks, from their panels and all rounded rows, of which there are
// whole blocks. `sums` has room for 32 * 32 floats.
void MultiplyPanels(const TileProductArgs& args, const Bfloat16* rows, int64_t block, int64_t num_blocks,
                    const Bfloat16* panels, float* sums);

}  // namespace amx
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_
