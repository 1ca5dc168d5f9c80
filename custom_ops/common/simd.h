// A vector of floats for the instruction set that the file is compiled for: 16 lanes of AVX-512, 8 of AVX2, 4 otherwise.
//
// For files named *_kernel.cc only. Each is compiled once per instruction set, with POPTRANSFORMER_ISA_NAMESPACE naming it,
// and puts everything into that namespace. Such a file must not use inline functions or templates from elsewhere (std::max,
// std::vector): the linker keeps one copy of each, and it may be the AVX-512 one, run on a machine without.
//
// The functions:
//   Zero, Broadcast, Add, Sub, Mul, Div, Max, MultiplyAdd(a, b, c) = a * b + c, SelectLess(a, b, x, y) = a < b ? x : y
//   Load, LoadPartial(pointer, n): n lanes, 0 <= n <= kLanes, others 0; Store, StorePartial
//     memory holds float, Bfloat16 or Float16, registers float; storing rounds to nearest even
//   Reciprocal(x) = 1 / x within two units in the last place, for numbers that are normal as is 1 / x
//   ReduceAdd, ReduceMax; ReduceAddAll(v): lane i = sum of the lanes of v[i]
//   Transpose(v): kLanes by kLanes, in place
//   Exp
#ifndef POPTRANSFORMER_CUSTOM_OPS_COMMON_SIMD_H_
#define POPTRANSFORMER_CUSTOM_OPS_COMMON_SIMD_H_

#include <stdint.h>
#include <string.h>

#include "common/dtype.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define POPTRANSFORMER_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define POPTRANSFORMER_UNROLL _Pragma("unroll")
#else
#define POPTRANSFORMER_UNROLL _Pragma("GCC unroll 32")
#endif

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {

constexpr float kInfinity = __builtin_inff();

// ---- Scalars --------------------------------------------------------------------------------------------------------

POPTRANSFORMER_INLINE uint32_t BitsOf(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

POPTRANSFORMER_INLINE float FloatOf(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

POPTRANSFORMER_INLINE float ToFloat(float x) { return x; }
POPTRANSFORMER_INLINE float ToFloat(Bfloat16 x) { return FloatOf(uint32_t{x.bits} << 16); }

POPTRANSFORMER_INLINE float ToFloat(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1f, fraction = x.bits & 0x3ff;
  if (exponent == 0x1f) return FloatOf(sign | 0x7f800000 | fraction << 13);  // infinity, NaN
  if (exponent != 0) return FloatOf(sign | (exponent + 112) << 23 | fraction << 13);
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // zero, subnormal
  return sign ? -magnitude : magnitude;
}

POPTRANSFORMER_INLINE void FromFloat(float x, float* out) { *out = x; }

POPTRANSFORMER_INLINE void FromFloat(float x, Bfloat16* out) {
  const uint32_t bits = BitsOf(x);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  out->bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

POPTRANSFORMER_INLINE void FromFloat(float x, Float16* out) {
  const uint32_t bits = BitsOf(x), magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // 65520 and more round to infinity
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // normal from 2^-14 on
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  } else if (magnitude < 0x33000000) {  // below half of the least subnormal
    half = 0;
  } else {
    const uint32_t shift = 126 - (magnitude >> 23);  // 14 to 24
    const uint32_t fraction = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t rest = fraction & ((uint32_t{1} << shift) - 1), middle = uint32_t{1} << (shift - 1);
    half = fraction >> shift;
    half += rest > middle || (rest == middle && (half & 1));
  }
  out->bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
}

// ---- Vectors --------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Vec = __m512;

POPTRANSFORMER_INLINE __mmask16 FirstLanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

POPTRANSFORMER_INLINE Vec Zero() { return _mm512_setzero_ps(); }
POPTRANSFORMER_INLINE Vec Broadcast(float x) { return _mm512_set1_ps(x); }
POPTRANSFORMER_INLINE Vec Add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
POPTRANSFORMER_INLINE Vec Sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
POPTRANSFORMER_INLINE Vec Mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
POPTRANSFORMER_INLINE Vec Div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
POPTRANSFORMER_INLINE Vec Reciprocal(Vec x) {
  const Vec near = _mm512_rcp14_ps(x);
  return _mm512_fmadd_ps(near, _mm512_fnmadd_ps(x, near, _mm512_set1_ps(1)), near);
}
POPTRANSFORMER_INLINE Vec Max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
POPTRANSFORMER_INLINE Vec MultiplyAdd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
POPTRANSFORMER_INLINE Vec SelectLess(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
POPTRANSFORMER_INLINE float ReduceAdd(Vec a) { return _mm512_reduce_add_ps(a); }
POPTRANSFORMER_INLINE float ReduceMax(Vec a) { return _mm512_reduce_max_ps(a); }

POPTRANSFORMER_INLINE Vec WidenBfloat16(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

POPTRANSFORMER_INLINE __m256i NarrowToBfloat16(Vec a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a);  // takes subnormal numbers for zeros
#endif
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __m512i quiet_nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet_nan));
}

POPTRANSFORMER_INLINE Vec Load(const float* p) { return _mm512_loadu_ps(p); }
POPTRANSFORMER_INLINE Vec Load(const Bfloat16* p) {
  return WidenBfloat16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
POPTRANSFORMER_INLINE Vec Load(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
POPTRANSFORMER_INLINE Vec LoadPartial(const float* p, int n) { return _mm512_maskz_loadu_ps(FirstLanes(n), p); }
POPTRANSFORMER_INLINE Vec LoadPartial(const Bfloat16* p, int n) {
  return WidenBfloat16(_mm256_maskz_loadu_epi16(FirstLanes(n), p));
}
POPTRANSFORMER_INLINE Vec LoadPartial(const Float16* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(FirstLanes(n), p));
}

POPTRANSFORMER_INLINE void Store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
POPTRANSFORMER_INLINE void StorePartial(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, FirstLanes(n), a); }
POPTRANSFORMER_INLINE void StorePartial(Bfloat16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, FirstLanes(n), NarrowToBfloat16(a));
}
POPTRANSFORMER_INLINE void StorePartial(Float16* p, Vec a, int n) {
  _mm256_mask_storeu_epi16(p, FirstLanes(n), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Four vectors to one: in each group of four lanes, lane i has the sum of v[i]'s group.
POPTRANSFORMER_INLINE Vec ReduceGroups(const Vec* v) {
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

POPTRANSFORMER_INLINE Vec AddNeighbourGroups(Vec a, Vec b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

POPTRANSFORMER_INLINE Vec ReduceAddAll(const Vec* v) {
  const Vec low = AddNeighbourGroups(ReduceGroups(v), ReduceGroups(v + 4));
  const Vec high = AddNeighbourGroups(ReduceGroups(v + 8), ReduceGroups(v + 12));
  return AddNeighbourGroups(low, high);
}

POPTRANSFORMER_INLINE void Transpose(Vec* v) {
  Vec t[16];
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < 16; i += 4) {  // 4 by 4 inside each group of four lanes
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[i], v[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(v[i], v[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[i + 2], v[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[i + 2], v[i + 3]));
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < 4; ++i) {  // then the groups, as a 4 by 4 matrix of groups
    const Vec a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    const Vec c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    v[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    v[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// x * 2^n for whole n, -126 <= n <= 127.
POPTRANSFORMER_INLINE Vec ScaleByPowerOfTwo(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
POPTRANSFORMER_INLINE Vec Round(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using Vec = __m256;

POPTRANSFORMER_INLINE Vec Zero() { return _mm256_setzero_ps(); }
POPTRANSFORMER_INLINE Vec Broadcast(float x) { return _mm256_set1_ps(x); }
POPTRANSFORMER_INLINE Vec Add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
POPTRANSFORMER_INLINE Vec Sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
POPTRANSFORMER_INLINE Vec Mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
POPTRANSFORMER_INLINE Vec Div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
POPTRANSFORMER_INLINE Vec Reciprocal(Vec x) { return Div(_mm256_set1_ps(1), x); }
POPTRANSFORMER_INLINE Vec Max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
POPTRANSFORMER_INLINE Vec MultiplyAdd(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
POPTRANSFORMER_INLINE Vec SelectLess(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

POPTRANSFORMER_INLINE float ReduceAdd(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

POPTRANSFORMER_INLINE float ReduceMax(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

POPTRANSFORMER_INLINE Vec Widen(__m128i bits, Bfloat16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
POPTRANSFORMER_INLINE Vec Widen(__m128i bits, Float16) { return _mm256_cvtph_ps(bits); }

POPTRANSFORMER_INLINE __m128i Narrow(Vec a, Bfloat16) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i quiet_nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_blendv_epi8(rounded, quiet_nan, is_nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}
POPTRANSFORMER_INLINE __m128i Narrow(Vec a, Float16) {
  return _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

POPTRANSFORMER_INLINE __m256i FirstLanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

POPTRANSFORMER_INLINE Vec Load(const float* p) { return _mm256_loadu_ps(p); }
POPTRANSFORMER_INLINE Vec LoadPartial(const float* p, int n) { return _mm256_maskload_ps(p, FirstLanes(n)); }
template <typename T>
POPTRANSFORMER_INLINE Vec Load(const T* p) {
  return Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), T{});
}
template <typename T>
POPTRANSFORMER_INLINE Vec LoadPartial(const T* p, int n) {
  uint16_t lanes[8] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i].bits;
  return Widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes)), T{});
}

POPTRANSFORMER_INLINE void Store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
POPTRANSFORMER_INLINE void StorePartial(float* p, Vec a, int n) { _mm256_maskstore_ps(p, FirstLanes(n), a); }
template <typename T>
POPTRANSFORMER_INLINE void StorePartial(T* p, Vec a, int n) {
  const __m128i narrow = Narrow(a, T{});
  if (n == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow);
    return;
  }
  uint16_t lanes[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), narrow);
  for (int i = 0; i < n; ++i) p[i].bits = lanes[i];
}

// Four vectors to one: in each half, lane i has the sum of v[i]'s half.
POPTRANSFORMER_INLINE Vec ReduceHalves(const Vec* v) {
  const Vec ab = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
  const Vec cd = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
  const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
  return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}

POPTRANSFORMER_INLINE Vec ReduceAddAll(const Vec* v) {
  const Vec a = ReduceHalves(v), b = ReduceHalves(v + 4);
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

POPTRANSFORMER_INLINE void Transpose(Vec* v) {
  Vec t[8];
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < 8; i += 4) {
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(v[i], v[i + 1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(v[i], v[i + 1]));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(v[i + 2], v[i + 3]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(v[i + 2], v[i + 3]));
    t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}

POPTRANSFORMER_INLINE Vec ScaleByPowerOfTwo(Vec x, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
POPTRANSFORMER_INLINE Vec Round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#else

constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));

POPTRANSFORMER_INLINE Vec Broadcast(float x) { return Vec{x, x, x, x}; }
POPTRANSFORMER_INLINE Vec Zero() { return Broadcast(0); }
POPTRANSFORMER_INLINE Vec Add(Vec a, Vec b) { return a + b; }
POPTRANSFORMER_INLINE Vec Sub(Vec a, Vec b) { return a - b; }
POPTRANSFORMER_INLINE Vec Mul(Vec a, Vec b) { return a * b; }
POPTRANSFORMER_INLINE Vec Div(Vec a, Vec b) { return a / b; }
POPTRANSFORMER_INLINE Vec Reciprocal(Vec x) { return Broadcast(1) / x; }
POPTRANSFORMER_INLINE Vec MultiplyAdd(Vec a, Vec b, Vec c) { return a * b + c; }
POPTRANSFORMER_INLINE Vec SelectLess(Vec a, Vec b, Vec x, Vec y) {
  const IntVec mask = a < b;
  return reinterpret_cast<Vec>((reinterpret_cast<IntVec>(x) & mask) | (reinterpret_cast<IntVec>(y) & ~mask));
}
POPTRANSFORMER_INLINE Vec Max(Vec a, Vec b) { return SelectLess(b, a, a, b); }
POPTRANSFORMER_INLINE float ReduceAdd(Vec a) { return (a[0] + a[2]) + (a[1] + a[3]); }
POPTRANSFORMER_INLINE float ReduceMax(Vec a) {
  const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}

POPTRANSFORMER_INLINE Vec Load(const float* p) {
  Vec a;
  memcpy(&a, p, sizeof(a));
  return a;
}
POPTRANSFORMER_INLINE Vec Load(const Bfloat16* p) {
  return Vec{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
POPTRANSFORMER_INLINE Vec Load(const Float16* p) {
  return Vec{ToFloat(p[0]), ToFloat(p[1]), ToFloat(p[2]), ToFloat(p[3])};
}
template <typename T>
POPTRANSFORMER_INLINE Vec LoadPartial(const T* p, int n) {
  float lanes[4] = {};
  for (int i = 0; i < n; ++i) lanes[i] = ToFloat(p[i]);
  return Load(lanes);
}

POPTRANSFORMER_INLINE void Store(float* p, Vec a) { memcpy(p, &a, sizeof(a)); }
template <typename T>
POPTRANSFORMER_INLINE void StorePartial(T* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) FromFloat(a[i], p + i);
}

POPTRANSFORMER_INLINE Vec ReduceAddAll(const Vec* v) {
  return Vec{ReduceAdd(v[0]), ReduceAdd(v[1]), ReduceAdd(v[2]), ReduceAdd(v[3])};
}

POPTRANSFORMER_INLINE void Transpose(Vec* v) {
  const Vec a = v[0], b = v[1], c = v[2], d = v[3];
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < 4; ++i) v[i] = Vec{a[i], b[i], c[i], d[i]};
}

POPTRANSFORMER_INLINE Vec Round(Vec x) {
  const Vec shift = Broadcast(0x1.8p23f);  // pushes the fraction out of the significand; right for |x| < 2^22
  return (x + shift) - shift;
}
POPTRANSFORMER_INLINE Vec ScaleByPowerOfTwo(Vec x, Vec n) {
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return x * reinterpret_cast<Vec>(exponent);
}

#endif

// e^x for x <= 88, relative error below 8.6e-8 and at most 1.01 ulp (measured with all floats from -87.33 to -1e-6); 0 below
// -87.33, where the result would no longer be a normal number, and for -infinity.
POPTRANSFORMER_INLINE Vec Exp(Vec x) {
  constexpr float kLeast = -87.33f;
  const Vec clamped = Max(Broadcast(kLeast), x);  // a NaN in x stays one
  // x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts keeps r exact. 1 + r + r^2 p(r), p fitted to least relative error.
  const Vec n = Round(Mul(clamped, Broadcast(1.44269504f)));
  Vec r = MultiplyAdd(n, Broadcast(-0.693359375f), clamped);
  r = MultiplyAdd(n, Broadcast(2.12194440e-4f), r);
  Vec p = MultiplyAdd(r, Broadcast(1.3814299600e-3f), Broadcast(8.3688534796e-3f));
  p = MultiplyAdd(p, r, Broadcast(4.1668400168e-2f));
  p = MultiplyAdd(p, r, Broadcast(1.6666519642e-1f));
  p = MultiplyAdd(p, r, Broadcast(4.9999994040e-1f));
  p = MultiplyAdd(Mul(r, r), p, r);
  const Vec result = ScaleByPowerOfTwo(Add(p, Broadcast(1.0f)), n);
  return SelectLess(x, Broadcast(kLeast), Zero(), result);
}

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_COMMON_SIMD_H_
