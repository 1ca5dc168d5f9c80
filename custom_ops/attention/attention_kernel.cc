// Decode chunks and prefill tiles in float32; compiled once per instruction set, see simd.h.
//
// Decode is bound by reading the cache, so a chunk reads each key and value once for all G = N / K query heads: dot products in
// blocks of kLanes positions that end in one vector of sums, softmax over the chunk, then the weighted values in registers.
//
// Prefill is bound by multiply-adds. Queries lie across the lanes, so that softmax needs no sums across lanes, and keys and
// values are broadcast one feature at a time, so that neither is transposed and head_dim needs no padding:
//   scores^T [positions, queries] = keys [positions, H] * query^T [H, queries]
//   out^T    [H, queries]         = out^T * rescale + values^T [H, positions] * weights^T [positions, queries]
// Both are one routine, kBlockRows by kBlockVectors registers. A block of kKeyBlock positions is first widened to float32 in
// scratch; running maxima and sums keep memory independent of the context length. Blocks begin where the tile's first window
// does and end with the last position that any of its queries sees, so that what all of them hide is not read.
#include "attention/attention_kernel.h"

#include "attention/attention_rows.h"
#include "attention/attention_tokens.h"
#include "common/simd_bytes.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

// ---- Decode ---------------------------------------------------------------------------------------------------------

constexpr int64_t kHeadBlock = 4;                            // query heads that share a loaded key or value
constexpr int kValueVectors = kLanes == 16 ? 4 : 2;          // vectors of out kept in registers per query head
constexpr int64_t kValueRows = 64;                           // positions whose values stay in L1 between passes over H
constexpr int64_t kScoreStride = kDecodeChunk + 2 * kLanes;  // the last block of positions may reach over the end
static_assert(kDecodeChunk <= kMaxScales, "a chunk's scales have room");

POPTRANSFORMER_INLINE int64_t PaddedGroup(const AttentionArgs& a) { return RoundUp(GroupSize(a), kHeadBlock); }

int64_t DecodeScratchFloats(const AttentionArgs& a) {
  return PaddedGroup(a) * (PaddedDim(a) + kScoreStride)  // queries, scores
         + PaddedDim(a);                                 // one row, of DecodeMerge
}

// One chunk: out [G, PaddedDim] not yet divided, then sums [G], then maxima [G].
int64_t DecodePartialFloats(const AttentionArgs& a) { return GroupSize(a) * (PaddedDim(a) + 2); }

// Asks for n bytes that will be read a little later. The hardware's prefetchers stop at every 4 KiB page; asking ahead, a few
// lines between the arithmetic, reads memory about a quarter faster. Past the end of a buffer it does nothing.
constexpr int64_t kPrefetchBytes = 2048;
POPTRANSFORMER_INLINE void PrefetchAfter(const void* p, int64_t n) {
  const char* const bytes = static_cast<const char*>(p) + kPrefetchBytes;
  POPTRANSFORMER_UNROLL
  for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(bytes + i);
}

// Scores of kPositions positions and kHeads query heads; rows of keys are `stride` elements apart. `last` is the last row of keys there is; scores past it mean nothing.
template <int kPositions, int kHeads, typename T>
POPTRANSFORMER_INLINE void ScoreBlock(const T* keys, int64_t stride, int64_t first, int64_t last, int64_t dim,
                                      const float* query, int64_t query_stride, float* scores) {
  static_assert(kPositions * kHeads == kLanes, "one vector of sums");
  const T* rows[kPositions];
  POPTRANSFORMER_UNROLL
  for (int p = 0; p < kPositions; ++p) rows[p] = keys + Min(first + p, last) * stride;
  Vec sums[kLanes];
  POPTRANSFORMER_UNROLL
  for (int i = 0; i < kLanes; ++i) sums[i] = Zero();
  int64_t h = 0;
  for (; h + kLanes <= dim; h += kLanes) {
    PrefetchAfter(keys + first * stride + h * kPositions, kPositions * kLanes * sizeof(T));
    Vec key[kPositions];
    POPTRANSFORMER_UNROLL
    for (int p = 0; p < kPositions; ++p) key[p] = Load(rows[p] + h);
    POPTRANSFORMER_UNROLL
    for (int g = 0; g < kHeads; ++g) {
      const Vec q = Load(query + g * query_stride + h);
      POPTRANSFORMER_UNROLL
      for (int p = 0; p < kPositions; ++p) sums[g * kPositions + p] = MultiplyAdd(key[p], q, sums[g * kPositions + p]);
    }
  }
  if (h < dim) {
    const int rest = static_cast<int>(dim - h);
    Vec key[kPositions];
    POPTRANSFORMER_UNROLL
    for (int p = 0; p < kPositions; ++p) key[p] = LoadPartial(rows[p] + h, rest);
    POPTRANSFORMER_UNROLL
    for (int g = 0; g < kHeads; ++g) {
      const Vec q = Load(query + g * query_stride + h);
      POPTRANSFORMER_UNROLL
      for (int p = 0; p < kPositions; ++p) sums[g * kPositions + p] = MultiplyAdd(key[p], q, sums[g * kPositions + p]);
    }
  }
  const Vec all = ReduceAddAll(sums);
  if (kHeads == 1) {
    Store(scores + first, all);
    return;
  }
  float lanes[kLanes];
  Store(lanes, all);
  POPTRANSFORMER_UNROLL
  for (int g = 0; g < kHeads; ++g) {
    memcpy(scores + g * kScoreStride + first, lanes + g * kPositions, kPositions * sizeof(float));
  }
}

template <int kHeads, typename T>
POPTRANSFORMER_INLINE void ScoreLanes(const T* keys, int64_t stride, int64_t first, int64_t last, int64_t dim,
                                      const float* query, int64_t query_stride, float* scores) {
  constexpr int kPositions = kLanes / kHeads;
  for (int i = 0; i < kHeads; ++i) {
    ScoreBlock<kPositions, kHeads>(keys, stride, first + i * kPositions, last, dim, query, query_stride, scores);
  }
}

// out[g] += sum over n rows, `stride` elements apart, of weights[g, s] * values[s], for kHeads query heads and kVectors vectors of features. The last
// vector has `rest` features if that is not 0. Rows are taken kHeadBlock / kHeads at a time, to have independent sums.
template <int kHeads, int kVectors, bool kPartial, typename T>
POPTRANSFORMER_INLINE void WeightedSum(const T* values, int64_t n, int64_t stride, int rest, const float* weights, float* out,
                                       int64_t out_stride) {
  constexpr int kRows = static_cast<int>(kHeadBlock) / kHeads;
  Vec sums[kRows][kHeads][kVectors];
  POPTRANSFORMER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    POPTRANSFORMER_UNROLL
    for (int g = 0; g < kHeads; ++g) {
      POPTRANSFORMER_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][g][v] = r == 0 ? Load(out + g * out_stride + v * kLanes) : Zero();
    }
  }
  const auto add_row = [&](int64_t s, Vec(&into)[kHeads][kVectors]) __attribute__((always_inline)) {
    Vec value[kVectors];
    POPTRANSFORMER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const T* from = values + s * stride + v * kLanes;
      value[v] = kPartial && v == kVectors - 1 ? LoadPartial(from, rest) : Load(from);
    }
    POPTRANSFORMER_UNROLL
    for (int g = 0; g < kHeads; ++g) {
      const Vec weight = Broadcast(weights[g * kScoreStride + s]);
      POPTRANSFORMER_UNROLL
      for (int v = 0; v < kVectors; ++v) into[g][v] = MultiplyAdd(weight, value[v], into[g][v]);
    }
  };
  int64_t s = 0;
  for (; s + kRows <= n; s += kRows) {
    for (int r = 0; r < kRows; ++r) PrefetchAfter(values + (s + r) * stride, kVectors * kLanes * sizeof(T));
    POPTRANSFORMER_UNROLL
    for (int r = 0; r < kRows; ++r) add_row(s + r, sums[r]);
  }
  for (; s < n; ++s) add_row(s, sums[0]);
  POPTRANSFORMER_UNROLL
  for (int g = 0; g < kHeads; ++g) {
    POPTRANSFORMER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      Vec sum = sums[0][g][v];
      POPTRANSFORMER_UNROLL
      for (int r = 1; r < kRows; ++r) sum = Add(sum, sums[r][g][v]);
      Store(out + g * out_stride + v * kLanes, sum);
    }
  }
}

template <int kHeads, int kVectors, typename T>
void WeightedSumOfWidth(const T* values, int64_t n, int64_t stride, int rest, const float* weights, float* out,
                        int64_t out_stride) {
  if (rest == 0) {
    WeightedSum<kHeads, kVectors, false>(values, n, stride, rest, weights, out, out_stride);
  } else {
    WeightedSum<kHeads, kVectors, true>(values, n, stride, rest, weights, out, out_stride);
  }
}

// All H features for kHeads query heads.
template <int kHeads, typename T>
void WeightedSums(const T* values, int64_t stride, int64_t n, int64_t dim, const float* weights, float* out,
                  int64_t out_stride) {
  for (int64_t h = 0; h < dim; h += kValueVectors * kLanes) {
    const int64_t features = Min(dim - h, kValueVectors * kLanes);
    const int rest = static_cast<int>(features % kLanes);
    switch ((features + kLanes - 1) / kLanes) {
      case 1:
        WeightedSumOfWidth<kHeads, 1>(values + h, n, stride, rest, weights, out + h, out_stride);
        break;
      case 2:
        WeightedSumOfWidth<kHeads, 2>(values + h, n, stride, rest, weights, out + h, out_stride);
        break;
      case 3:
        if (kValueVectors >= 3) {
          WeightedSumOfWidth<kHeads, kValueVectors < 3 ? 1 : 3>(values + h, n, stride, rest, weights, out + h, out_stride);
        }
        break;
      case 4:
        if (kValueVectors >= 4) {
          WeightedSumOfWidth<kHeads, kValueVectors < 4 ? 1 : 4>(values + h, n, stride, rest, weights, out + h, out_stride);
        }
        break;
    }
  }
}

constexpr float kLaneNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// scores[s] += slope * (first + s) for n positions, and some beyond.
void AddSlope(float slope, int64_t first, int64_t n, float* scores) {
  const Vec lanes = Load(kLaneNumbers);
  for (int64_t s = 0; s < n; s += kLanes) {
    const Vec distance = Add(Broadcast(static_cast<float>(first + s)), lanes);
    Store(scores + s, MultiplyAdd(Broadcast(slope), distance, Load(scores + s)));
  }
}

template <typename T>
void DecodeChunkOf(const AttentionArgs& a, const DecodeChunk& chunk, float* partial, float* scratch) {
  const int64_t dim = a.head_dim, padded = PaddedDim(a), group = GroupSize(a);
  float* const query = scratch;                                    // [PaddedGroup, PaddedDim], scaled
  float* const scores = query + PaddedGroup(a) * padded;           // [PaddedGroup, kScoreStride]
  float* const out = partial;                                      // [G, PaddedDim]
  float* const sums = partial + group * padded;                    // [G]
  float* const maxima = sums + group;                              // [G]

  for (int64_t g = 0; g < PaddedGroup(a); ++g) {
    float* const q = query + g * padded;
    for (int64_t h = dim / kLanes * kLanes; h < padded; h += kLanes) Store(q + h, Zero());
    if (g < group) {
      WidenFrom(a.dtype, a.query, TokenOffset(a, chunk.row, 0, a.num_heads, chunk.kv_head * group + g), dim, a.scale, q);
    } else {
      for (int64_t h = 0; h < padded; h += kLanes) Store(q + h, Zero());
    }
  }

  const int64_t n = chunk.end - chunk.begin, stride = CacheRow(a.cache_type, dim);
  const int64_t offset = CacheOffset(a, chunk.row, chunk.kv_head, chunk.begin);
  const T* const keys = static_cast<const T*>(a.k_cache) + offset;
  const T* const values = static_cast<const T*>(a.v_cache) + offset;
  for (int64_t s = 0; s < n; s += kLanes) {
    for (int64_t g = 0; g < group;) {
      const float* q = query + g * padded;
      float* to = scores + g * kScoreStride;
      const int64_t left = group - g;
      if (left >= 3) {
        ScoreLanes<4>(keys, stride, s, n - 1, dim, q, padded, to);
        g += 4;
      } else if (left == 2) {
        ScoreLanes<2>(keys, stride, s, n - 1, dim, q, padded, to);
        g += 2;
      } else {
        ScoreLanes<1>(keys, stride, s, n - 1, dim, q, padded, to);
        g += 1;
      }
    }
  }

  MultiplyByScales(keys, dim, n, group, scores, kScoreStride);

  for (int64_t g = 0; g < group; ++g) {
    float* const weights = scores + g * kScoreStride;
    if (a.alibi_slopes) {
      AddSlope(a.alibi_slopes[chunk.kv_head * group + g], chunk.begin - a.cache_len[chunk.row], n, weights);
    }
    for (int64_t s = n; s < RoundUp(n, kLanes); ++s) weights[s] = -kInfinity;
    Vec maximum = Load(weights);
    for (int64_t s = kLanes; s < n; s += kLanes) maximum = Max(maximum, Load(weights + s));
    maxima[g] = ReduceMax(maximum);
    maximum = Broadcast(maxima[g]);
    Vec sum = Zero();
    for (int64_t s = 0; s < n; s += kLanes) {
      const Vec weight = Exp(Sub(Load(weights + s), maximum));
      Store(weights + s, weight);
      sum = Add(sum, weight);
    }
    sums[g] = ReduceAdd(sum);
    for (int64_t h = 0; h < padded; h += kLanes) Store(out + g * padded + h, Zero());
  }

  MultiplyByScales(values, dim, n, group, scores, kScoreStride);  // the weights
  for (int64_t s = 0; s < n; s += kValueRows) {
    const int64_t rows = Min(kValueRows, n - s);
    for (int64_t g = 0; g < group;) {
      const float* weights = scores + g * kScoreStride + s;
      float* to = out + g * padded;
      const int64_t left = group - g;
      if (left >= 4) {
        WeightedSums<4>(values + s * stride, stride, rows, dim, weights, to, padded);
        g += 4;
      } else if (left >= 2) {
        WeightedSums<2>(values + s * stride, stride, rows, dim, weights, to, padded);
        g += 2;
      } else {
        WeightedSums<1>(values + s * stride, stride, rows, dim, weights, to, padded);
        g += 1;
      }
    }
  }
}

void DecodeChunkAny(const AttentionArgs& a, const DecodeChunk& chunk, float* partial, float* scratch) {
  if (chunk.end > a.cache_len[chunk.row]) AppendToken(a, chunk.row, chunk.kv_head, 0, scratch);
  switch (a.cache_type) {
    case CacheType::kFloat32:
      return DecodeChunkOf<float>(a, chunk, partial, scratch);
    case CacheType::kBfloat16:
      return DecodeChunkOf<Bfloat16>(a, chunk, partial, scratch);
    case CacheType::kFloat16:
      return DecodeChunkOf<Float16>(a, chunk, partial, scratch);
    case CacheType::kFloat8: {
      const int64_t offset = CacheOffset(a, chunk.row, chunk.kv_head, chunk.begin);
      const int64_t bytes = (chunk.end - chunk.begin) * a.head_dim;
      if (HasNan(static_cast<const Float8*>(a.k_cache) + offset, bytes) ||
          HasNan(static_cast<const Float8*>(a.v_cache) + offset, bytes)) {
        return DecodeChunkOf<Float8>(a, chunk, partial, scratch);
      }
      return DecodeChunkOf<FiniteFloat8>(a, chunk, partial, scratch);
    }
    case CacheType::kInt8:
      return DecodeChunkOf<Int8>(a, chunk, partial, scratch);
  }
}

void DecodeMerge(const AttentionArgs& a, int64_t row, int64_t kv_head, const float* partials, int64_t num_chunks,
                 float* scratch) {
  const int64_t padded = PaddedDim(a), group = GroupSize(a), stride = DecodePartialFloats(a);
  float* const line = scratch;  // [PaddedDim]
  for (int64_t g = 0; g < group; ++g) {
    const float* const outs = partials + g * padded;
    const float* const sums = partials + group * padded + g;
    const float* const maxima = sums + group;
    float maximum = maxima[0];
    for (int64_t c = 1; c < num_chunks; ++c) maximum = maxima[c * stride] > maximum ? maxima[c * stride] : maximum;
    Vec sum = Zero();
    for (int64_t h = 0; h < padded; h += kLanes) Store(line + h, Zero());
    for (int64_t c = 0; c < num_chunks; ++c) {
      const Vec factor = Exp(Broadcast(maxima[c * stride] - maximum));
      sum = MultiplyAdd(factor, Broadcast(sums[c * stride]), sum);
      for (int64_t h = 0; h < padded; h += kLanes) {
        Store(line + h, MultiplyAdd(factor, Load(outs + c * stride + h), Load(line + h)));
      }
    }
    for (int64_t h = 0; h < padded; h += kLanes) Store(line + h, Div(Load(line + h), sum));
    NarrowTo(a.dtype, line, a.head_dim, a.out, TokenOffset(a, row, 0, a.num_heads, kv_head * group + g));
  }
}

// ---- Prefill --------------------------------------------------------------------------------------------------------

constexpr int kBlockRows = kLanes == 4 ? 4 : 6;
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;
constexpr int64_t kMaxTileQueries = 64;
constexpr int64_t kKeyBlock = 96;  // positions: a multiple of kBlockRows; keys, values and scores of a block stay in L2

int64_t PrefillScratchFloats(const AttentionArgs& a) {
  const int64_t padded = PaddedDim(a);
  return kMaxTileQueries * padded * 3   // query^T, out^T, one of them row by row
         + 2 * kKeyBlock * padded       // keys, values
         + kKeyBlock * kMaxTileQueries  // scores^T
         + 5 * kMaxTileQueries;         // maxima, sums, rescale, tokens, slopes
}

// c [rows, kVectors] = sum over d of a[row * a_row + d * a_depth] * b[d, :], plus c * rescale if there is one.
template <int kRows, int kVectors>
POPTRANSFORMER_INLINE void MultiplyBlock(int64_t depth, const float* a, int64_t a_row, int64_t a_depth, const float* b,
                                         int64_t b_stride, const float* rescale, float* c, int64_t c_stride) {
  Vec sums[kRows][kVectors];
  POPTRANSFORMER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    POPTRANSFORMER_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = rescale ? Mul(Load(c + r * c_stride + v * kLanes), Load(rescale + v * kLanes)) : Zero();
    }
  }
  for (int64_t d = 0; d < depth; ++d) {
    Vec row_of_b[kVectors];
    POPTRANSFORMER_UNROLL
    for (int v = 0; v < kVectors; ++v) row_of_b[v] = Load(b + d * b_stride + v * kLanes);
    POPTRANSFORMER_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = Broadcast(a[r * a_row + d * a_depth]);
      POPTRANSFORMER_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = MultiplyAdd(factor, row_of_b[v], sums[r][v]);
    }
  }
  POPTRANSFORMER_UNROLL
  for (int r = 0; r < kRows; ++r) {
    POPTRANSFORMER_UNROLL
    for (int v = 0; v < kVectors; ++v) Store(c + r * c_stride + v * kLanes, sums[r][v]);
  }
}

template <int kVectors>
void MultiplyColumns(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_depth, const float* b,
                     int64_t stride, const float* rescale, float* c) {
  int64_t r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows) {
    MultiplyBlock<kBlockRows, kVectors>(depth, a + r * a_row, a_row, a_depth, b, stride, rescale, c + r * stride, stride);
  }
  a += r * a_row;
  c += r * stride;
  switch (rows - r) {
    case 1:
      return MultiplyBlock<1, kVectors>(depth, a, a_row, a_depth, b, stride, rescale, c, stride);
    case 2:
      return MultiplyBlock<2, kVectors>(depth, a, a_row, a_depth, b, stride, rescale, c, stride);
    case 3:
      return MultiplyBlock<3, kVectors>(depth, a, a_row, a_depth, b, stride, rescale, c, stride);
    case 4:
      return MultiplyBlock<4, kVectors>(depth, a, a_row, a_depth, b, stride, rescale, c, stride);
    case 5:
      return MultiplyBlock<5, kVectors>(depth, a, a_row, a_depth, b, stride, rescale, c, stride);
  }
}

// c [rows, width] as in MultiplyBlock; b and c have rows of `width` floats, a multiple of kLanes.
void Multiply(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t width,
              const float* rescale, float* c) {
  for (int64_t column = 0; column < width;) {
    const int64_t left = (width - column) / kLanes;
    const float* const factors = rescale ? rescale + column : nullptr;
    if (left >= kBlockVectors) {
      MultiplyColumns<kBlockVectors>(rows, depth, a, a_row, a_depth, b + column, width, factors, c + column);
      column += kBlockVectors * kLanes;
    } else if (left >= 2) {
      MultiplyColumns<2>(rows, depth, a, a_row, a_depth, b + column, width, factors, c + column);
      column += 2 * kLanes;
    } else {
      MultiplyColumns<1>(rows, depth, a, a_row, a_depth, b + column, width, factors, c + column);
      column += kLanes;
    }
  }
}

// out [columns, rows] = in^T; rows, columns and strides are multiples of kLanes.
void TransposeMatrix(const float* in, int64_t rows, int64_t columns, float* out) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      Vec block[kLanes];
      POPTRANSFORMER_UNROLL
      for (int i = 0; i < kLanes; ++i) block[i] = Load(in + (r + i) * columns + c);
      Transpose(block);
      POPTRANSFORMER_UNROLL
      for (int i = 0; i < kLanes; ++i) Store(out + (c + i) * rows + r, block[i]);
    }
  }
}

// Rows [begin, end) of one head as float32: below cache_len from the cache, then from the new tokens, rounded as in the cache.
template <typename T>
void PackRows(const AttentionArgs& a, int64_t row, int64_t kv_head, const void* cache, const void* tokens, int64_t begin,
              int64_t end, float* out) {
  const int64_t dim = a.head_dim, cached = a.cache_len[row];
  const int64_t split = begin > cached ? begin : Min(end, cached);
  if (split > begin) {
    LoadCacheRows(static_cast<const T*>(cache) + CacheOffset(a, row, kv_head, begin), split - begin, dim, out);
  }
  for (int64_t s = split; s < end; ++s) {
    float* const line = out + (s - begin) * dim;
    WidenFrom(a.dtype, tokens, TokenOffset(a, row, s - cached, a.num_kv_heads, kv_head), dim, 1.0f, line);
    if (AsCacheType(a.dtype) != a.cache_type) RoundAsCached<T>(line, dim);
  }
}

// The next two change scores^T [n, width]; s below counts the block's rows, i its queries.
//
// Adds slopes[i] * (first + s - tokens[i]).
void AddSlopes(const float* slopes, const float* tokens, int64_t first, int64_t n, int64_t width, float* scores) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec slope = Load(slopes + i), offset = Sub(Broadcast(static_cast<float>(first)), Load(tokens + i));
    for (int64_t s = 0; s < n; ++s) {
      float* const score = scores + s * width + i;
      const Vec distance = Add(Broadcast(static_cast<float>(s)), offset);
      Store(score, MultiplyAdd(slope, distance, Load(score)));
    }
  }
}

// Hides rows s < first + tokens[i].
void HideBefore(const float* tokens, int64_t first, int64_t n, int64_t width, float* scores) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec begin = Add(Broadcast(static_cast<float>(first)), Load(tokens + i));
    for (int64_t s = 0; s < n; ++s) {
      float* const score = scores + s * width + i;
      Store(score, SelectLess(Broadcast(static_cast<float>(s)), begin, Broadcast(-kInfinity), Load(score)));
    }
  }
}

template <typename T>
void PrefillTileOf(const AttentionArgs& a, const PrefillTile& tile, float* scratch) {
  const int64_t dim = a.head_dim, padded = PaddedDim(a), cached = a.cache_len[tile.row];
  const int64_t num_queries = tile.num_heads * tile.num_tokens, width = RoundUp(num_queries, kLanes);
  float* const query = scratch;                          // [PaddedDim, width]
  float* const out = query + padded * kMaxTileQueries;   // [PaddedDim, width]
  float* const lines = out + padded * kMaxTileQueries;   // [width, PaddedDim]
  float* const keys = lines + padded * kMaxTileQueries;  // [kKeyBlock, H]
  float* const values = keys + kKeyBlock * padded;       // [kKeyBlock, H]
  float* const scores = values + kKeyBlock * padded;     // [kKeyBlock, width]
  float* const maxima = scores + kKeyBlock * kMaxTileQueries;  // [width], as the next four
  float* const sums = maxima + kMaxTileQueries;
  float* const rescale = sums + kMaxTileQueries;
  float* const tokens = rescale + kMaxTileQueries;  // of each query, from the tile's first; idle lanes have the last one's
  float* const slopes = tokens + kMaxTileQueries;

  if (tile.first_head == 0) {
    for (int64_t t = 0; t < tile.num_tokens; ++t) AppendToken(a, tile.row, tile.kv_head, tile.first_token + t, lines);
  }

  // Query i of the tile is head i % num_heads of token i / num_heads.
  const int64_t first_head = tile.kv_head * GroupSize(a) + tile.first_head;
  const auto query_offset = [&](int64_t i) {
    return TokenOffset(a, tile.row, tile.first_token + i / tile.num_heads, a.num_heads, first_head + i % tile.num_heads);
  };
  for (int64_t i = 0; i < width; ++i) {
    float* const line = lines + i * padded;
    for (int64_t h = i < num_queries ? dim / kLanes * kLanes : 0; h < padded; h += kLanes) Store(line + h, Zero());
    if (i < num_queries) WidenFrom(a.dtype, a.query, query_offset(i), dim, a.scale, line);
  }
  for (int64_t i = 0; i < width; ++i) {
    tokens[i] = static_cast<float>(Min(i, num_queries - 1) / tile.num_heads);
    slopes[i] = a.alibi_slopes ? a.alibi_slopes[first_head + i % tile.num_heads] : 0.0f;
  }
  TransposeMatrix(lines, width, padded, query);
  for (int64_t i = 0; i < padded * width; i += kLanes) Store(out + i, Zero());
  for (int64_t i = 0; i < width; i += kLanes) {
    Store(maxima + i, Broadcast(-kInfinity));
    Store(sums + i, Zero());
  }

  // The tile's first token sees positions [first_begin, first_end), its last one [last_begin, last_end). Every query sees some
  // of the first block, since windows begin at most a position apart; so its maximum is finite from there on.
  static_assert(kMaxTileQueries <= kKeyBlock, "no query's window begins after the first block");
  const int64_t first_position = cached + tile.first_token, last_position = first_position + tile.num_tokens - 1;
  const int64_t context = a.context_len ? Min(a.context_len[tile.row], cached + a.num_tokens[tile.row]) : 0;
  const int64_t first_begin = a.window > 0 ? Larger(0, first_position + 1 - a.window) : 0;
  const int64_t last_begin = a.window > 0 ? Larger(0, last_position + 1 - a.window) : 0;
  const int64_t first_end = Larger(first_position + 1, context), last_end = Larger(last_position + 1, context);
  for (int64_t begin = first_begin; begin < last_end; begin += kKeyBlock) {
    const int64_t n = Min(kKeyBlock, last_end - begin);
    const bool is_masked = begin + n > first_end;
    PackRows<T>(a, tile.row, tile.kv_head, a.k_cache, a.key, begin, begin + n, keys);
    PackRows<T>(a, tile.row, tile.kv_head, a.v_cache, a.value, begin, begin + n, values);
    Multiply(n, dim, keys, dim, 1, query, width, nullptr, scores);

    if (a.alibi_slopes) AddSlopes(slopes, tokens, begin - first_position, n, width, scores);
    if (begin < last_begin) HideBefore(tokens, first_position + 1 - a.window - begin, n, width, scores);

    const Vec causal_end = Broadcast(static_cast<float>(first_position + 1 - begin));
    const Vec context_end = Broadcast(static_cast<float>(context - begin));
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec before = Load(maxima + i);
      Vec maximum = before;
      if (is_masked) {
        const Vec end = Max(Add(causal_end, Load(tokens + i)), context_end);
        for (int64_t s = 0; s < n; ++s) {
          float* const score = scores + s * width + i;
          const Vec seen = SelectLess(Broadcast(static_cast<float>(s)), end, Load(score), Broadcast(-kInfinity));
          Store(score, seen);
          maximum = Max(maximum, seen);
        }
      } else {
        for (int64_t s = 0; s < n; ++s) maximum = Max(maximum, Load(scores + s * width + i));
      }
      const Vec factor = Exp(Sub(before, maximum));
      Vec sum = Mul(Load(sums + i), factor);
      for (int64_t s = 0; s < n; ++s) {
        float* const score = scores + s * width + i;
        const Vec weight = Exp(Sub(Load(score), maximum));
        Store(score, weight);
        sum = Add(sum, weight);
      }
      Store(maxima + i, maximum);
      Store(sums + i, sum);
      Store(rescale + i, factor);
    }
    Multiply(dim, n, values, 1, dim, scores, width, rescale, out);
  }

  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec sum = Load(sums + i);
    for (int64_t h = 0; h < dim; ++h) Store(out + h * width + i, Div(Load(out + h * width + i), sum));
  }
  TransposeMatrix(out, padded, width, lines);
  for (int64_t i = 0; i < num_queries; ++i) NarrowTo(a.dtype, lines + i * padded, dim, a.out, query_offset(i));
}

void PrefillTileAny(const AttentionArgs& a, const PrefillTile& tile, float* scratch) {
  switch (a.cache_type) {
    case CacheType::kFloat32:
      return PrefillTileOf<float>(a, tile, scratch);
    case CacheType::kBfloat16:
      return PrefillTileOf<Bfloat16>(a, tile, scratch);
    case CacheType::kFloat16:
      return PrefillTileOf<Float16>(a, tile, scratch);
    case CacheType::kFloat8:
      return PrefillTileOf<Float8>(a, tile, scratch);
    case CacheType::kInt8:
      return PrefillTileOf<Int8>(a, tile, scratch);
  }
}

}  // namespace

AttentionKernels Attention() {
  return {DecodeScratchFloats, DecodePartialFloats, DecodeChunkAny, DecodeMerge,
          {kMaxTileQueries, PrefillScratchFloats, PrefillTileAny}};
}

}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer
