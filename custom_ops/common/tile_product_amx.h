// The pieces of tile_product that are compiled for AVX-512 with AMX.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_

#include <cstdint>

#include "common/tile_product.h"

namespace poptransformer {
namespace amx {

constexpr int64_t kRowBlock = 32;  // rows of x that are multiplied together

using FinishSums = void (*)(const void* context, int64_t first_row, int64_t num_rows, int64_t first_output, int64_t num_outputs,
                            const float* sums);

void RoundRows(const void* x, DType dtype, int64_t stride, int64_t num_rows, int64_t in_features, Bfloat16* rows, int64_t begin,
               int64_t end);

void MultiplyPanels(const Bfloat16* rows, int64_t num_steps, int64_t num_rows, int64_t out_features, int64_t block,
                    int64_t num_blocks, const Bfloat16* panels, FinishSums finish, const void* context, float* sums);

}  // namespace amx
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_
