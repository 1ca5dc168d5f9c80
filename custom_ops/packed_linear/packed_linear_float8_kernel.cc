// Products of e4m3 codes with float32 rows; compiled once per instruction set, see simd.h.
//
// A quad is a vector of four inputs of 16 outputs, one byte each. As 16-bit numbers it has inputs (0, 1) and (2, 3) of an output
// side by side: the low bytes are inputs 0 and 2, the high ones 1 and 3. Moved to the place where a float16 has exponent and
// fraction, a code is 2^-8 of its value, and conversion from float16 does the rest: right for subnormal codes too, in whatever
// mode the processor is for subnormal numbers, which differs between XLA's threads and ours. So a vector of floats has two
// inputs of half as many outputs, is multiplied with those two inputs of x in turn, and in the end neighbours are added.
#include "packed_linear/packed_linear_float8.h"

#include "common/simd.h"
#include "packed_linear/packed_linear_finish.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

constexpr int kQuads = 8;             // of a unit
constexpr int kVectors = 32 / kLanes;  // of floats for 16 outputs and two inputs
constexpr int kTileRows = kLanes == 16 ? 8 : kLanes == 8 ? 2 : 1;  // of x whose sums registers hold

// ---- What each instruction set has: even[] with inputs 0 and 2 of a quad, odd[] with 1 and 3; kFactor times what they stand for

#if defined(__AVX512F__)

constexpr float kFactor = 256;

POPTRANSFORMER_INLINE void LoadQuad(const uint8_t* p, Vec* even, Vec* odd) {
  const __m512i bits = _mm512_set1_epi16(static_cast<int16_t>(0xbf80)), both = _mm512_loadu_si512(p);
  const __m512i low = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(both, 8), 1), bits);
  const __m512i high = _mm512_and_si512(_mm512_srai_epi16(both, 1), bits);
  even[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(low));
  even[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(low, 1));
  odd[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(high));
  odd[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(high, 1));
}

POPTRANSFORMER_INLINE Vec InTurn(const float* p) {
  double two;
  memcpy(&two, p, sizeof(two));
  return _mm512_castpd_ps(_mm512_set1_pd(two));
}

#elif defined(__AVX2__)

constexpr float kFactor = 256;

POPTRANSFORMER_INLINE void LoadQuad(const uint8_t* p, Vec* even, Vec* odd) {
  const __m256i bits = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < 2; ++i) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
    const __m256i low = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 1), bits);
    const __m256i high = _mm256_and_si256(_mm256_srai_epi16(both, 1), bits);
    even[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(low));
    even[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
    odd[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
    odd[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
  }
}

POPTRANSFORMER_INLINE Vec InTurn(const float* p) {
  double two;
  memcpy(&two, p, sizeof(two));
  return _mm256_castpd_ps(_mm256_set1_pd(two));
}

#else

constexpr float kFactor = 1;

struct Float8Table {
  float values[256];
  constexpr Float8Table() : values() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = (code >> 3) & 15, fraction = code & 7;
      float value = static_cast<float>(exponent == 0 ? fraction : 8 + fraction) * 0x1p-9f;
      for (int i = 1; i < exponent; ++i) value *= 2;
      values[code] = code & 0x80 ? -value : value;
    }
  }
};
constexpr Float8Table kFloat8;

POPTRANSFORMER_INLINE void LoadQuad(const uint8_t* p, Vec* even, Vec* odd) {
  const float* const table = kFloat8.values;
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < kVectors; ++i, p += 8) {
    even[i] = Vec{table[p[0]], table[p[2]], table[p[4]], table[p[6]]};
    odd[i] = Vec{table[p[1]], table[p[3]], table[p[5]], table[p[7]]};
  }
}

POPTRANSFORMER_INLINE Vec InTurn(const float* p) { return Vec{p[0], p[1], p[0], p[1]}; }

#endif

// ---- Rows of x --------------------------------------------------------------------------------------------------------

template <typename T>
void ArrangeRow(const T* x, int64_t in_features, int64_t padded, float* row) {
  for (int64_t i = 0; i < padded; i += 4) {
    float four[4] = {};
    for (int64_t k = 0; k < 4 && i + k < in_features; ++k) four[k] = ToFloat(x[i + k]);
    row[i] = four[0];
    row[i + 1] = four[2];
    row[i + 2] = four[1];
    row[i + 3] = four[3];
  }
}

void Arrange(const PackedLinearArgs& a, int64_t begin, int64_t end, float* rows) {
  const int64_t padded = a.num_units() * kPackedUnit;
  for (int64_t m = begin; m < end; ++m) {
    const int64_t from = m * a.in_features;
    float* const row = rows + m * padded;
    switch (a.x_dtype) {
      case DType::kFloat32:
        ArrangeRow(static_cast<const float*>(a.x) + from, a.in_features, padded, row);
        break;
      case DType::kBfloat16:
        ArrangeRow(static_cast<const Bfloat16*>(a.x) + from, a.in_features, padded, row);
        break;
      case DType::kFloat16:
        ArrangeRow(static_cast<const Float16*>(a.x) + from, a.in_features, padded, row);
        break;
    }
  }
}

// ---- Products ---------------------------------------------------------------------------------------------------------

// sums[] of two inputs in turn -> the block's outputs.
void FinishRow(const PackedLinearArgs& a, int64_t m, int64_t block, const float* scales, const Vec* sums) {
  float pairs[32], outputs[kPackedBlockRows];
  for (int i = 0; i < kVectors; ++i) Store(pairs + i * kLanes, sums[i]);
  for (int o = 0; o < kPackedBlockRows; ++o) outputs[o] = pairs[2 * o] + pairs[2 * o + 1];
  Vec row[kParts];
  for (int p = 0; p < kParts; ++p) row[p] = Mul(Load(outputs + p * kLanes), Mul(Load(scales + p * kLanes), Broadcast(kFactor)));
  Finish(a, m, block * kPackedBlockRows, row);
}

template <int kRows>
void Block(const PackedLinearArgs& a, const float* rows, int64_t first_row, int64_t block) {
  const int64_t num_quads = a.num_units() * kQuads, padded = a.num_units() * kPackedUnit;
  const uint8_t* const codes = a.weight + block * a.block_bytes;
  const float* const x = rows + first_row * padded;
  Vec sums[kRows][kVectors];
  POPTRANSFORMER_UNROLL
  for (int m = 0; m < kRows; ++m) {
    POPTRANSFORMER_UNROLL
    for (int i = 0; i < kVectors; ++i) sums[m][i] = Zero();
  }
  for (int64_t q = 0; q < num_quads; ++q) {
    if (kRows == 1) __builtin_prefetch(codes + q * 64 + kPrefetchBytes);
    Vec even[kVectors], odd[kVectors];
    LoadQuad(codes + q * 64, even, odd);
    POPTRANSFORMER_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const Vec x_even = InTurn(x + m * padded + 4 * q), x_odd = InTurn(x + m * padded + 4 * q + 2);
      POPTRANSFORMER_UNROLL
      for (int i = 0; i < kVectors; ++i) sums[m][i] = MultiplyAdd(even[i], x_even, sums[m][i]);
      POPTRANSFORMER_UNROLL
      for (int i = 0; i < kVectors; ++i) sums[m][i] = MultiplyAdd(odd[i], x_odd, sums[m][i]);
    }
  }
  const float* const scales = reinterpret_cast<const float*>(codes + a.code_bytes());
  POPTRANSFORMER_UNROLL
  for (int m = 0; m < kRows; ++m) {
    Vec row[kVectors];  // a copy: sums whose address is handed on would live in memory, not in registers
    POPTRANSFORMER_UNROLL
    for (int i = 0; i < kVectors; ++i) row[i] = sums[m][i];
    FinishRow(a, first_row + m, block, scales, row);
  }
}

// Rows first_row .. num_rows of x, kRows at a time, then fewer.
template <int kRows>
void Rows(const PackedLinearArgs& a, const float* rows, int64_t first_row, int64_t block) {
  for (; first_row + kRows <= a.num_rows; first_row += kRows) Block<kRows>(a, rows, first_row, block);
  if constexpr (kRows > 1) Rows<kRows / 2>(a, rows, first_row, block);
}

void Blocks(const PackedLinearArgs& a, const float* rows, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) Rows<kTileRows>(a, rows, 0, block);
}

}  // namespace

PackedLinearFloat8Kernels PackedLinearFloat8() { return {Arrange, Blocks}; }

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer
