// Norms, activations, rotations of single rows; compiled once per instruction set, see simd.h. All of it is a few hundred
// nanoseconds a row, between products that take microseconds.
#include "step_program/step_program_kernel.h"

#include "common/simd.h"
#include "packed_linear/packed_linear.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

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

void Widen(const Numbers& numbers, int64_t first, int64_t n, float* out) {
  ForVectors(n, [&](int64_t i, int lanes) { StoreLanes(out + i, LoadNumbers(numbers, first + i, lanes), lanes); });
}

void Narrow(const float* in, int64_t n, DType dtype, void* out, int64_t first) {
  ForVectors(n, [&](int64_t i, int lanes) {
    const Vec v = LoadLanes(in + i, lanes);
    switch (dtype) {
      case DType::kFloat32:
        return StorePartial(static_cast<float*>(out) + first + i, v, lanes);
      case DType::kBfloat16:
        return StorePartial(static_cast<Bfloat16*>(out) + first + i, v, lanes);
      case DType::kFloat16:
        return StorePartial(static_cast<Float16*>(out) + first + i, v, lanes);
    }
  });
}

void NormRow(const Norm& norm, const float* x, int64_t n, float* out) {
  float mean = 0;
  if (norm.kind == NormKind::kLayer) {
    Vec sum = Zero();
    ForVectors(n, [&](int64_t i, int lanes) { sum = Add(sum, LoadLanes(x + i, lanes)); });
    mean = ReduceAdd(sum) / static_cast<float>(n);
  }
  Vec squares = Zero();
  ForVectors(n, [&](int64_t i, int lanes) {
    Vec v = Sub(LoadLanes(x + i, lanes), Broadcast(mean));
    if (lanes < kLanes) {  // lanes past the end hold -mean
      float padded[kLanes] = {};
      StorePartial(padded, v, lanes);
      v = Load(padded);
    }
    squares = MultiplyAdd(v, v, squares);
  });
  const float factor = 1 / __builtin_sqrtf(ReduceAdd(squares) / static_cast<float>(n) + norm.eps);
  const bool has_bias = norm.bias.data != nullptr;
  ForVectors(n, [&](int64_t i, int lanes) {
    const Vec v = Mul(Sub(LoadLanes(x + i, lanes), Broadcast(mean)), Broadcast(factor));
    const Vec weight = LoadNumbers(norm.weight, i, lanes);
    StoreLanes(out + i, has_bias ? MultiplyAdd(v, weight, LoadNumbers(norm.bias, i, lanes)) : Mul(v, weight), lanes);
  });
}

void UnpackRow(const Matrix& w, int64_t row, float* out) {
  const uint8_t* const block = static_cast<const uint8_t*>(w.data) + row / kPackedBlockRows * w.block_bytes;
  const int64_t lane = row % kPackedBlockRows;
  const int64_t num_units = (w.in_features + kPackedUnit - 1) / kPackedUnit;
  const int64_t num_groups = (num_units + w.units_per_group - 1) / w.units_per_group;
  const Float16* const scales =
      reinterpret_cast<const Float16*>(block + num_units * kPackedUnit * kPackedBlockRows * w.bits / 8) + lane;
  for (int64_t i = 0; i < w.in_features; ++i) {
    const int64_t unit = i / kPackedUnit, quad = i % kPackedUnit / 4, group = unit / w.units_per_group;
    const float scale = ToFloat(scales[group * kPackedBlockRows]);
    if (w.bits == 8) {
      const uint8_t code = block[((unit * 8 + quad) * kPackedBlockRows + lane) * 4 + i % 4];
      out[i] = (static_cast<float>(code) - 128) * scale;
    } else {
      const uint8_t both = block[((unit * 4 + quad % 4) * kPackedBlockRows + lane) * 4 + i % 4];
      const float minimum = ToFloat(scales[(num_groups + group) * kPackedBlockRows]);
      out[i] = static_cast<float>(quad < 4 ? both & 15 : both >> 4) * scale + minimum;
    }
  }
}

// ---- Functions --------------------------------------------------------------------------------------------------------

POPTRANSFORMER_INLINE Vec Sigmoid(Vec x) {
  const Vec e = Exp(Sub(Zero(), Max(x, Sub(Zero(), x))));  // of -|x|: no overflow, and a NaN stays one
  const Vec denominator = Add(Broadcast(1), e);
  return Div(SelectLess(x, Zero(), e, Broadcast(1)), denominator);
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

template <Function kFunction>
struct FinishRows {
  static void Run(const FinishArgs& a) {
    for (int64_t m = 0; m < a.num_rows; ++m) {
      const float* const sums = a.sums.data + m * a.sums.stride;
      const float* const factors = a.factors.data + m * a.factors.stride;
      const float* const residual = a.residual.data + m * a.residual.stride;
      float* const out = a.out.data + m * a.out.stride;
      ForVectors(a.width, [&](int64_t i, int lanes) {
        Vec v = LoadLanes(sums + i, lanes);
        if (a.bias.data) v = Add(v, LoadNumbers(a.bias, a.first + i, lanes));
        v = Apply<kFunction>(v, v);
        if (a.factors.data) v = Mul(v, LoadLanes(factors + i, lanes));
        if (a.residual.data) v = Add(v, LoadLanes(residual + i, lanes));
        if (a.tiles) {
          StorePartial(a.tiles + m / 16 * a.tile_stride + m % 16 * 32 + i, v, lanes);
        } else {
          StoreLanes(out + i, v, lanes);
        }
      });
    }
  }
};

void Finish(const FinishArgs& args) { WithFunction<FinishRows>(args.function, args); }

template <Function kFunction>
struct MapRow {
  static void Run(const float* a, const float* b, float number, int64_t n, float* out) {
    ForVectors(n, [&](int64_t i, int lanes) {
      const Vec y = b ? LoadLanes(b + i, lanes) : Broadcast(number);
      StoreLanes(out + i, Apply<kFunction>(LoadLanes(a + i, lanes), y), lanes);
    });
  }
};

void Map(Function function, const float* a, const float* b, float number, int64_t n, float* out) {
  WithFunction<MapRow>(function, a, b, number, n, out);
}

void Turn(const float* x, int64_t dim, const float* table, int64_t half, bool is_interleaved, float* out) {
  const float* const cosines = table;
  const float* const sines = table + half;
  if (is_interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      out[2 * i] = a * cosines[i] - b * sines[i];
      out[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
  } else {
    ForVectors(half, [&](int64_t i, int lanes) {
      const Vec a = LoadLanes(x + i, lanes), b = LoadLanes(x + half + i, lanes);
      const Vec cosine = LoadLanes(cosines + i, lanes), sine = LoadLanes(sines + i, lanes);
      StoreLanes(out + i, Sub(Mul(a, cosine), Mul(b, sine)), lanes);
      StoreLanes(out + half + i, MultiplyAdd(b, cosine, Mul(a, sine)), lanes);
    });
  }
  for (int64_t i = 2 * half; i < dim; ++i) out[i] = x[i];
}

}  // namespace

ProgramKernels ProgramRows() { return {Widen, Narrow, NormRow, UnpackRow, Finish, Turn, Map}; }

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer
