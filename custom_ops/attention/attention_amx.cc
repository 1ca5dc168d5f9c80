// Prefill tiles whose products are made by the CPU's tile unit: operands rounded to bfloat16, sums float32.
//
// Queries lie across the lanes of vectors and the columns of tiles, 16 together, so that softmax needs no sums across lanes:
//   scores^T [positions, queries] = keys [positions, H] * query^T [H, queries]
//   out^T    [H, queries]         = out^T * rescale + values^T [H, positions] * weights^T [positions, queries]
// Keys are tiles as they lie, values are turned, both once for all queries of a tile. Softmax takes most of the time: it is
// computed in powers of two, with a polynomial that is a little better than the rounding of its result to bfloat16. The sum of
// the weights is that of the rounded ones.
//
// Blocks of kKeyBlock positions begin at multiples of it and positions have their place in it, whatever the window, so that a
// query's result does not depend on which others share its tile. What a pair of 16 queries does not see is not computed, down to
// runs of 32 positions; the rest is masked. Running maxima begin at the least finite number, not at minus infinity: some queries
// of a vector may see nothing of its first block.
//
// Queries are not scaled before they are rounded: scores are, by the multiply-add that subtracts the maximum.
#include "attention/attention_amx_tiles.h"
#include "attention/attention_kernel.h"

namespace poptransformer {
namespace amx {
namespace {

constexpr int64_t kMaxTileQueries = 512;
constexpr int64_t kKeyBlock = 128;
constexpr int64_t kWeightsStride = 2 * kLanes * sizeof(float);  // bytes; two rows of scores become one of weights
constexpr int64_t kPair = 2;  // vectors of 16 queries that share loaded keys and values
constexpr float kSlack = 6;  // weights may grow to 2^6 before sums are scaled down
constexpr float kLog2E = 1.44269504f, kLeastFinite = -3.402823466e38f;

// What _tile_loadconfig reads.
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};

void ConfigureTiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.num_rows[tile] = kTileRows;
  }
  _tile_loadconfig(&config);
}

constexpr int64_t kVectors = kMaxTileQueries / kLanes;
constexpr int64_t kBlockTiles = kKeyBlock / kTileRows;

// Where things lie in a task's scratch; null where there is none.
struct Places {
  Places(const AttentionArgs& a, float* scratch) : steps(RoundUp(a.head_dim, kTileColumns) / kTileColumns), num_out(2 * steps) {
    const auto take = [&](int64_t wanted) {
      float* const taken = scratch == nullptr ? nullptr : scratch + num_floats;
      num_floats += wanted;
      return taken;
    };
    query = reinterpret_cast<Bfloat16*>(take(kVectors * steps * kSums));
    keys = reinterpret_cast<Bfloat16*>(take(kBlockTiles * steps * kSums));
    rows = reinterpret_cast<Bfloat16*>(take(kBlockTiles * steps * kSums));
    values = reinterpret_cast<Bfloat16*>(take(kBlockTiles / 2 * num_out * kSums));
    scores = take(kPair * kBlockTiles * kSums);
    out = take(kVectors * num_out * kSums);
    maxima = take(kMaxTileQueries);
    sums = take(kMaxTileQueries);
    tokens = take(kMaxTileQueries);
    slopes = take(kMaxTileQueries);
    line = take(RoundUp(a.head_dim, kLanes));
  }

  int64_t num_floats = 0;
  int64_t steps, num_out;  // tiles that hold H features: 32 and 16 each
  Bfloat16* query;         // [vectors, steps, 16 pairs, 16, 2]
  Bfloat16* keys;          // [kKeyBlock / 16, steps, 16, 32]
  Bfloat16* rows;          // the same of values, before they are turned
  Bfloat16* values;        // [kKeyBlock / 32, num_out, 16, 32]
  float* scores;           // [kPair, kKeyBlock, 16]
  float* out;              // [vectors, num_out, 16, 16]
  float* maxima;           // [queries], of scores times log2(e), as the next three
  float* sums;
  float* tokens;           // from the tile's first; idle lanes have the last one's
  float* slopes;           // times log2(e)
  float* line;             // [H]
};

int64_t PrefillScratchFloats(const AttentionArgs& a) { return Places(a, nullptr).num_floats; }

// ---- Products -------------------------------------------------------------------------------------------------------

POPTRANSFORMER_INLINE void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Sums of two tiles of rows, below each other, times two of columns, side by side.
POPTRANSFORMER_INLINE void MultiplyTiles(const Bfloat16* upper, const Bfloat16* lower, const void* left, const void* right,
                                         int64_t stride) {
  _tile_loadd(6, left, stride);
  _tile_loadd(4, upper, 64);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, lower, 64);
  _tile_dpbf16ps(2, 5, 6);
  _tile_loadd(7, right, stride);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
}

// scores [2, kKeyBlock, 16] of runs [begin, end) of 32 keys and two vectors of queries.
void MultiplyKeys(const Bfloat16* keys, const Bfloat16* query, int64_t steps, int64_t begin, int64_t end, float* scores) {
  const int64_t size = steps * kTileValues;
  for (int64_t run = begin; run < end; ++run) {
    const Bfloat16* const upper = keys + 2 * run * size;
    ZeroSums();
    for (int64_t d = 0; d < size; d += kTileValues) MultiplyTiles(upper + d, upper + size + d, query + d, query + size + d, 64);
    float* const left = scores + 2 * run * kSums;
    float* const right = left + kKeyBlock * kLanes;
    _tile_stored(0, left, 64);
    _tile_stored(2, left + kSums, 64);
    _tile_stored(1, right, 64);
    _tile_stored(3, right + kSums, 64);
  }
}

// out [2, num_out, 16, 16] += values^T weights of runs [begin, end) of 32 positions; without what is there if is_first.
void MultiplyValues(const Bfloat16* values, const float* weights, int64_t num_out, int64_t begin, int64_t end, bool is_first,
                    float* out) {
  for (int64_t o = 0; o < num_out; o += 2) {
    float* const left = out + o * kSums;
    float* const right = left + num_out * kSums;
    if (is_first) {
      ZeroSums();
    } else {
      _tile_loadd(0, left, 64);
      _tile_loadd(1, right, 64);
      _tile_loadd(2, left + kSums, 64);
      _tile_loadd(3, right + kSums, 64);
    }
    for (int64_t run = begin; run < end; ++run) {
      const Bfloat16* const upper = values + (run * num_out + o) * kTileValues;
      const float* const pairs = weights + run * kTileColumns * kLanes;
      MultiplyTiles(upper, upper + kTileValues, pairs, pairs + kKeyBlock * kLanes, kWeightsStride);
    }
    _tile_stored(0, left, 64);
    _tile_stored(1, right, 64);
    _tile_stored(2, left + kSums, 64);
    _tile_stored(3, right + kSums, 64);
  }
}

// ---- Softmax of one vector of queries -------------------------------------------------------------------------------

// 2^x, relative error below 1.1e-4, for x up to 127; 0 for -infinity.
POPTRANSFORMER_INLINE Vec PowerOfTwo(Vec x) {
  // 1 + r p(r) for the fraction r in 0 .. 1, exact at both ends, fitted to least relative error between.
  const Vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = MultiplyAdd(r, Broadcast(0.07826797f), Broadcast(0.22630768f));
  p = MultiplyAdd(p, r, Broadcast(0.69542435f));
  p = MultiplyAdd(p, r, Broadcast(1.0f));
  return _mm512_scalef_ps(p, x);
}

// Scores [n, 16] to weights, of each two positions [16, 2] bfloat16 in place of the first one's scores, scores being multiplied
// by `factor` first. Returns by what sums so far are to be multiplied.
POPTRANSFORMER_INLINE Vec Softmax(float* scores, int64_t n, Vec factor, float* maxima, float* sums) {
  Vec most[4];
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < 4; ++i) most[i] = Load(scores + i * kLanes);
  for (int64_t s = 4; s < n; s += 4) {
    POPTRANSFORMER_UNROLL
    for (int i = 0; i < 4; ++i) most[i] = Max(most[i], Load(scores + (s + i) * kLanes));
  }
  const Vec before = Load(maxima);
  const Vec here = Mul(Max(Max(most[0], most[1]), Max(most[2], most[3])), factor);
  const Vec maximum = SelectLess(Add(before, Broadcast(kSlack)), here, here, before);
  const Vec rescale = PowerOfTwo(Sub(before, maximum));
  const Vec offset = Sub(Zero(), maximum);
  // Which of two rows of 16 a number comes from, by turns.
  const __m512i turns = _mm512_add_epi16(
      _mm512_set1_epi32(16 << 16), _mm512_cvtepu16_epi32(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
  const __m512i indices = _mm512_add_epi16(turns, _mm512_slli_epi32(turns, 16));
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  Vec sum[2] = {Mul(Load(sums), rescale), Zero()};
  for (int64_t s = 0; s < n; s += 8) {
    POPTRANSFORMER_UNROLL
    for (int i = 0; i < 4; ++i) {
      float* const pair = scores + (s + 2 * i) * kLanes;
      const Vec even = PowerOfTwo(MultiplyAdd(Load(pair), factor, offset));
      const Vec odd = PowerOfTwo(MultiplyAdd(Load(pair + kLanes), factor, offset));
      const __m512i both = _mm512_permutexvar_epi16(indices, RoundPair(even, odd));
      _mm512_storeu_si512(pair, both);
      sum[i % 2] = _mm512_dpbf16_ps(sum[i % 2], (__m512bh)both, ones);
    }
  }
  Store(sums, Add(sum[0], sum[1]));
  Store(maxima, maximum);
  return rescale;
}

// The next three change scores [n, 16] of one vector of queries, whose tokens are counted from the tile's first one.
//
// score * factor + slope * (first + s - token).
void AddSlopes(Vec slope, Vec tokens, Vec factor, float first, int64_t n, float* scores) {
  const Vec offset = Sub(Broadcast(first), tokens);
  for (int64_t s = 0; s < n; ++s) {
    const Vec distance = Add(Broadcast(static_cast<float>(s)), offset);
    Store(scores + s * kLanes, MultiplyAdd(slope, distance, Mul(Load(scores + s * kLanes), factor)));
  }
}

// Hides positions [first, last) that are before `begin`.
void HideBefore(Vec begin, int64_t first, int64_t last, float* scores) {
  for (int64_t s = first; s < last; ++s) {
    float* const score = scores + s * kLanes;
    Store(score, SelectLess(Broadcast(static_cast<float>(s)), begin, Broadcast(-kInfinity), Load(score)));
  }
}

// Hides positions [first, last) that are not before `end`.
void HideFrom(Vec end, int64_t first, int64_t last, float* scores) {
  for (int64_t s = first; s < last; ++s) {
    float* const score = scores + s * kLanes;
    Store(score, SelectLess(Broadcast(static_cast<float>(s)), end, Load(score), Broadcast(-kInfinity)));
  }
}

// ---- A tile of queries ----------------------------------------------------------------------------------------------

// Query i of a tile is head i % num_heads of token i / num_heads.
struct Queries {
  Queries(const AttentionArgs& a, const PrefillTile& tile)
      : a(a), tile(tile), num_queries(tile.num_heads * tile.num_tokens),
        first_head(tile.kv_head * GroupSize(a) + tile.first_head),
        first_position(a.cache_len[tile.row] + tile.first_token),
        context(a.context_len ? Min(a.context_len[tile.row], a.cache_len[tile.row] + a.num_tokens[tile.row]) : 0) {}

  int64_t Token(int64_t i) const { return Min(i, num_queries - 1) / tile.num_heads; }
  int64_t Offset(int64_t i) const {
    return TokenOffset(a, tile.row, tile.first_token + i / tile.num_heads, a.num_heads, first_head + i % tile.num_heads);
  }
  // A token sees positions [Begin, End).
  int64_t Begin(int64_t token) const { return a.window > 0 ? Larger(0, first_position + token + 1 - a.window) : 0; }
  int64_t End(int64_t token) const { return Larger(first_position + token + 1, context); }

  const AttentionArgs& a;
  const PrefillTile& tile;
  int64_t num_queries, first_head, first_position, context;
};

template <typename D>
void PackQueries(const Queries& queries, int64_t steps, Bfloat16* out) {
  const AttentionArgs& a = queries.a;
  const Vec sign = Broadcast(a.scale > 0 ? 1.0f : a.scale < 0 ? -1.0f : 0.0f);
  for (int64_t i = 0; i < RoundUp(queries.num_queries, kPair * kLanes); i += kLanes) {
    const D* rows[kLanes];
    const int64_t n = Larger(0, Min(kLanes, queries.num_queries - i));
    for (int64_t q = 0; q < n; ++q) rows[q] = static_cast<const D*>(a.query) + queries.Offset(i + q);
    for (int64_t d = 0; d < steps; ++d, out += kTileValues) {
      Vec pairs[kLanes];
      for (int64_t q = 0; q < kLanes; ++q) {
        pairs[q] = Zero();
        if (q >= n) continue;
        const int64_t h = d * kTileColumns;
        pairs[q] = _mm512_castsi512_ps(RoundPair(Mul(LoadFeatures(rows[q], h, a.head_dim), sign),
                                                 Mul(LoadFeatures(rows[q], h + kLanes, a.head_dim), sign)));
      }
      Transpose(pairs);
      POPTRANSFORMER_UNROLL
      for (int64_t p = 0; p < kLanes; ++p) _mm512_storeu_si512(out + p * kTileColumns, _mm512_castps_si512(pairs[p]));
    }
  }
}

template <typename D>
void StoreOut(const Queries& queries, const Places& at) {
  const AttentionArgs& a = queries.a;
  for (int64_t i = 0; i < queries.num_queries; i += kLanes) {
    const Vec factor = Div(Broadcast(1.0f), Load(at.sums + i));
    D* rows[kLanes];
    const int64_t n = Min(kLanes, queries.num_queries - i);
    for (int64_t q = 0; q < n; ++q) rows[q] = static_cast<D*>(a.out) + queries.Offset(i + q);
    for (int64_t o = 0; o * kLanes < a.head_dim; ++o) {
      const float* const from = at.out + (i / kLanes * at.num_out + o) * kSums;
      Vec block[kLanes];
      POPTRANSFORMER_UNROLL
      for (int64_t h = 0; h < kLanes; ++h) block[h] = Mul(Load(from + h * kLanes), factor);
      Transpose(block);
      const int lanes = static_cast<int>(Min(kLanes, a.head_dim - o * kLanes));
      for (int64_t q = 0; q < n; ++q) StorePartial(rows[q] + o * kLanes, block[q], lanes);
    }
  }
}

// One block of positions for a pair of vectors of queries from vector v on, which see some of it.
void AttendBlock(const Queries& queries, const Places& at, int64_t v, int64_t block, float factor, bool is_first) {
  const AttentionArgs& a = queries.a;
  const int64_t begin = Larger(block, queries.Begin(queries.Token(v * kLanes))) - block;
  const int64_t end = Min(block + kKeyBlock, queries.End(queries.Token((v + kPair) * kLanes - 1))) - block;
  const int64_t first_run = begin / kTileColumns, end_run = RoundUp(end, kTileColumns) / kTileColumns;
  const int64_t first = first_run * kTileColumns, last = end_run * kTileColumns;
  const int64_t from_first = block - queries.first_position;  // of the block
  float* const out = at.out + v * at.num_out * kSums;
  MultiplyKeys(at.keys, at.query + v * at.steps * kTileValues, at.steps, first_run, end_run, at.scores);
  for (int64_t side = 0; side < kPair; ++side) {
    const int64_t i = (v + side) * kLanes;
    if (i >= queries.num_queries) break;
    float* const scores = at.scores + side * kKeyBlock * kLanes;
    const int64_t first_token = queries.Token(i), last_token = queries.Token(i + kLanes - 1);
    const Vec tokens = Load(at.tokens + i);
    Vec scale = Broadcast(factor);
    if (a.alibi_slopes) {
      AddSlopes(Load(at.slopes + i), tokens, scale, static_cast<float>(from_first + first), last - first,
                scores + first * kLanes);
      scale = Broadcast(1.0f);
    }
    if (queries.Begin(last_token) > block + first) {
      const Vec least = Add(tokens, Broadcast(static_cast<float>(1 - a.window - from_first)));
      HideBefore(least, first, Min(last, queries.Begin(last_token) - block), scores);
    }
    if (queries.End(first_token) < block + last) {
      const Vec most = Max(Add(tokens, Broadcast(static_cast<float>(1 - from_first))),
                           Broadcast(static_cast<float>(queries.context - block)));
      HideFrom(most, Larger(first, queries.End(first_token) - block), last, scores);
    }
    const Vec rescale = Softmax(scores + first * kLanes, last - first, scale, at.maxima + i, at.sums + i);
    if (is_first || _mm512_cmp_ps_mask(rescale, Broadcast(1.0f), _CMP_NEQ_UQ) == 0) continue;
    float* const sums = out + side * at.num_out * kSums;
    for (int64_t j = 0; j < at.num_out * kSums; j += kLanes) Store(sums + j, Mul(Load(sums + j), rescale));
  }
  MultiplyValues(at.values, at.scores, at.num_out, first_run, end_run, is_first, out);
}

template <typename T>
void AttendBlocks(const Queries& queries, const Places& at) {
  const AttentionArgs& a = queries.a;
  const PrefillTile& tile = queries.tile;
  const float scale = a.scale < 0 ? -a.scale : a.scale;
  const float factor = scale > 0 ? scale * kLog2E : 1.0f;
  const int64_t tile_begin = queries.Begin(0), tile_end = queries.End(tile.num_tokens - 1);
  for (int64_t block = tile_begin / kKeyBlock * kKeyBlock; block < tile_end; block += kKeyBlock) {
    const int64_t begin = Larger(block, tile_begin), end = Min(block + kKeyBlock, tile_end);
    PackPositions<T>(a, tile.row, tile.kv_head, a.k_cache, a.key, begin, end, block, at.steps, at.line, at.keys);
    PackPositions<T>(a, tile.row, tile.kv_head, a.v_cache, a.value, begin, end, block, at.steps, at.line, at.rows);
    for (int64_t s = (begin - block) / kTileColumns * kTileColumns; s < end - block; s += kTileColumns) {
      TurnPositions(at.rows + s / kTileRows * at.steps * kTileValues, at.steps,
                    at.values + s / kTileColumns * at.num_out * kTileValues);
    }
    for (int64_t v = 0; v * kLanes < queries.num_queries; v += kPair) {
      const int64_t first_seen = queries.Begin(queries.Token(v * kLanes));
      const int64_t end_seen = queries.End(queries.Token((v + kPair) * kLanes - 1));
      if (first_seen < end && begin < end_seen) AttendBlock(queries, at, v, block, factor, first_seen >= block);
    }
  }
}

void PrefillTileAny(const AttentionArgs& a, const PrefillTile& tile, float* scratch) {
  const Places at(a, scratch);
  const Queries queries(a, tile);
  if (tile.first_head == 0) {
    for (int64_t t = 0; t < tile.num_tokens; ++t) AppendToken(a, tile.row, tile.kv_head, tile.first_token + t, at.line);
  }
  for (int64_t i = 0; i < RoundUp(queries.num_queries, kLanes); ++i) {
    at.tokens[i] = static_cast<float>(queries.Token(i));
    at.slopes[i] = a.alibi_slopes ? kLog2E * a.alibi_slopes[queries.first_head + i % tile.num_heads] : 0.0f;
    at.maxima[i] = kLeastFinite;
    at.sums[i] = 0;
  }
  switch (a.dtype) {
    case DType::kFloat32:
      PackQueries<float>(queries, at.steps, at.query);
      break;
    case DType::kBfloat16:
      PackQueries<Bfloat16>(queries, at.steps, at.query);
      break;
    case DType::kFloat16:
      PackQueries<Float16>(queries, at.steps, at.query);
      break;
  }
  ConfigureTiles();
  switch (a.cache_type) {
    case CacheType::kFloat32:
      AttendBlocks<float>(queries, at);
      break;
    case CacheType::kBfloat16:
      AttendBlocks<Bfloat16>(queries, at);
      break;
    case CacheType::kFloat16:
      AttendBlocks<Float16>(queries, at);
      break;
    case CacheType::kFloat8:
      AttendBlocks<Float8>(queries, at);
      break;
    case CacheType::kInt8:
      AttendBlocks<Int8>(queries, at);
      break;
  }
  _tile_release();
  switch (a.dtype) {
    case DType::kFloat32:
      return StoreOut<float>(queries, at);
    case DType::kBfloat16:
      return StoreOut<Bfloat16>(queries, at);
    case DType::kFloat16:
      return StoreOut<Float16>(queries, at);
  }
}

}  // namespace

PrefillKernels Prefill() { return {kMaxTileQueries, PrefillScratchFloats, PrefillTileAny}; }

}  // namespace amx
}  // namespace poptransformer
