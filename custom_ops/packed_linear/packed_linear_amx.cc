// Panels of a packed matrix for tile_product, compiled for AVX-512. A quad of inputs of 16 outputs becomes two rows of pairs.
#include "packed_linear/packed_linear_amx.h"

#include "common/simd.h"
#include "packed_linear/packed_linear.h"

namespace poptransformer {
namespace amx {
namespace {

// Rounded to bfloat16, in turn one of the first and one of the second.
POPTRANSFORMER_INLINE __m512i InTurn(Vec first, Vec second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Value of the byte at kByte of each lane: code * scale + start.
template <int kByte>
POPTRANSFORMER_INLINE Vec ValueAt(__m512i codes, Vec scale, Vec start) {
  const __m512i code = _mm512_and_si512(_mm512_srli_epi32(codes, 8 * kByte), _mm512_set1_epi32(255));
  return MultiplyAdd(_mm512_cvtepi32_ps(code), scale, start);
}

// Two rows of pairs from the codes of a quad.
POPTRANSFORMER_INLINE void PutQuad(__m512i codes, Vec scale, Vec start, Bfloat16* panel) {
  _mm512_storeu_si512(panel, InTurn(ValueAt<0>(codes, scale, start), ValueAt<1>(codes, scale, start)));
  _mm512_storeu_si512(panel + 32, InTurn(ValueAt<2>(codes, scale, start), ValueAt<3>(codes, scale, start)));
}

// Half a quad of float16 numbers at even and odd inputs as bfloat16, the even ones first.
POPTRANSFORMER_INLINE __m512i Float8Half(__m256i evens, __m256i odds, Vec scale) {
  return (__m512i)_mm512_cvtne2ps_pbh(Mul(_mm512_cvtph_ps(odds), scale), Mul(_mm512_cvtph_ps(evens), scale));
}

// Codes that are e4m3 floats. As 16-bit numbers a quad has inputs (0, 1) and (2, 3) of an output side by side; moved to the place
// where a float16 has exponent and fraction, a code is 2^-8 of its value.
void FillFloat8Panel(const PackedLinearArgs& a, const uint8_t* codes, Bfloat16* panel) {
  // Of what InTurn would give for (even, odd) of outputs 0 .. 7 and of 8 .. 15: inputs 0 and 1 of each output; 2 and 3 follow.
  alignas(64) static constexpr uint16_t kFirst[32] = {0,  16, 2,  18, 4,  20, 6,  22, 8,  24, 10, 26, 12, 28, 14, 30,
                                                      32, 48, 34, 50, 36, 52, 38, 54, 40, 56, 42, 58, 44, 60, 46, 62};
  alignas(64) static constexpr int32_t kTwice[16] = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
  const __m512i first = _mm512_load_si512(kFirst), second = _mm512_add_epi16(first, _mm512_set1_epi16(1));
  const __m512i twice = _mm512_load_si512(kTwice), bits = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
  const Vec scale = Mul(Load(reinterpret_cast<const float*>(codes + a.code_bytes())), Broadcast(256));
  const Vec scales[2] = {_mm512_permutexvar_ps(twice, scale),
                         _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), scale)};
  for (int64_t q = 0; q < a.num_units() * 8; ++q, codes += 64, panel += 64) {
    const __m512i both = _mm512_loadu_si512(codes);
    const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(both, 8), 1), bits);
    const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(both, 1), bits);
    // Written out, no loop: the half that is taken has to be a constant however little the compiler optimises.
    const __m512i low = Float8Half(_mm512_castsi512_si256(even), _mm512_castsi512_si256(odd), scales[0]);
    const __m512i high =
        Float8Half(_mm512_extracti64x4_epi64(even, 1), _mm512_extracti64x4_epi64(odd, 1), scales[1]);
    _mm512_storeu_si512(panel, _mm512_permutex2var_epi16(low, first, high));
    _mm512_storeu_si512(panel + 32, _mm512_permutex2var_epi16(low, second, high));
  }
}

}  // namespace

void FillPackedPanel(const void* weights, int64_t block, Bfloat16* panel) {
  const PackedLinearArgs& a = *static_cast<const PackedLinearArgs*>(weights);
  const uint8_t* codes = a.weight + block * a.block_bytes;
  if (a.is_float8) return FillFloat8Panel(a, codes, panel);
  const Float16* scales = reinterpret_cast<const Float16*>(codes + a.code_bytes());
  const Float16* const minimums = scales + a.num_groups() * kPackedBlockRows;
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t u = 0; u < a.num_units(); ++u, panel += kTileInputs * kPanelOutputs) {
    const int64_t at = u / a.units_per_group * kPackedBlockRows;
    const Vec scale = Load(scales + at);
    if (a.bits == 8) {
      const Vec start = Mul(scale, Broadcast(-128));
      POPTRANSFORMER_UNROLL
      for (int q = 0; q < 8; ++q) PutQuad(_mm512_loadu_si512(codes + q * 64), scale, start, panel + q * 64);
      codes += 512;
    } else {
      const Vec start = Load(minimums + at);
      POPTRANSFORMER_UNROLL
      for (int q = 0; q < 4; ++q) {
        const __m512i both = _mm512_loadu_si512(codes + q * 64);
        PutQuad(_mm512_and_si512(both, low), scale, start, panel + q * 64);
        PutQuad(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), scale, start, panel + (q + 4) * 64);
      }
      codes += 256;
    }
  }
}

}  // namespace amx
}  // namespace poptransformer
