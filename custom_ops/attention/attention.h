// Causal attention over a KV cache that is extended in place.
//
// For each row b and t < num_tokens[b], with p = cache_len[b] + t and query head n reading key/value head n / (N / K):
//
//   k_cache[b, :, p] = key[b, t],  v_cache[b, :, p] = value[b, t]               rounded as the cache holds them
//   out[b, t, n]     = sum over visible s of softmax_s(score) * v_cache[b, n / (N / K), s]
//   score            = scale * query[b, t, n] . k_cache[b, n / (N / K), s] + alibi_slopes[n] * (s - p)
//
// where s is visible if (s <= p or s < context_len[b]) and p - s < window and s < cache_len[b] + num_tokens[b]. The new tokens
// above p that a context makes visible are those of this call. out[b, t] = 0, nothing written, for t >= num_tokens[b]. Scores,
// softmax and sums are float32. Prefill of bfloat16, or where it is allowed, rounds queries, keys, values and weights to bfloat16
// to multiply them if the CPU has tiles. A key or value that is not finite may spoil all of its row's queries in the same call,
// no other row, and no call that does not see it.
#ifndef POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_H_
#define POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_H_

#include <cstdint>

#include "common/dtype.h"

namespace poptransformer {

// How a cache holds the H features of a position and head; poptransformer/kv_cache.py says what the last two mean.
enum class CacheType { kFloat32, kBfloat16, kFloat16, kFloat8, kInt8 };

constexpr CacheType AsCacheType(DType dtype) {
  return dtype == DType::kFloat32 ? CacheType::kFloat32
         : dtype == DType::kBfloat16 ? CacheType::kBfloat16
                                     : CacheType::kFloat16;
}

// Of an element.
constexpr int64_t ByteWidth(CacheType type) {
  return type == CacheType::kFloat32 ? 4 : type == CacheType::kBfloat16 || type == CacheType::kFloat16 ? 2 : 1;
}

// Elements of a row: int8 codes have the four bytes of their float32 scale behind them.
constexpr int64_t CacheRow(CacheType type, int64_t head_dim) { return type == CacheType::kInt8 ? head_dim + 4 : head_dim; }

// Buffers are dense and row-major. The caller has checked that K divides N, that all lengths are at least 0 and that
// cache_len[b] + num_tokens[b] <= S.
struct AttentionArgs {
  int64_t batch_size;      // B
  int64_t num_positions;   // T
  int64_t cache_size;      // S
  int64_t num_heads;       // N
  int64_t num_kv_heads;    // K
  int64_t head_dim;        // H
  float scale;
  int64_t window;          // 0: no limit
  DType dtype;             // of query, key, value and out
  CacheType cache_type;    // of both caches
  const void* query;       // [B, T, N, H]
  const void* key;         // [B, T, K, H]
  const void* value;       // [B, T, K, H]
  void* k_cache;           // [B, K, S, CacheRow]
  void* v_cache;           // [B, K, S, CacheRow]
  const int32_t* cache_len;   // [B]
  const int32_t* num_tokens;  // [B]
  const int32_t* context_len;   // [B], any numbers, or null for 0
  const float* alibi_slopes;  // [N], or null for 0
  void* out;               // [B, T, N, H]
  bool allow_bfloat16 = false;  // of other dtypes: prefill may round what it multiplies to bfloat16
};

void Attention(const AttentionArgs& args);

}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_H_
