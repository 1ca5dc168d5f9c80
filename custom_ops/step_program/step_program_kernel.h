// What the steps of a program do to rows, compiled once per instruction set; program_cpu.cc cuts the steps into tasks.
#ifndef POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_KERNEL_H_
#define POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_KERNEL_H_

#include <cstdint>

#include "step_program/step_program.h"

namespace poptransformer {

// out = function(sums + bias) * factors + residual, for rows of `width` numbers, outputs `first` and on of a product.
struct FinishArgs {
  Function function = Function::kNone;
  int64_t num_rows = 0, width = 0, first = 0;
  Rows sums, factors, residual;  // null for no factors, no residual
  Numbers bias;                  // of all outputs
  Rows out;
  Bfloat16* tiles = nullptr;     // in place of out: the first of two tiles of 16 rows, `tile_stride` numbers apart; width is 32
  int64_t tile_stride = 0;
};

struct ProgramKernels {
  // Numbers [first, first + n) to floats, and floats to numbers.
  void (*widen)(const Numbers& numbers, int64_t first, int64_t n, float* out);
  void (*narrow)(const float* in, int64_t n, DType dtype, void* out, int64_t first);
  void (*norm)(const Norm& norm, const float* x, int64_t n, float* out);
  // Row `row` of a packed matrix, in_features floats.
  void (*unpack_row)(const Matrix& matrix, int64_t row, float* out);
  void (*finish)(const FinishArgs& args);
  // A head: pairs turned by table = cosines [half], sines [half].
  void (*turn)(const float* x, int64_t dim, const float* table, int64_t half, bool is_interleaved, float* out);
  // out = function(a) or function(a, b); b may be null, then `number` stands for it.
  void (*map)(Function function, const float* a, const float* b, float number, int64_t n, float* out);
};

namespace avx512 {
ProgramKernels ProgramRows();
}
namespace avx2 {
ProgramKernels ProgramRows();
}
namespace portable {
ProgramKernels ProgramRows();
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_STEP_PROGRAM_KERNEL_H_
