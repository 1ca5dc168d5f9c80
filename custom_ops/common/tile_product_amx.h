// The pieces of tile_product that are compiled for AVX-512 with AMX.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_

#include <cstdint>

#include "common/tile_product.h"

namespace poptransformer {
namespace amx {

constexpr int64_t kRowBlock = 32;  // rows of x that are multiplied together

// Takes sums [32, 32] of each matrix, of rows first_row .. and outputs first_output ..; those beyond num_rows and num_outputs
// say nothing.
using FinishSums = void (*)(const void* context, int64_t first_row, int64_t num_rows, int64_t first_output, int64_t num_outputs,
                            const float* sums);

// Rows begin .. end of x [num_rows, in_features], `stride` numbers apart, as bfloat16, in tiles [M / 16, steps, 16, 32], zeros
// past in_features and num_rows: rows that lie a multiple of 4 KiB apart would push each other out of the first-level cache.
void RoundRows(const void* x, DType dtype, int64_t stride, int64_t num_rows, int64_t in_features, Bfloat16* rows, int64_t begin,
               int64_t end);

// Outputs 16 * block .. of out_features, one or two blocks of 16, of num_matrices weights of one size, from all rounded rows, of
// which there are whole blocks of 32. `panels` are those of the first matrix, then of the next; `sums` has room for 32 * 32 floats
// for each matrix.
void MultiplyPanels(const Bfloat16* rows, int64_t num_steps, int64_t num_rows, int64_t out_features, int64_t block,
                    int64_t num_blocks, int64_t num_matrices, const Bfloat16* panels, FinishSums finish, const void* context,
                    float* sums);

// FinishSums of TileProduct, whose arguments are the context: adds the bias, stores as out_dtype.
void StoreSums(const void* context, int64_t first_row, int64_t num_rows, int64_t first_output, int64_t num_outputs,
               const float* sums);

}  // namespace amx
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_AMX_H_
