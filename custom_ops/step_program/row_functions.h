// Functions of rows, and how a product's sums become its result. For *_kernel.cc and *_amx.cc files only, see simd.h.
#ifndef POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_ROW_FUNCTIONS_H_
#define POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_ROW_FUNCTIONS_H_

#include "common/simd.h"
#include "step_program/step_program_kernel.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {

// Calls body(i, lanes) for vectors of n elements: lanes is kLanes but for a last, shorter one.
template <typename Body>
POPTRANSFORMER_INLINE void ForVectors(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

template <typename T>
POPTRANSFORMER_INLINE Vec LoadLanes(const T* p, int lanes) {
  return lanes == kLanes ? Load(p) : LoadPartial(p, lanes);
}
POPTRANSFORMER_INLINE void StoreLanes(float* p, Vec v, int lanes) {
  if (lanes == kLanes) {
    Store(p, v);
  } else {
    StorePartial(p, v, lanes);
  }
}

POPTRANSFORMER_INLINE Vec LoadNumbers(const Numbers& a, int64_t i, int lanes) {
  switch (a.dtype) {
    case DType::kFloat32:
      return LoadLanes(static_cast<const float*>(a.data) + i, lanes);
    case DType::kBfloat16:
      return LoadLanes(static_cast<const Bfloat16*>(a.data) + i, lanes);
    case DType::kFloat16:
      break;
  }
  return LoadLanes(static_cast<const Float16*>(a.data) + i, lanes);
}

POPTRANSFORMER_INLINE Vec Sigmoid(Vec x) {
  const Vec e = Exp(Sub(Zero(), Max(x, Sub(Zero(), x))));  // of -|x|: no overflow, and a NaN stays one
  const Vec denominator = Add(Broadcast(1), e);
  return Mul(SelectLess(x, Zero(), e, Broadcast(1)), Reciprocal(denominator));
}

// Abramowitz and Stegun 7.1.26: off by at most 1.5e-7.
POPTRANSFORMER_INLINE Vec Erf(Vec x) {
  const Vec a = Max(x, Sub(Zero(), x));
  const Vec t = Div(Broadcast(1), MultiplyAdd(a, Broadcast(0.3275911f), Broadcast(1)));
  Vec p = MultiplyAdd(t, Broadcast(1.061405429f), Broadcast(-1.453152027f));
  p = MultiplyAdd(p, t, Broadcast(1.421413741f));
  p = MultiplyAdd(p, t, Broadcast(-0.284496736f));
  p = MultiplyAdd(p, t, Broadcast(0.254829592f));
  const Vec y = Sub(Broadcast(1), Mul(Mul(p, t), Exp(Sub(Zero(), Mul(a, a)))));
  return SelectLess(x, Zero(), Sub(Zero(), y), y);
}

template <Function kFunction>
POPTRANSFORMER_INLINE Vec Apply(Vec x, Vec y) {
  switch (kFunction) {
    case Function::kNone:
      return x;
    case Function::kSilu:
      return Mul(x, Sigmoid(x));
    case Function::kGelu:
      return Mul(Mul(x, Broadcast(0.5f)), Add(Broadcast(1), Erf(Mul(x, Broadcast(0.70710678f)))));
    case Function::kGeluTanh: {
      const Vec cubic = MultiplyAdd(Mul(Mul(x, x), x), Broadcast(0.044715f), x);
      return Mul(x, Sigmoid(Mul(cubic, Broadcast(1.5957691f))));  // 2 sqrt(2 / pi); 1 + tanh(u) = 2 sigmoid(2 u)
    }
    case Function::kRelu:
      return Max(Zero(), x);  // a NaN stays one
    case Function::kTanh:
      return Sub(Mul(Broadcast(2), Sigmoid(Mul(Broadcast(2), x))), Broadcast(1));
    case Function::kSigmoid:
      return Sigmoid(x);
    case Function::kAdd:
      return Add(x, y);
    case Function::kSub:
      return Sub(x, y);
    case Function::kMul:
      return Mul(x, y);
  }
  return x;
}

// Calls body with the function as a compile-time constant.
template <template <Function> class Body, typename... Arguments>
POPTRANSFORMER_INLINE void WithFunction(Function function, const Arguments&... arguments) {
  switch (function) {
    case Function::kNone:
      return Body<Function::kNone>::Run(arguments...);
    case Function::kSilu:
      return Body<Function::kSilu>::Run(arguments...);
    case Function::kGelu:
      return Body<Function::kGelu>::Run(arguments...);
    case Function::kGeluTanh:
      return Body<Function::kGeluTanh>::Run(arguments...);
    case Function::kRelu:
      return Body<Function::kRelu>::Run(arguments...);
    case Function::kTanh:
      return Body<Function::kTanh>::Run(arguments...);
    case Function::kSigmoid:
      return Body<Function::kSigmoid>::Run(arguments...);
    case Function::kAdd:
      return Body<Function::kAdd>::Run(arguments...);
    case Function::kSub:
      return Body<Function::kSub>::Run(arguments...);
    case Function::kMul:
      return Body<Function::kMul>::Run(arguments...);
  }
}

// What Finish does to a vector, where nothing is missing: kParts says what there is. One loop for each, as what is not there
// would cost as much as what is.
constexpr int kBias = 1, kFactors = 2, kResidual = 4, kTiles = 8;

template <Function kFunction, int kParts>
POPTRANSFORMER_INLINE void FinishAll(const FinishArgs& a) {
  // Of locals the compiler knows that no store changes them.
  const int64_t num_rows = a.num_rows, width = a.width, first = a.first, tile_stride = a.tile_stride;
  const Numbers bias = a.bias;
  Bfloat16* const tiles = a.tiles;
  for (int64_t m = 0; m < num_rows; ++m) {
    const float* const sums = a.sums.data + m * a.sums.stride;
    const float* const factors = a.factors.data + m * a.factors.stride;
    const float* const residual = a.residual.data + m * a.residual.stride;
    float* const out = a.out.data + m * a.out.stride;
    Bfloat16* const tile = tiles + m / 16 * tile_stride + m % 16 * 32;
    ForVectors(width, [&](int64_t i, int lanes) {
      Vec v = LoadLanes(sums + i, lanes);
      if (kParts & kBias) v = Add(v, LoadNumbers(bias, first + i, lanes));
      v = Apply<kFunction>(v, v);
      if (kParts & kFactors) v = Mul(v, LoadLanes(factors + i, lanes));
      if (kParts & kResidual) v = Add(v, LoadLanes(residual + i, lanes));
      if (kParts & kTiles) {
        StorePartial(tile + i, v, lanes);
      } else {
        StoreLanes(out + i, v, lanes);
      }
    });
  }
}

template <Function kFunction, int kParts>
POPTRANSFORMER_INLINE void FinishWithBias(const FinishArgs& a) {
  if (a.bias.data) {
    a.residual.data ? FinishAll<kFunction, kParts | kBias | kResidual>(a) : FinishAll<kFunction, kParts | kBias>(a);
  } else {
    a.residual.data ? FinishAll<kFunction, kParts | kResidual>(a) : FinishAll<kFunction, kParts>(a);
  }
}

template <Function kFunction>
struct FinishRows {
  static void Run(const FinishArgs& a) {
    a.factors.data ? FinishWithBias<kFunction, kFactors>(a) : FinishWithBias<kFunction, 0>(a);
  }
};

template <Function kFunction>
struct FinishTiles {
  static void Run(const FinishArgs& a) {
    a.factors.data ? FinishWithBias<kFunction, kFactors | kTiles>(a) : FinishWithBias<kFunction, kTiles>(a);
  }
};

// kHasTiles: whether the result may be wanted in tiles.
template <bool kHasTiles>
POPTRANSFORMER_INLINE void FinishProduct(const FinishArgs& a) {
  if (kHasTiles && a.tiles) return WithFunction<FinishTiles>(a.function, a);
  WithFunction<FinishRows>(a.function, a);
}

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_STEP_PROGRAM_ROW_FUNCTIONS_H_
