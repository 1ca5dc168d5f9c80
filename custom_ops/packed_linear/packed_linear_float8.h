// Products with e4m3 codes in float32; packed_linear.h has the meaning.
#ifndef POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_FLOAT8_H_
#define POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_FLOAT8_H_

#include <cstdint>

#include "packed_linear/packed_linear.h"

namespace poptransformer {

void PackedLinearFloat8(const PackedLinearArgs& args);

// The pieces that are compiled once per instruction set.
struct PackedLinearFloat8Kernels {
  // Rows begin .. end of x as `blocks` wants them, [M, 32 * units]: inputs 0, 2, 1, 3 of each four, zeros past I.
  void (*arrange)(const PackedLinearArgs&, int64_t begin, int64_t end, float* rows);
  // out[:, 16 * begin .. 16 * end) for blocks of 16 outputs.
  void (*blocks)(const PackedLinearArgs&, const float* rows, int64_t begin, int64_t end);
};

namespace avx512 {
PackedLinearFloat8Kernels PackedLinearFloat8();
}
namespace avx2 {
PackedLinearFloat8Kernels PackedLinearFloat8();
}
namespace portable {
PackedLinearFloat8Kernels PackedLinearFloat8();
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_FLOAT8_H_
