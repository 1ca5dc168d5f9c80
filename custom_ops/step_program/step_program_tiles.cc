#include "step_program/step_program_tiles.h"

#include <algorithm>
#include <cstdlib>

#include "common/tile_product.h"

#if defined(POPTRANSFORMER_BUILDS_AMX)
#include "common/tile_product_amx.h"
#include "linear/linear_amx.h"
#include "packed_linear/packed_linear.h"
#include "packed_linear/packed_linear_amx.h"
#include "step_program/step_program_amx.h"
#endif

namespace poptransformer {
namespace {

int64_t CeilDivide(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }

constexpr int64_t kTaskOutputs = 2 * kPanelOutputs;

}  // namespace

int64_t TileFloats(int64_t num_rows, int64_t width) {
  return CeilDivide(num_rows, kRowsPerTask) * kRowsPerTask * CeilDivide(width, kTileInputs) * kTileInputs / 2;
}

int64_t NumTileTasks(const Step& s) { return CeilDivide(s.width, kTaskOutputs); }

#if defined(POPTRANSFORMER_BUILDS_AMX)

static_assert(kRowsPerTask == amx::kRowBlock);

namespace {

constexpr int64_t kSums = amx::kRowBlock * kTaskOutputs;

int64_t PanelFloats(const Matrix& w) { return CeilDivide(w.in_features, kTileInputs) * kTileInputs * kPanelOutputs / 2; }

void FillPanels(const Matrix& w, int64_t first_block, int64_t num_blocks, Bfloat16* panels) {
  const int64_t panel_size = 2 * PanelFloats(w);
  if (w.bits) {
    PackedLinearArgs a;
    a.in_features = w.in_features;
    a.out_features = w.out_features;
    a.bits = w.bits;
    a.is_float8 = false;
    a.units_per_group = w.units_per_group;
    a.block_bytes = w.block_bytes;
    a.weight = static_cast<const uint8_t*>(w.data);
    for (int64_t i = 0; i < num_blocks; ++i) amx::FillPackedPanel(&a, first_block + i, panels + i * panel_size);
  } else {
    const BfloatMatrix matrix{static_cast<const Bfloat16*>(w.data), w.out_features, w.in_features};
    for (int64_t i = 0; i < num_blocks; ++i) amx::FillPanel(&matrix, first_block + i, panels + i * panel_size);
  }
}

void FinishSums(const void* context, int64_t first_row, int64_t num_rows, int64_t first_output, int64_t num_outputs,
                const float* sums) {
  const Step& s = *static_cast<const Step*>(context);
  FinishArgs a;
  a.num_rows = num_rows;
  a.width = num_outputs;
  a.first = first_output;
  const Rows factors{const_cast<float*>(sums) + kSums, kTaskOutputs};
  if (s.multiply.data) {
    if (s.multiply.bias.data) {
      a.sums = a.out = factors;
      a.bias = s.multiply.bias;
      amx::Finish(a);
    }
    a.factors = factors;
  }
  a.function = s.function;
  a.sums = {const_cast<float*>(sums), kTaskOutputs};
  a.bias = s.matrix.bias;
  if (s.other.data) a.residual = {s.other[first_row] + first_output, s.other.stride};
  if (s.out_tiles) {
    a.tiles = s.out_tiles + 2 * TileFloats(first_row, s.width) + first_output * 16;
    a.tile_stride = s.width * 16;
  } else {
    a.out = {s.out[first_row] + first_output, s.out.stride};
  }
  amx::Finish(a);
}

}  // namespace

void RoundBlock(const Step& s, const ProgramKernels& kernels, int64_t num_rows, int64_t block, float* scratch) {
  const int64_t first = block * kRowsPerTask, count = std::min(kRowsPerTask, num_rows - first);
  Rows x{s.in[first], s.in.stride};
  if (s.norm.kind != NormKind::kNone) {
    for (int64_t m = 0; m < count; ++m) kernels.norm(s.norm, x[m], s.width, scratch + m * s.width);
    x = {scratch, s.width};
  }
  amx::RoundRows(x.data, DType::kFloat32, x.stride, count, s.width, s.tiles + 2 * TileFloats(first, s.width), 0, kRowsPerTask);
}

int64_t TileScratchFloats(const Step& s) { return (s.multiply.data ? 2 : 1) * (kSums + 2 * PanelFloats(s.matrix)); }

void MultiplyTiles(const Step& s, int64_t num_rows, int64_t task, float* scratch) {
  const int64_t num_matrices = s.multiply.data ? 2 : 1;
  float* const sums = scratch;
  Bfloat16* const panels = reinterpret_cast<Bfloat16*>(sums + num_matrices * kSums);
  const int64_t block = 2 * task, num_steps = CeilDivide(s.matrix.in_features, kTileInputs);
  const int64_t num_blocks = (block + 1) * kPanelOutputs < s.width ? 2 : 1;
  FillPanels(s.matrix, block, num_blocks, panels);
  if (s.multiply.data) FillPanels(s.multiply, block, num_blocks, panels + 2 * num_blocks * PanelFloats(s.matrix));
  amx::MultiplyPanels(s.tiles, num_steps, num_rows, s.width, block, num_blocks, num_matrices, panels, FinishSums, &s, sums);
}

#else

void RoundBlock(const Step&, const ProgramKernels&, int64_t, int64_t, float*) { std::abort(); }
int64_t TileScratchFloats(const Step&) { std::abort(); }
void MultiplyTiles(const Step&, int64_t, int64_t, float*) { std::abort(); }

#endif

}  // namespace poptransformer
