#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_BANDWIDTH_KERNEL_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_BANDWIDTH_KERNEL_H_

#include <cstdint>

namespace poptransformer {

using SumFunction = float (*)(const float* data, int64_t num_floats);

// Sum of num_floats floats, a multiple of 256: wide loads into eight accumulators.
namespace avx512 {
SumFunction StreamingSum();
}
namespace avx2 {
SumFunction StreamingSum();
}
namespace portable {
SumFunction StreamingSum();
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_BANDWIDTH_KERNEL_H_
