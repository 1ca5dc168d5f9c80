// Rows of H numbers as buffers and caches hold them, to float32 and back; once per instruction set.
#ifndef POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_ROWS_H_
#define POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_ROWS_H_

#include "attention/attention.h"
#include "common/simd_bytes.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

template <typename T>
void Widen(const T* in, int64_t n, float factor, float* out) {
  const Vec factors = Broadcast(factor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(out + i, Mul(Load(in + i), factors));
  if (i < n) StorePartial(out + i, Mul(LoadPartial(in + i, static_cast<int>(n - i)), factors), static_cast<int>(n - i));
}

template <typename T>
void Narrow(const float* in, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StorePartial(out + i, Load(in + i), kLanes);
  if (i < n) StorePartial(out + i, LoadPartial(in + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

// Elements [offset, offset + n) of a buffer, times factor.
void WidenFrom(DType dtype, const void* buffer, int64_t offset, int64_t n, float factor, float* out) {
  switch (dtype) {
    case DType::kFloat32:
      return Widen(static_cast<const float*>(buffer) + offset, n, factor, out);
    case DType::kBfloat16:
      return Widen(static_cast<const Bfloat16*>(buffer) + offset, n, factor, out);
    case DType::kFloat16:
      return Widen(static_cast<const Float16*>(buffer) + offset, n, factor, out);
  }
}

inline void NarrowTo(DType dtype, const float* in, int64_t n, void* buffer, int64_t offset) {
  switch (dtype) {
    case DType::kFloat32:
      return Narrow(in, n, static_cast<float*>(buffer) + offset);
    case DType::kBfloat16:
      return Narrow(in, n, static_cast<Bfloat16*>(buffer) + offset);
    case DType::kFloat16:
      return Narrow(in, n, static_cast<Float16*>(buffer) + offset);
  }
}

// ---- Caches of int8 codes: poptransformer/kv_cache.py has the definition ----------------------------------------------------

constexpr float kPerCode = 1.0f / 127, kLeastScale = 0x1p-100f;

struct RowScale {
  float scale;    // NaN where a number is not finite
  float inverse;  // 0 where there is none
};

RowScale FindScale(const float* line, int64_t n) {
  Vec most = Zero(), poison = Zero();  // poison becomes NaN where a number is not finite
  for (int64_t h = 0; h < n; h += kLanes) {
    const Vec v = n - h >= kLanes ? Load(line + h) : LoadPartial(line + h, static_cast<int>(n - h));
    most = Max(most, Max(v, Sub(Zero(), v)));
    poison = MultiplyAdd(v, Zero(), poison);
  }
  if (ReduceAdd(poison) != 0) return {__builtin_nanf(""), 0};
  const float scale = ReduceMax(most) * kPerCode;
  return scale < kLeastScale ? RowScale{0, 0} : RowScale{scale, 1 / scale};
}

void StoreCodes(const float* line, int64_t n, Int8* row) {
  const RowScale found = FindScale(line, n);
  memcpy(row + n, &found.scale, sizeof(float));
  if (found.inverse == 0) {
    memset(row, 0, n);
    return;
  }
  const Vec inverse = Broadcast(found.inverse);
  for (int64_t h = 0; h < n; h += kLanes) {
    const int lanes = static_cast<int>(n - h < kLanes ? n - h : kLanes);
    StorePartial(row + h, Round(Mul(LoadPartial(line + h, lanes), inverse)), lanes);
  }
}

POPTRANSFORMER_INLINE float ScaleBehind(const Int8* row, int64_t n) {
  float scale;
  memcpy(&scale, row + n, sizeof(float));
  return scale;
}

// ---- Rows of a cache ------------------------------------------------------------------------------------------------

// Writes a row of a cache from H numbers; offset counts elements.
void StoreCacheRow(CacheType type, const float* line, int64_t n, void* cache, int64_t offset) {
  switch (type) {
    case CacheType::kFloat32:
      return Narrow(line, n, static_cast<float*>(cache) + offset);
    case CacheType::kBfloat16:
      return Narrow(line, n, static_cast<Bfloat16*>(cache) + offset);
    case CacheType::kFloat16:
      return Narrow(line, n, static_cast<Float16*>(cache) + offset);
    case CacheType::kFloat8:
      return Narrow(line, n, static_cast<Float8*>(cache) + offset);
    case CacheType::kInt8:
      return StoreCodes(line, n, static_cast<Int8*>(cache) + offset);
  }
}

// Reads rows of a cache that follow each other, each of H numbers.
template <typename T>
void LoadCacheRows(const T* rows, int64_t num_rows, int64_t n, float* out) {
  Widen(rows, num_rows * n, 1.0f, out);
}
inline void LoadCacheRows(const Int8* rows, int64_t num_rows, int64_t n, float* out) {
  for (int64_t r = 0; r < num_rows; ++r, rows += CacheRow(CacheType::kInt8, n)) {
    Widen(rows, n, ScaleBehind(rows, n), out + r * n);
  }
}

// Makes of H numbers what storing and loading makes of them.
template <typename T>
void RoundAsCached(float* line, int64_t n) {
  for (int64_t h = 0; h < n; h += kLanes) {
    const int lanes = static_cast<int>(n - h < kLanes ? n - h : kLanes);
    T narrow[kLanes];
    StorePartial(narrow, LoadPartial(line + h, lanes), lanes);
    StorePartial(line + h, LoadPartial(narrow, lanes), lanes);
  }
}
template <>
inline void RoundAsCached<float>(float*, int64_t) {}
template <>
inline void RoundAsCached<Int8>(float* line, int64_t n) {
  const RowScale found = FindScale(line, n);
  const Vec scale = Broadcast(found.scale), inverse = Broadcast(found.inverse);
  for (int64_t h = 0; h < n; h += kLanes) {
    const int lanes = static_cast<int>(n - h < kLanes ? n - h : kLanes);
    StorePartial(line + h, Mul(Round(Mul(LoadPartial(line + h, lanes), inverse)), scale), lanes);
  }
}

// Multiplies numbers for n rows by what the rows, as they are loaded, lack: those of an int8 cache their scales.
template <typename T>
POPTRANSFORMER_INLINE void MultiplyByScales(const T*, int64_t, int64_t, int64_t, float*, int64_t) {}

inline void MultiplyByScales(const FiniteFloat8*, int64_t, int64_t n, int64_t groups, float* numbers, int64_t stride) {
  const Vec scale = Broadcast(kFloat8FromFloat16);
  for (int64_t g = 0; g < groups; ++g) {
    for (float* to = numbers + g * stride; to < numbers + g * stride + n; to += kLanes) Store(to, Mul(Load(to), scale));
  }
}

// numbers [groups, stride], each of n and up to kLanes more; n <= kMaxScales.
constexpr int64_t kMaxScales = 256;
inline void MultiplyByScales(const Int8* rows, int64_t dim, int64_t n, int64_t groups, float* numbers, int64_t stride) {
  alignas(64) float scales[kMaxScales + kLanes] = {};
  const int64_t row = CacheRow(CacheType::kInt8, dim);
  for (int64_t s = 0; s < n; ++s) scales[s] = ScaleBehind(rows + s * row, dim);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t s = 0; s < n; s += kLanes) {
      float* const to = numbers + g * stride + s;
      Store(to, Mul(Load(to), Load(scales + s)));
    }
  }
}

}  // namespace
}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_ROWS_H_
