// y = x W^T + b with a packed W: codes and a scale for each group; any number of rows of x.
//
//   y[m, o] = sum over groups g of  scale[o, g] * sum_{i in g} (code[o, i] - offset) * x[m, i]  +  minimum[o, g] * sum_{i in g} x[m, i]
//
// int8 has offset 128 and no minimums, int4 offset 0; fp8's codes are e4m3 floats (offset 0, no minimums, one group, none of them
// NaN). poptransformer/packing.py describes the bytes.
//
// For fp8 everything is float32. For the others x is quantised first, each 32 inputs to -127 .. 127 with a float32 scale of their own, so that the sums of codes are products
// of 8-bit integers, exact in 32 bits. Many rows on a CPU with tiles are multiplied as bfloat16 instead, x and W rounded to it
// (common/tile_product.h). A result does not depend on the other rows, but for whether they are few or many, nor on the threads;
// nor on the instruction set, but for tiles and for fused multiply-adds that the portable path may lack.
//
// For few rows bound by reading W once, ceil(O / 16) * block_bytes; for many by the rate of dot products.
#ifndef POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_H_
#define POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_H_

#include <cstdint>

#include "common/dtype.h"

namespace poptransformer {

constexpr int64_t kPackedBlockRows = 16;  // outputs that lie side by side
constexpr int64_t kPackedUnit = 32;       // inputs of a unit

// Buffers are dense and row-major.
struct PackedLinearArgs {
  int64_t num_rows;         // M
  int64_t in_features;      // I
  int64_t out_features;     // O
  int64_t bits;             // of a code: 8 or 4
  bool is_float8;           // codes are e4m3 floats, scales float32; else codes are integers, scales float16
  int64_t units_per_group;
  int64_t block_bytes;
  DType x_dtype;            // of x and bias
  DType out_dtype;
  const void* x;            // [M, I]
  const uint8_t* weight;    // [ceil(O / 16), block_bytes]
  const void* bias;         // [O] or null
  void* out;                // [M, O]

  int64_t num_units() const { return (in_features + kPackedUnit - 1) / kPackedUnit; }
  int64_t num_groups() const { return (num_units() + units_per_group - 1) / units_per_group; }
  int64_t code_bytes() const { return num_units() * kPackedUnit * kPackedBlockRows * bits / 8; }
  int64_t scale_bytes() const { return num_groups() * kPackedBlockRows * (is_float8 ? 4 : 2); }
};

void PackedLinear(const PackedLinearArgs& args);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_H_
