// From the sums of a block's 16 outputs to what a call returns; for files named *_kernel.cc, once per instruction set.
#ifndef POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_FINISH_H_
#define POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_FINISH_H_

#include "common/simd.h"
#include "packed_linear/packed_linear.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

constexpr int kParts = 16 / kLanes;  // vectors of floats for the 16 outputs

// The hardware's prefetchers stop at every 4 KiB page; asking ahead reads memory faster. Past the end it does nothing.
constexpr int64_t kPrefetchBytes = 2048;

template <typename T>
void StoreRow(const PackedLinearArgs& a, int64_t m, int64_t o, const Vec* sums) {
  T* const out = static_cast<T*>(a.out) + m * a.out_features + o;
  for (int p = 0; p < kParts; ++p) {
    const int64_t left = a.out_features - o - p * kLanes;
    if (left <= 0) return;
    StorePartial(out + p * kLanes, sums[p], static_cast<int>(left < kLanes ? left : kLanes));
  }
}

template <typename T>
void AddBias(const PackedLinearArgs& a, int64_t o, Vec* sums) {
  const T* const bias = static_cast<const T*>(a.bias) + o;
  for (int p = 0; p < kParts; ++p) {
    const int64_t left = a.out_features - o - p * kLanes;
    if (left <= 0) return;
    sums[p] = Add(sums[p], LoadPartial(bias + p * kLanes, static_cast<int>(left < kLanes ? left : kLanes)));
  }
}

void Finish(const PackedLinearArgs& a, int64_t m, int64_t o, Vec* sums) {
  if (a.bias != nullptr) {
    switch (a.x_dtype) {
      case DType::kFloat32:
        AddBias<float>(a, o, sums);
        break;
      case DType::kBfloat16:
        AddBias<Bfloat16>(a, o, sums);
        break;
      case DType::kFloat16:
        AddBias<Float16>(a, o, sums);
        break;
    }
  }
  switch (a.out_dtype) {
    case DType::kFloat32:
      return StoreRow<float>(a, m, o, sums);
    case DType::kBfloat16:
      return StoreRow<Bfloat16>(a, m, o, sums);
    case DType::kFloat16:
      return StoreRow<Float16>(a, m, o, sums);
  }
}

}  // namespace
}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_PACKED_LINEAR_PACKED_LINEAR_FINISH_H_
