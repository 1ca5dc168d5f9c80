// Products of packed weights with quantised rows; compiled once per instruction set, see simd.h.
//
// One unit of a block holds 32 inputs of 16 outputs: eight quads, each a vector of four inputs of every output, which one dot
// product instruction multiplies with the same four inputs of x. A unit's codes stay in registers for up to kTileRows rows of x.
#include "packed_linear/packed_linear_kernel.h"

#include "common/simd.h"
#include "packed_linear/packed_linear_finish.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

constexpr int kQuads = 8;      // of a unit
// Of x. Where codes do not fit registers anyway, one: more would only take the compiler a minute.
constexpr int kTileRows = kLanes >= 8 ? 8 : 1;

// ---- What each instruction set has: sums of 8-bit products for 16 outputs ---------------------------------------------

#if defined(__AVX512F__)

struct Codes {
  __m512i v;
};
struct Ints {
  __m512i v;
};
constexpr bool kTakesOffset = true;  // weights are multiplied as 0 .. 255, which the quantised rows' offsets make good

POPTRANSFORMER_INLINE Codes LoadCodes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
POPTRANSFORMER_INLINE Codes LowHalves(Codes c) { return {_mm512_and_si512(c.v, _mm512_set1_epi8(15))}; }
POPTRANSFORMER_INLINE Codes HighHalves(Codes c) {
  return {_mm512_and_si512(_mm512_srli_epi16(c.v, 4), _mm512_set1_epi8(15))};
}
POPTRANSFORMER_INLINE Ints Same(int32_t x) { return {_mm512_set1_epi32(x)}; }
template <int kBits>
POPTRANSFORMER_INLINE Ints AddDot(Ints sum, Codes w, int32_t x) {
  return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(x))};
}
POPTRANSFORMER_INLINE Ints AddInts(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
POPTRANSFORMER_INLINE Vec ToFloats(Ints a, int) { return _mm512_cvtepi32_ps(a.v); }

#elif defined(__AVX2__)

struct Codes {
  __m256i v[2];
};
struct Ints {
  __m256i v[2];
};
constexpr bool kTakesOffset = false;

POPTRANSFORMER_INLINE Codes LoadCodes(const uint8_t* p) {
  const __m256i* const from = reinterpret_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)}};
}
POPTRANSFORMER_INLINE Codes LowHalves(Codes c) {
  const __m256i low = _mm256_set1_epi8(15);
  return {{_mm256_and_si256(c.v[0], low), _mm256_and_si256(c.v[1], low)}};
}
POPTRANSFORMER_INLINE Codes HighHalves(Codes c) {
  return LowHalves({{_mm256_srli_epi16(c.v[0], 4), _mm256_srli_epi16(c.v[1], 4)}});
}
POPTRANSFORMER_INLINE Ints Same(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
template <int kBits>
POPTRANSFORMER_INLINE Ints AddDot(Ints sum, Codes w, int32_t x) {
  const __m256i four = _mm256_set1_epi32(x);
  for (int i = 0; i < 2; ++i) {
    __m256i pairs;  // sums of two products, which fit 16 bits: 2 * 128 * 127
    if (kBits == 8) {
      const __m256i value = _mm256_xor_si256(w.v[i], _mm256_set1_epi8(static_cast<char>(0x80)));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(four, value));
    } else {
      pairs = _mm256_maddubs_epi16(w.v[i], four);
    }
    sum.v[i] = _mm256_add_epi32(sum.v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return sum;
}
POPTRANSFORMER_INLINE Ints AddInts(Ints a, Ints b) {
  return {{_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])}};
}
POPTRANSFORMER_INLINE Vec ToFloats(const Ints& a, int part) { return _mm256_cvtepi32_ps(a.v[part]); }

#else

struct Codes {
  uint8_t v[64];
};
struct Ints {
  int32_t v[16];
};
constexpr bool kTakesOffset = true;

POPTRANSFORMER_INLINE Codes LoadCodes(const uint8_t* p) {
  Codes c;
  memcpy(c.v, p, sizeof(c.v));
  return c;
}
POPTRANSFORMER_INLINE Codes LowHalves(Codes c) {
  for (uint8_t& code : c.v) code &= 15;
  return c;
}
POPTRANSFORMER_INLINE Codes HighHalves(Codes c) {
  for (uint8_t& code : c.v) code >>= 4;
  return c;
}
POPTRANSFORMER_INLINE Ints Same(int32_t x) {
  Ints a;
  for (int32_t& lane : a.v) lane = x;
  return a;
}
template <int kBits>
POPTRANSFORMER_INLINE Ints AddDot(Ints sum, const Codes& w, int32_t x) {
  int8_t four[4];
  memcpy(four, &x, 4);
  for (int o = 0; o < 16; ++o) {
    for (int i = 0; i < 4; ++i) sum.v[o] += int32_t{w.v[4 * o + i]} * four[i];
  }
  return sum;
}
POPTRANSFORMER_INLINE Ints AddInts(Ints a, const Ints& b) {
  for (int o = 0; o < 16; ++o) a.v[o] += b.v[o];
  return a;
}
POPTRANSFORMER_INLINE Vec ToFloats(const Ints& a, int part) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(a.v[part * kLanes + i]);
  return Load(lanes);
}

#endif

// ---- x ----------------------------------------------------------------------------------------------------------------

template <typename T>
void QuantizeRow(const PackedLinearArgs& a, const QuantizedRows& rows, int64_t m) {
  const T* const x = static_cast<const T*>(a.x) + m * a.in_features;
  const int64_t num_units = a.num_units(), num_groups = a.num_groups();
  float* const group_sums = rows.group_sums + m * num_groups;
  for (int64_t g = 0; g < num_groups; ++g) group_sums[g] = 0;
  for (int64_t u = 0; u < num_units; ++u) {
    const int64_t left = a.in_features - u * kPackedUnit;
    float values[kPackedUnit];
    Vec most = Zero(), poison = Zero();  // poison becomes NaN where a value is not finite
    POPTRANSFORMER_UNROLL
    for (int i = 0; i < kPackedUnit; i += kLanes) {
      const int64_t n = left - i;
      const Vec v = n >= kLanes ? Load(x + u * kPackedUnit + i)
                                : n > 0 ? LoadPartial(x + u * kPackedUnit + i, static_cast<int>(n)) : Zero();
      Store(values + i, v);
      most = Max(most, Max(v, Sub(Zero(), v)));
      poison = MultiplyAdd(v, Zero(), poison);
    }
    const float scale = ReduceMax(most) / 127;
    const Vec inverse = Broadcast(scale > 0 ? 1 / scale : 0);
    POPTRANSFORMER_UNROLL
    for (int i = 0; i < kPackedUnit; i += kLanes) Store(values + i, Round(Mul(Load(values + i), inverse)));
    int8_t* const codes = rows.codes + (m * num_units + u) * kPackedUnit;
    int32_t sum = 0;
    for (int i = 0; i < kPackedUnit; ++i) {
      // 1 / scale overflows where scale is less than the least normal number; what is that small counts as 0.
      const float code = values[i] > 127 || values[i] < -127 || values[i] != values[i] ? 0 : values[i];
      codes[i] = static_cast<int8_t>(code);
      sum += codes[i];
    }
    const float final_scale = scale + ReduceAdd(poison);
    rows.scales[m * num_units + u] = final_scale;
    rows.offsets[m * num_units + u] = -128 * sum;
    group_sums[u / a.units_per_group] += final_scale * static_cast<float>(sum);
  }
}

void Quantize(const PackedLinearArgs& a, const QuantizedRows& rows, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    switch (a.x_dtype) {
      case DType::kFloat32:
        QuantizeRow<float>(a, rows, m);
        break;
      case DType::kBfloat16:
        QuantizeRow<Bfloat16>(a, rows, m);
        break;
      case DType::kFloat16:
        QuantizeRow<Float16>(a, rows, m);
        break;
    }
  }
}

// ---- Products ---------------------------------------------------------------------------------------------------------

POPTRANSFORMER_INLINE int32_t Quad(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return four;
}

// The hardware's prefetchers stop at every 4 KiB page, and know nothing of the way from a block's codes to the next one's; asking
// ahead reads memory faster: for codes kAheadBytes ahead, into the second cache, for scales those of the next block. Past the
// end it does nothing.
constexpr int64_t kAheadBytes = 3072;

template <int kBits, int kRows>
void Block(const PackedLinearArgs& a, const QuantizedRows& rows, int64_t first_row, int64_t block) {
  const int64_t num_units = a.num_units(), num_groups = a.num_groups();
  constexpr int64_t kUnitBytes = kPackedUnit * kPackedBlockRows * kBits / 8;
  const uint8_t* codes = a.weight + block * a.block_bytes;
  const Float16* scales = reinterpret_cast<const Float16*>(codes + a.code_bytes());
  const Float16* minimums = scales + num_groups * kPackedBlockRows;
  const int8_t* x = rows.codes + first_row * num_units * kPackedUnit;
  const float* x_scales = rows.scales + first_row * num_units;
  const int32_t* x_offsets = rows.offsets + first_row * num_units;
  const float* x_sums = rows.group_sums + first_row * num_groups;

  Vec sums[kRows][kParts];
  POPTRANSFORMER_UNROLL
  for (int m = 0; m < kRows; ++m) {
    POPTRANSFORMER_UNROLL
    for (int p = 0; p < kParts; ++p) sums[m][p] = Zero();
  }
  const uint8_t* const last_ahead = codes + a.code_bytes() - kAheadBytes;
  const int64_t over_scales = a.block_bytes - a.code_bytes();
  int64_t u = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    __builtin_prefetch(reinterpret_cast<const uint8_t*>(scales) + a.block_bytes);
    if (kBits == 4) __builtin_prefetch(reinterpret_cast<const uint8_t*>(minimums) + a.block_bytes);
    Vec scale[kParts];
    POPTRANSFORMER_UNROLL
    for (int p = 0; p < kParts; ++p) scale[p] = Load(scales + p * kLanes);
    scales += kPackedBlockRows;
    if (kBits == 4) {
      POPTRANSFORMER_UNROLL
      for (int p = 0; p < kParts; ++p) {
        const Vec minimum = Load(minimums + p * kLanes);
        POPTRANSFORMER_UNROLL
        for (int m = 0; m < kRows; ++m) {
          sums[m][p] = MultiplyAdd(minimum, Broadcast(x_sums[m * num_groups + g]), sums[m][p]);
        }
      }
      minimums += kPackedBlockRows;
    }
    const int64_t end = u + a.units_per_group < num_units ? u + a.units_per_group : num_units;
    for (; u < end; ++u) {
      Codes w[kQuads];
      const uint8_t* const ahead = codes + kAheadBytes + (codes >= last_ahead ? over_scales : 0);
      POPTRANSFORMER_UNROLL
      for (int q = 0; q < kQuads * kBits / 8; ++q) {
        __builtin_prefetch(ahead + q * 64, 0, 2);
        w[q] = LoadCodes(codes + q * 64);
        if (kBits == 4) {
          w[q + 4] = HighHalves(w[q]);
          w[q] = LowHalves(w[q]);
        }
      }
      codes += kUnitBytes;
      POPTRANSFORMER_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const int8_t* const row = x + (m * num_units + u) * kPackedUnit;
        // Two chains, since one instruction waits for the result of the one before.
        Ints even = Same(kBits == 8 && kTakesOffset ? x_offsets[m * num_units + u] : 0), odd = Same(0);
        POPTRANSFORMER_UNROLL
        for (int q = 0; q < kQuads; q += 2) {
          even = AddDot<kBits>(even, w[q], Quad(row + 4 * q));
          odd = AddDot<kBits>(odd, w[q + 1], Quad(row + 4 * q + 4));
        }
        const Ints dot = AddInts(even, odd);
        const Vec x_scale = Broadcast(x_scales[m * num_units + u]);
        POPTRANSFORMER_UNROLL
        for (int p = 0; p < kParts; ++p) sums[m][p] = MultiplyAdd(ToFloats(dot, p), Mul(scale[p], x_scale), sums[m][p]);
      }
    }
  }
  POPTRANSFORMER_UNROLL
  for (int m = 0; m < kRows; ++m) {
    Vec row[kParts];  // a copy: sums whose address is handed on would live in memory, not in registers
    POPTRANSFORMER_UNROLL
    for (int p = 0; p < kParts; ++p) row[p] = sums[m][p];
    Finish(a, first_row + m, block * kPackedBlockRows, row);
  }
}

// Rows first_row .. num_rows of x, kRows at a time, then those left at once: two passes would load and unpack the codes twice.
template <int kBits, int kRows>
void Rows(const PackedLinearArgs& a, const QuantizedRows& rows, int64_t first_row, int64_t block) {
  for (; first_row + kRows <= a.num_rows; first_row += kRows) Block<kBits, kRows>(a, rows, first_row, block);
  if constexpr (kRows > 1) Rows<kBits, kRows - 1>(a, rows, first_row, block);
}

template <int kBits>
void BlocksOf(const PackedLinearArgs& a, const QuantizedRows& rows, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) Rows<kBits, kTileRows>(a, rows, 0, block);
}

void Blocks(const PackedLinearArgs& a, const QuantizedRows& rows, int64_t begin, int64_t end) {
  if (a.bits == 8) return BlocksOf<8>(a, rows, begin, end);
  BlocksOf<4>(a, rows, begin, end);
}

}  // namespace

PackedLinearKernels PackedLinear() { return {Quantize, Blocks}; }

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer
