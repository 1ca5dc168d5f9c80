// Queries, keys and values as tiles of bfloat16, for attention_amx.cc.
//
// A tile is 16 rows of 32 numbers: of keys 16 positions by 32 features, of values 16 features by 32 positions, of queries 16
// pairs of features by 16 queries. Features past H are zeros.
#ifndef POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_AMX_TILES_H_
#define POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_AMX_TILES_H_

#include "attention/attention_tokens.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

constexpr int64_t kTileRows = 16, kTileColumns = 32, kTileValues = kTileRows * kTileColumns;
constexpr int64_t kSums = kTileRows * kLanes;  // float32 of a tile of sums, as many bytes as kTileValues of bfloat16

// 32 numbers in order.
POPTRANSFORMER_INLINE __m512i RoundPair(Vec low, Vec high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// ---- One position's features, 32 at a time --------------------------------------------------------------------------

// 16 features from h on, zeros past dim.
template <typename T>
POPTRANSFORMER_INLINE Vec LoadFeatures(const T* row, int64_t h, int64_t dim) {
  const int64_t left = dim - h;
  return left >= kLanes ? Load(row + h) : left > 0 ? LoadPartial(row + h, static_cast<int>(left)) : Zero();
}

// As it lies in a buffer or a cache.
template <typename T>
struct Row {
  explicit Row(const T* row, int64_t) : row(row) {}
  const T* row;
};
template <>
struct Row<Int8> {
  Row(const Int8* row, int64_t dim) : row(row), scale(ScaleBehind(row, dim)) {}
  const Int8* row;
  float scale;
};

template <typename T>
POPTRANSFORMER_INLINE __m512i Load32(const Row<T>& from, int64_t h, int64_t dim) {
  return RoundPair(LoadFeatures(from.row, h, dim), LoadFeatures(from.row, h + kLanes, dim));
}
POPTRANSFORMER_INLINE __m512i Load32(const Row<Bfloat16>& from, int64_t h, int64_t dim) {
  const int64_t left = dim - h;
  return _mm512_maskz_loadu_epi16(left >= kTileColumns ? ~__mmask32{0} : (__mmask32{1} << left) - 1, from.row + h);
}
POPTRANSFORMER_INLINE __m512i Load32(const Row<Int8>& from, int64_t h, int64_t dim) {
  const Vec scale = Broadcast(from.scale);
  return RoundPair(Mul(LoadFeatures(from.row, h, dim), scale), Mul(LoadFeatures(from.row, h + kLanes, dim), scale));
}

// A new token's numbers, which a cache of T will round.
template <typename D, typename T>
struct NewRow {
  NewRow(const D* row, int64_t, float*) : row(row) {}
  const D* row;
};
template <typename D>
struct NewRow<D, Int8> {
  // `line` has room for H floats.
  NewRow(const D* from, int64_t dim, float* line) : row(line) {
    Widen(from, dim, 1.0f, line);
    const RowScale found = FindScale(line, dim);
    scale = found.scale;
    inverse = found.inverse;
  }
  const float* row;
  float scale, inverse;
};

// Rounding to float32 changes nothing, to bfloat16 nothing that the tile would not.
template <typename T>
POPTRANSFORMER_INLINE Vec RoundAs(Vec v, const T*) { return v; }
POPTRANSFORMER_INLINE Vec RoundAs(Vec v, const Float16*) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
POPTRANSFORMER_INLINE Vec RoundAs(Vec v, const Float8*) { return WidenFloat8(NarrowToFloat8(v)); }

template <typename D, typename T>
POPTRANSFORMER_INLINE __m512i Load32(const NewRow<D, T>& from, int64_t h, int64_t dim) {
  const T* const as = nullptr;
  return RoundPair(RoundAs(LoadFeatures(from.row, h, dim), as), RoundAs(LoadFeatures(from.row, h + kLanes, dim), as));
}
template <typename D>
POPTRANSFORMER_INLINE __m512i Load32(const NewRow<D, Int8>& from, int64_t h, int64_t dim) {
  const Vec scale = Broadcast(from.scale), inverse = Broadcast(from.inverse);
  const auto rounded = [&](Vec v) __attribute__((always_inline)) { return Mul(Round(Mul(v, inverse)), scale); };
  return RoundPair(rounded(LoadFeatures(from.row, h, dim)), rounded(LoadFeatures(from.row, h + kLanes, dim)));
}

// ---- Tiles ----------------------------------------------------------------------------------------------------------

// Row s of tiles [S / 16, steps, 16, 32].
POPTRANSFORMER_INLINE Bfloat16* RowOfTiles(Bfloat16* tiles, int64_t s, int64_t steps) {
  return tiles + s / kTileRows * steps * kTileValues + s % kTileRows * kTileColumns;
}

template <typename From>
POPTRANSFORMER_INLINE void PutRow(const From& from, int64_t dim, int64_t steps, Bfloat16* to) {
  for (int64_t d = 0; d < steps; ++d) _mm512_storeu_si512(to + d * kTileValues, Load32(from, d * kTileColumns, dim));
}

inline void PutZeros(int64_t steps, Bfloat16* to) {
  for (int64_t d = 0; d < steps; ++d) _mm512_storeu_si512(to + d * kTileValues, _mm512_setzero_si512());
}

template <typename D, typename T>
void PackTokens(const AttentionArgs& a, int64_t row, int64_t kv_head, const void* tokens, int64_t first, int64_t end,
                int64_t block, int64_t steps, float* line, Bfloat16* tiles) {
  const int64_t cached = a.cache_len[row];
  for (int64_t s = first; s < end; ++s) {
    const D* const from = static_cast<const D*>(tokens) + TokenOffset(a, row, s - cached, a.num_kv_heads, kv_head);
    PutRow(NewRow<D, T>(from, a.head_dim, line), a.head_dim, steps, RowOfTiles(tiles, s - block, steps));
  }
}

// Positions [begin, end) of one head as tiles [.., steps, 16, 32]: below cache_len from the cache, then from the new tokens,
// rounded as in the cache. Position `block` is the first row. Rows before and after, up to whole runs of 32, are zeros.
template <typename T>
void PackPositions(const AttentionArgs& a, int64_t row, int64_t kv_head, const void* cache, const void* tokens, int64_t begin,
                   int64_t end, int64_t block, int64_t steps, float* line, Bfloat16* tiles) {
  const int64_t dim = a.head_dim, cached = a.cache_len[row];
  const int64_t split = begin > cached ? begin : Min(end, cached);
  for (int64_t s = (begin - block) / kTileColumns * kTileColumns; s < begin - block; ++s) {
    PutZeros(steps, RowOfTiles(tiles, s, steps));
  }
  const T* from = static_cast<const T*>(cache) + CacheOffset(a, row, kv_head, begin);
  for (int64_t s = begin; s < split; ++s, from += CacheRow(a.cache_type, dim)) {
    PutRow(Row<T>(from, dim), dim, steps, RowOfTiles(tiles, s - block, steps));
  }
  switch (a.dtype) {
    case DType::kFloat32:
      PackTokens<float, T>(a, row, kv_head, tokens, split, end, block, steps, line, tiles);
      break;
    case DType::kBfloat16:
      PackTokens<Bfloat16, T>(a, row, kv_head, tokens, split, end, block, steps, line, tiles);
      break;
    case DType::kFloat16:
      PackTokens<Float16, T>(a, row, kv_head, tokens, split, end, block, steps, line, tiles);
      break;
  }
  for (int64_t s = end - block; s < RoundUp(end - block, kTileColumns); ++s) PutZeros(steps, RowOfTiles(tiles, s, steps));
}

// Tiles of 32 positions, [2, steps, 16, 32], to tiles of their features, [2 * steps, 16, 32].
void TurnPositions(const Bfloat16* tiles, int64_t steps, Bfloat16* out) {
  for (int64_t d = 0; d < steps; ++d) {
    Vec low[kLanes], high[kLanes];  // pairs of positions, of half the features each
    POPTRANSFORMER_UNROLL
    for (int64_t p = 0; p < kLanes; ++p) {
      const Bfloat16* const even = tiles + (p / 8 * steps + d) * kTileValues + p % 8 * 2 * kTileColumns;
      const __m512i x = _mm512_loadu_si512(even), y = _mm512_loadu_si512(even + kTileColumns);
      low[p] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
      high[p] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
    }
    Transpose(low);
    Transpose(high);
    // Unpacking takes 4 of each 8 features.
    POPTRANSFORMER_UNROLL
    for (int64_t i = 0; i < kLanes; ++i) {
      Bfloat16* const to = out + 2 * d * kTileValues + (i / 4 * 8 + i % 4) * kTileColumns;
      _mm512_storeu_si512(to, _mm512_castps_si512(low[i]));
      _mm512_storeu_si512(to + 4 * kTileColumns, _mm512_castps_si512(high[i]));
    }
  }
}

}  // namespace
}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_AMX_TILES_H_
