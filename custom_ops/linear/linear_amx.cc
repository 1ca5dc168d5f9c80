// Panels of a bfloat16 matrix for tile_product, compiled for AVX-512: 16 x 16 pairs at a time, turned over.
#include "linear/linear_amx.h"

#include "common/simd.h"

namespace poptransformer {
namespace amx {

void FillPanel(const void* weights, int64_t block, Bfloat16* panel) {
  const BfloatMatrix& w = *static_cast<const BfloatMatrix*>(weights);
  const int64_t first = block * kPanelOutputs;
  const int64_t num_outputs = w.out_features - first < kPanelOutputs ? w.out_features - first : kPanelOutputs;
  for (int64_t i = 0; i < w.in_features; i += kTileInputs, panel += kTileInputs * kPanelOutputs) {
    const int64_t left = w.in_features - i;
    const __mmask32 mask = left >= kTileInputs ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    Vec pairs[kPanelOutputs];  // a pair of inputs in each lane, whatever a float would make of it
    POPTRANSFORMER_UNROLL
    for (int64_t o = 0; o < kPanelOutputs; ++o) {
      const Bfloat16* const row = w.values + (first + o) * w.in_features + i;
      pairs[o] = _mm512_castsi512_ps(o < num_outputs ? _mm512_maskz_loadu_epi16(mask, row) : _mm512_setzero_si512());
    }
    Transpose(pairs);
    POPTRANSFORMER_UNROLL
    for (int64_t p = 0; p < kPanelOutputs; ++p) _mm512_storeu_si512(panel + p * 32, _mm512_castps_si512(pairs[p]));
  }
}

}  // namespace amx
}  // namespace poptransformer
