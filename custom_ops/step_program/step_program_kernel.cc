// Norms, activations, rotations of single rows; compiled once per instruction set, see simd.h. All of it is a few hundred
// nanoseconds a row, between products that take microseconds.
#include "step_program/step_program_kernel.h"

#include "common/simd.h"
#include "packed_linear/packed_linear.h"
#include "step_program/row_functions.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

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

void Finish(const FinishArgs& args) { FinishProduct<false>(args); }

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
