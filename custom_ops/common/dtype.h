// Element types that the kernels read and write; sums are always float32.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_DTYPE_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_DTYPE_H_

#include <cstdint>

namespace poptransformer {

enum class DType { kFloat32, kBfloat16, kFloat16 };

// The bits alone: arithmetic happens in float32, see simd.h.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr int64_t ByteWidth(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_DTYPE_H_
