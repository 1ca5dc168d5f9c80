// The piece of linear that is compiled once per instruction set; linear_cpu.cc cuts a call into them.
#ifndef POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_KERNEL_H_
#define POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_KERNEL_H_

#include <cstdint>

#include "linear/linear.h"

namespace poptransformer {

struct LinearKernels {
  // Floats between two rows of widened x, and how to make them: each row padded with zeros to whole vectors.
  int64_t (*x_stride)(const LinearArgs&);
  void (*widen_x)(const LinearArgs&, float* x);
  // out[:, begin .. end) from widened x.
  void (*outputs)(const LinearArgs&, const float* x, int64_t begin, int64_t end);
};

namespace avx512 {
LinearKernels Linear();
}
namespace avx2 {
LinearKernels Linear();
}
namespace portable {
LinearKernels Linear();
}

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_LINEAR_LINEAR_KERNEL_H_
