// What tiled programs do to many rows at once: rounding to tiles, products of panels, see common/tile_product.h.
#ifndef POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_TILES_H_
#define POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_TILES_H_

#include <cstdint>

#include "step_program/step_program.h"
#include "step_program/step_program_kernel.h"

namespace poptransformer {

constexpr int64_t kRowsPerTask = 32;  // a block of tiles

// Floats of the arena that M rows of `width` numbers take in tiles.
int64_t TileFloats(int64_t num_rows, int64_t width);

// A `round` step: rows 32 * block and the 31 after it. `scratch` has room for 32 rows of floats.
void RoundBlock(const Step& step, const ProgramKernels& kernels, int64_t num_rows, int64_t block, float* scratch);

// A `product` step in tasks of 32 outputs.
int64_t NumTileTasks(const Step& step);
int64_t TileScratchFloats(const Step& step);
void MultiplyTiles(const Step& step, int64_t num_rows, int64_t task, float* scratch);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_TILES_H_
