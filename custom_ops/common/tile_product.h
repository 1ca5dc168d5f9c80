// y = x W^T + b for many rows of x, multiplied as bfloat16 by the CPU's tile unit (AMX), where there is one.
//
// x is rounded to bfloat16 once; whoever has the weights writes them, 16 outputs at a time, as a panel of bfloat16 in the order
// that the unit wants. Sums are float32. One pass over the weights, however many rows.
//
// How work is divided: runs of 32 outputs are tasks. A task has its two panels in the second-level cache and goes over all rows,
// 32 at a time, with four tiles of 16 x 16 sums.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_H_

#include <cstdint>

#include "common/dtype.h"

namespace poptransformer {

constexpr int64_t kPanelOutputs = 16;
constexpr int64_t kTileInputs = 32;  // of one step: a tile has 16 pairs of them

// Whether CPU, operating system and this build have bfloat16 tiles. Asks the system for leave to use them, once. The environment
// variable POPTRANSFORMER_ISA, set to anything but "amx", turns them off.
bool HasTiles();

struct TileProductArgs {
  int64_t num_rows;      // M
  int64_t in_features;   // I
  int64_t out_features;  // O
  DType x_dtype;         // of x and bias
  DType out_dtype;
  const void* x;         // [M, I]
  const void* bias;      // [O] or null
  void* out;             // [M, O]
  // Writes the weights of outputs 16 * block .. 16 * block + 15 as [steps, 16, 16, 2]: step of 32 inputs, pair, output, input of
  // the pair; zeros for outputs and inputs that are not there.
  void (*fill_panel)(const void* weights, int64_t block, Bfloat16* panel);
  const void* weights;

  int64_t num_steps() const { return (in_features + kTileInputs - 1) / kTileInputs; }
};

// Only where HasTiles().
void TileProduct(const TileProductArgs& args);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_TILE_PRODUCT_H_
