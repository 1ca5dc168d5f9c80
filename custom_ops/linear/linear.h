// y = x W^T + b for a few rows of x, as in a decode step.
//
//   y[m, o] = sum_i x[m, i] * weight[o, i] + bias[o]            sums in float32
//
// Bound by reading the weight once: O * I * sizeof(weight) bytes.
#ifndef POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_H_
#define POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_H_

#include <cstdint>

#include "common/dtype.h"

namespace poptransformer {

constexpr int64_t kMaxLinearRows = 8;  // of x; more only for bfloat16 x and weight where HasTiles() (common/tile_product.h)

// Buffers are dense and row-major.
struct LinearArgs {
  int64_t num_rows;      // M
  int64_t in_features;   // I
  int64_t out_features;  // O
  DType x_dtype;         // of x and bias
  DType weight_dtype;
  DType out_dtype;
  const void* x;         // [M, I]
  const void* weight;    // [O, I]
  const void* bias;      // [O] or null
  void* out;             // [M, O]
};

void Linear(const LinearArgs& args);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_H_
