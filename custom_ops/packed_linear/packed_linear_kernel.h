// The pieces of packed_linear that are compiled once per instruction set; packed_linear_cpu.cc cuts a call into them.
#ifndef POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_KERNEL_H_
#define POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_KERNEL_H_

#include <cstdint>

#include "packed_linear/packed_linear.h"

namespace poptransformer {

// Quantised x.
struct QuantizedRows {
  int8_t* codes;        // [M, 32 * units], zeros past I
  float* scales;        // [M, units]
  int32_t* offsets;     // [M, units]: -128 * sum of the unit's codes, what the offset of int8 weights takes away
  float* group_sums;    // [M, groups]: sum of scale * code, what the minimums are multiplied by
};

struct PackedLinearKernels {
  // Rows begin .. end of x.
  void (*quantize)(const PackedLinearArgs&, const QuantizedRows&, int64_t begin, int64_t end);
  // out[:, 16 * begin .. 16 * end) for blocks of 16 outputs.
  void (*blocks)(const PackedLinearArgs&, const QuantizedRows&, int64_t begin, int64_t end);
};

// Those that this process runs.
PackedLinearKernels ActivePackedLinear();

// Floats of memory that the quantised x of a call takes, and its parts in such memory, which is aligned to 64 bytes.
int64_t QuantizedFloats(const PackedLinearArgs& args);
QuantizedRows CutQuantized(const PackedLinearArgs& args, float* memory);

namespace avx512 {  // with VNNI
PackedLinearKernels PackedLinear();
}
namespace avx2 {
PackedLinearKernels PackedLinear();
}
namespace portable {
PackedLinearKernels PackedLinear();
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_KERNEL_H_
