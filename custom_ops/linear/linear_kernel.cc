// Dot products of weight rows with all rows of x; compiled once per instruction set, see simd.h.
//
// A block of R weight rows and M rows of x keeps R * M sums in registers, so that each weight is loaded and widened once. While
// a block is computed, the same places of the next block are asked for: its rows follow in memory.
#include "linear/linear_kernel.h"

#include "common/simd.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

constexpr int kMaxSums = kLanes == 16 ? 16 : 8;  // of 32 or 16 vector registers
constexpr int BlockRows(int m) { return kMaxSums / m < 4 ? kMaxSums / m : 4; }

int64_t XStride(const LinearArgs& a) { return (a.in_features + kLanes - 1) / kLanes * kLanes; }

template <typename T>
void WidenRows(const LinearArgs& a, float* x) {
  const int64_t stride = XStride(a);
  for (int64_t m = 0; m < a.num_rows; ++m) {
    const T* const row = static_cast<const T*>(a.x) + m * a.in_features;
    int64_t i = 0;
    for (; i + kLanes <= a.in_features; i += kLanes) Store(x + m * stride + i, Load(row + i));
    if (i < a.in_features) Store(x + m * stride + i, LoadPartial(row + i, static_cast<int>(a.in_features - i)));
  }
}

void WidenX(const LinearArgs& a, float* x) {
  switch (a.x_dtype) {
    case DType::kFloat32:
      return WidenRows<float>(a, x);
    case DType::kBfloat16:
      return WidenRows<Bfloat16>(a, x);
    case DType::kFloat16:
      return WidenRows<Float16>(a, x);
  }
}

float BiasOf(const LinearArgs& a, int64_t o) {
  if (a.bias == nullptr) return 0;
  switch (a.x_dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(a.bias)[o];
    case DType::kBfloat16:
      return ToFloat(static_cast<const Bfloat16*>(a.bias)[o]);
    case DType::kFloat16:
      return ToFloat(static_cast<const Float16*>(a.bias)[o]);
  }
  return 0;
}

void Put(const LinearArgs& a, int64_t m, int64_t o, float y) {
  const int64_t at = m * a.out_features + o;
  switch (a.out_dtype) {
    case DType::kFloat32:
      return FromFloat(y, static_cast<float*>(a.out) + at);
    case DType::kBfloat16:
      return FromFloat(y, static_cast<Bfloat16*>(a.out) + at);
    case DType::kFloat16:
      return FromFloat(y, static_cast<Float16*>(a.out) + at);
  }
}

template <int R, int M, typename T>
void Block(const LinearArgs& a, const float* x, int64_t stride, int64_t o) {
  const int64_t dim = a.in_features;
  const T* const rows = static_cast<const T*>(a.weight) + o * dim;
  Vec sums[R * M];
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < R * M; ++i) sums[i] = Zero();
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    Vec w[R];
    POPTRANSFORMER_UNROLL
    for (int r = 0; r < R; ++r) {
      w[r] = Load(rows + r * dim + i);
      __builtin_prefetch(rows + (R + r) * dim + i, 0, 2);
    }
    POPTRANSFORMER_UNROLL
    for (int m = 0; m < M; ++m) {
      const Vec v = Load(x + m * stride + i);
      POPTRANSFORMER_UNROLL
      for (int r = 0; r < R; ++r) sums[r * M + m] = MultiplyAdd(w[r], v, sums[r * M + m]);
    }
  }
  if (i < dim) {
    POPTRANSFORMER_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec w = LoadPartial(rows + r * dim + i, static_cast<int>(dim - i));
      POPTRANSFORMER_UNROLL
      for (int m = 0; m < M; ++m) sums[r * M + m] = MultiplyAdd(w, Load(x + m * stride + i), sums[r * M + m]);
    }
  }
  POPTRANSFORMER_UNROLL
  for (int r = 0; r < R; ++r) {
    const float bias = BiasOf(a, o + r);
    POPTRANSFORMER_UNROLL
    for (int m = 0; m < M; ++m) Put(a, m, o + r, ReduceAdd(sums[r * M + m]) + bias);
  }
}

template <int M, typename T>
void OutputsOf(const LinearArgs& a, const float* x, int64_t begin, int64_t end) {
  constexpr int R = BlockRows(M);
  const int64_t stride = XStride(a);
  int64_t o = begin;
  for (; o + R <= end; o += R) Block<R, M, T>(a, x, stride, o);
  for (; o < end; ++o) Block<1, M, T>(a, x, stride, o);
}

template <typename T>
void OutputsOfType(const LinearArgs& a, const float* x, int64_t begin, int64_t end) {
  switch (a.num_rows) {
    case 1:
      return OutputsOf<1, T>(a, x, begin, end);
    case 2:
      return OutputsOf<2, T>(a, x, begin, end);
    case 3:
      return OutputsOf<3, T>(a, x, begin, end);
    case 4:
      return OutputsOf<4, T>(a, x, begin, end);
    case 5:
      return OutputsOf<5, T>(a, x, begin, end);
    case 6:
      return OutputsOf<6, T>(a, x, begin, end);
    case 7:
      return OutputsOf<7, T>(a, x, begin, end);
    default:
      return OutputsOf<8, T>(a, x, begin, end);
  }
}

void Outputs(const LinearArgs& a, const float* x, int64_t begin, int64_t end) {
  switch (a.weight_dtype) {
    case DType::kFloat32:
      return OutputsOfType<float>(a, x, begin, end);
    case DType::kBfloat16:
      return OutputsOfType<Bfloat16>(a, x, begin, end);
    case DType::kFloat16:
      return OutputsOfType<Float16>(a, x, begin, end);
  }
}

}  // namespace

LinearKernels Linear() { return {XStride, WidenX, Outputs}; }

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer
