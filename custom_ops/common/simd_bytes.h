// Numbers of one byte for the vectors of simd.h: e4m3 floats and signed codes; for files named *_kernel.cc only, see there.
//
//   Load, LoadPartial, StorePartial: memory holds Float8 or Int8, registers float
//
// A Float8 has a sign, 4 bits of exponent, 3 of fraction; no infinity, 0x7f is NaN. Storing rounds to nearest even, cuts finite
// values at 448 and makes NaN of what is not finite. An Int8 is stored from a whole number -128 .. 127. A FiniteFloat8 is a Float8
// in memory that HasNan has found to have none; it is loaded as 2^-8 of its value, for whoever multiplies by
// kFloat8FromFloat16 elsewhere: half the instructions.
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_SIMD_BYTES_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_SIMD_BYTES_H_

#include "common/simd.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {

struct Float8 {
  uint8_t bits;
};
struct FiniteFloat8 {
  uint8_t bits;
};
struct Int8 {
  int8_t code;
};

// A Float8 moved to the place where a float16 has exponent and fraction is 2^-8 of its value, subnormal ones too; and float16
// is converted right whatever the processor's mode for subnormal numbers.
constexpr float kFloat8FromFloat16 = 256;

// Encoding, for |x| in float bits: 0x7f for NaN. From 2^-6 on the float's bits are rounded to 4 bits of significand and the
// exponent's bias changes from 127 to 7; below, adding 2^14 leaves a multiple of 2^-9 in the low bits.
constexpr int32_t kFloat8Normal = 0x3c800000, kFloat8Bias = 120 << 3, kFloat8Largest = 0x7e;

// Whether one of n numbers is NaN.
POPTRANSFORMER_INLINE bool HasNan(const Float8* p, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512i nan = _mm512_set1_epi8(0x7f);
  __mmask64 found = 0;
  for (; i + 64 <= n; i += 64) found |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(_mm512_loadu_si512(p + i), nan), nan);
  if (found) return true;
#elif defined(__AVX2__)
  const __m256i nan = _mm256_set1_epi8(0x7f);
  __m256i found = _mm256_setzero_si256();
  for (; i + 32 <= n; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i));
    found = _mm256_or_si256(found, _mm256_cmpeq_epi8(_mm256_and_si256(bytes, nan), nan));
  }
  if (_mm256_movemask_epi8(found)) return true;
#endif
  for (; i < n; ++i) {
    if ((p[i].bits & 0x7f) == 0x7f) return true;
  }
  return false;
}

#if defined(__AVX512F__)

POPTRANSFORMER_INLINE Vec WidenFiniteFloat8(__m128i bytes) {
  const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}
POPTRANSFORMER_INLINE Vec Load(const FiniteFloat8* p) {
  return WidenFiniteFloat8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
POPTRANSFORMER_INLINE Vec LoadPartial(const FiniteFloat8* p, int n) {
  return WidenFiniteFloat8(_mm_maskz_loadu_epi8(FirstLanes(n), p));
}

POPTRANSFORMER_INLINE Vec WidenFloat8(__m128i bytes) {
  const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
  const __m256i magnitude = _mm256_set1_epi16(0x3f80);
  const __m256i half = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(moved, magnitude), magnitude);
  const Vec value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(kFloat8FromFloat16));
  return _mm512_mask_mov_ps(value, is_nan, _mm512_set1_ps(__builtin_nanf("")));
}

POPTRANSFORMER_INLINE __m128i NarrowToFloat8(Vec a) {
  const __m512i bits = _mm512_castps_si512(a), mag = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(mag, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(mag, _mm512_set1_epi32(0x7ffff)), odd);
  const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(kFloat8Bias));
  const Vec shift = _mm512_set1_ps(0x1p14f);
  const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(mag), shift)),
                                         _mm512_castps_si512(shift));
  __m512i code = _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(mag, _mm512_set1_epi32(kFloat8Normal)), small);
  code = _mm512_min_epi32(code, _mm512_set1_epi32(kFloat8Largest));
  code = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80)));
  const __mmask16 is_bad = _mm512_cmpge_epi32_mask(mag, _mm512_set1_epi32(0x7f800000));
  return _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(code, is_bad, _mm512_set1_epi32(0x7f)));
}

POPTRANSFORMER_INLINE Vec Load(const Float8* p) {
  return WidenFloat8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
POPTRANSFORMER_INLINE Vec LoadPartial(const Float8* p, int n) { return WidenFloat8(_mm_maskz_loadu_epi8(FirstLanes(n), p)); }
POPTRANSFORMER_INLINE void StorePartial(Float8* p, Vec a, int n) {
  _mm_mask_storeu_epi8(p, FirstLanes(n), NarrowToFloat8(a));
}

POPTRANSFORMER_INLINE Vec Load(const Int8* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
POPTRANSFORMER_INLINE Vec LoadPartial(const Int8* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(FirstLanes(n), p)));
}
POPTRANSFORMER_INLINE void StorePartial(Int8* p, Vec a, int n) {
  _mm_mask_storeu_epi8(p, FirstLanes(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}

#else

POPTRANSFORMER_INLINE void FromFloat(float x, Float8* out) {
  const uint32_t bits = BitsOf(x);
  const int32_t mag = static_cast<int32_t>(bits & 0x7fffffff);
  if (mag >= 0x7f800000) {
    out->bits = 0x7f;
    return;
  }
  const float shift = 0x1p14f;
  int32_t code = mag < kFloat8Normal
                     ? static_cast<int32_t>(BitsOf(FloatOf(static_cast<uint32_t>(mag)) + shift) - BitsOf(shift))
                     : ((mag + 0x7ffff + ((mag >> 20) & 1)) >> 20) - kFloat8Bias;
  code = code < kFloat8Largest ? code : kFloat8Largest;
  out->bits = static_cast<uint8_t>(code | (bits >> 24 & 0x80));
}
POPTRANSFORMER_INLINE void FromFloat(float x, Int8* out) { out->code = static_cast<int8_t>(x); }

template <typename T>
POPTRANSFORMER_INLINE void StoreBytes(T* p, Vec a, int n) {
  float lanes[kLanes];
  Store(lanes, a);
  for (int i = 0; i < n; ++i) FromFloat(lanes[i], p + i);
}
POPTRANSFORMER_INLINE void StorePartial(Float8* p, Vec a, int n) { StoreBytes(p, a, n); }
POPTRANSFORMER_INLINE void StorePartial(Int8* p, Vec a, int n) { StoreBytes(p, a, n); }

#if defined(__AVX2__)

POPTRANSFORMER_INLINE Vec WidenFloat8(__m128i bytes) {  // the low eight
  const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  const __m128i magnitude = _mm_set1_epi16(0x3f80);
  const __m128i half = _mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m256i is_nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(_mm_and_si128(moved, magnitude), magnitude));
  const Vec value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(kFloat8FromFloat16));
  return _mm256_or_ps(value, _mm256_castsi256_ps(is_nan));  // all bits set: NaN
}

POPTRANSFORMER_INLINE __m128i LoadEight(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
POPTRANSFORMER_INLINE __m128i LoadEightPartial(const void* p, int n) {
  uint8_t bytes[8] = {};
  for (int i = 0; i < n; ++i) bytes[i] = static_cast<const uint8_t*>(p)[i];
  return LoadEight(bytes);
}
POPTRANSFORMER_INLINE Vec WidenFiniteFloat8(__m128i bytes) {
  const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
  return _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
}
POPTRANSFORMER_INLINE Vec Load(const FiniteFloat8* p) { return WidenFiniteFloat8(LoadEight(p)); }
POPTRANSFORMER_INLINE Vec LoadPartial(const FiniteFloat8* p, int n) { return WidenFiniteFloat8(LoadEightPartial(p, n)); }
POPTRANSFORMER_INLINE Vec Load(const Float8* p) { return WidenFloat8(LoadEight(p)); }
POPTRANSFORMER_INLINE Vec LoadPartial(const Float8* p, int n) { return WidenFloat8(LoadEightPartial(p, n)); }
POPTRANSFORMER_INLINE Vec WidenInt8(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }
POPTRANSFORMER_INLINE Vec Load(const Int8* p) { return WidenInt8(LoadEight(p)); }
POPTRANSFORMER_INLINE Vec LoadPartial(const Int8* p, int n) { return WidenInt8(LoadEightPartial(p, n)); }

#else

POPTRANSFORMER_INLINE float ToFloat(FiniteFloat8 x) {
  return ToFloat(Float16{static_cast<uint16_t>((x.bits & 0x80) << 8 | (x.bits & 0x7f) << 7)});
}
POPTRANSFORMER_INLINE float ToFloat(Float8 x) {
  if ((x.bits & 0x7f) == 0x7f) return __builtin_nanf("");
  return ToFloat(FiniteFloat8{x.bits}) * kFloat8FromFloat16;
}
POPTRANSFORMER_INLINE float ToFloat(Int8 x) { return x.code; }

POPTRANSFORMER_INLINE Vec Load(const Float8* p) {
  return Vec{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
POPTRANSFORMER_INLINE Vec Load(const FiniteFloat8* p) {
  return Vec{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
POPTRANSFORMER_INLINE Vec Load(const Int8* p) { return Vec{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])}; }
template <typename T>
POPTRANSFORMER_INLINE Vec LoadBytesPartial(const T* p, int n) {
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = ToFloat(p[i]);
  return Load(lanes);
}
POPTRANSFORMER_INLINE Vec LoadPartial(const Float8* p, int n) { return LoadBytesPartial(p, n); }
POPTRANSFORMER_INLINE Vec LoadPartial(const FiniteFloat8* p, int n) { return LoadBytesPartial(p, n); }
POPTRANSFORMER_INLINE Vec LoadPartial(const Int8* p, int n) { return LoadBytesPartial(p, n); }

#endif
#endif

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_SIMD_BYTES_H_
