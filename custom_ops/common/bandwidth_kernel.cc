// Compiled once per instruction set, see simd.h.
#include "common/bandwidth_kernel.h"

#include "common/simd.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

float Sum(const float* data, int64_t num_floats) {
  constexpr int kAccumulators = 8;
  constexpr int kStep = kAccumulators * kLanes;
  static_assert(256 % kStep == 0, "the caller promises multiples of 256");
  Vec sums[kAccumulators];
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < kAccumulators; ++i) sums[i] = Zero();
  for (int64_t offset = 0; offset < num_floats; offset += kStep) {
    POPTRANSFORMER_UNROLL
    for (int i = 0; i < kAccumulators; ++i) sums[i] = Add(sums[i], Load(data + offset + i * kLanes));
  }
  for (int i = 1; i < kAccumulators; ++i) sums[0] = Add(sums[0], sums[i]);
  return ReduceAdd(sums[0]);
}

}  // namespace

SumFunction StreamingSum() { return Sum; }

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer
