// Working memory that a thread keeps between calls, so that a kernel allocates nothing once it is warm.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_SCRATCH_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_SCRATCH_H_

#include <cstdint>

namespace poptransformer {

// At least num_floats floats of this thread's own, aligned to 64 bytes, contents unspecified. The next call on the same
// thread gives the same memory. A kernel that needs several pieces asks once and cuts.
float* ThreadScratch(int64_t num_floats);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_SCRATCH_H_
