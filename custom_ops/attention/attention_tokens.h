// Where tokens and cached positions lie, and how a token becomes a position; for attention_kernel.cc and attention_amx.cc.
#ifndef POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_TOKENS_H_
#define POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_TOKENS_H_

#include "attention/attention.h"
#include "attention/attention_rows.h"

namespace poptransformer {
namespace POPTRANSFORMER_ISA_NAMESPACE {
namespace {

POPTRANSFORMER_INLINE int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
POPTRANSFORMER_INLINE int64_t Larger(int64_t a, int64_t b) { return a < b ? b : a; }
POPTRANSFORMER_INLINE int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
POPTRANSFORMER_INLINE int64_t PaddedDim(const AttentionArgs& a) { return RoundUp(a.head_dim, kLanes); }
POPTRANSFORMER_INLINE int64_t GroupSize(const AttentionArgs& a) { return a.num_heads / a.num_kv_heads; }

POPTRANSFORMER_INLINE int64_t TokenOffset(const AttentionArgs& a, int64_t row, int64_t token, int64_t heads, int64_t head) {
  return ((row * a.num_positions + token) * heads + head) * a.head_dim;
}

POPTRANSFORMER_INLINE int64_t CacheOffset(const AttentionArgs& a, int64_t row, int64_t kv_head, int64_t position) {
  return ((row * a.num_kv_heads + kv_head) * a.cache_size + position) * CacheRow(a.cache_type, a.head_dim);
}

// Writes key and value of one new token into the caches; `line` has room for H floats.
void AppendToken(const AttentionArgs& a, int64_t row, int64_t kv_head, int64_t token, float* line) {
  const int64_t from = TokenOffset(a, row, token, a.num_kv_heads, kv_head);
  const int64_t to = CacheOffset(a, row, kv_head, a.cache_len[row] + token);
  if (AsCacheType(a.dtype) == a.cache_type) {
    const int64_t width = ByteWidth(a.dtype);
    const int64_t bytes = a.head_dim * width;
    memcpy(static_cast<char*>(a.k_cache) + to * width, static_cast<const char*>(a.key) + from * width, bytes);
    memcpy(static_cast<char*>(a.v_cache) + to * width, static_cast<const char*>(a.value) + from * width, bytes);
    return;
  }
  WidenFrom(a.dtype, a.key, from, a.head_dim, 1.0f, line);
  StoreCacheRow(a.cache_type, line, a.head_dim, a.k_cache, to);
  WidenFrom(a.dtype, a.value, from, a.head_dim, 1.0f, line);
  StoreCacheRow(a.cache_type, line, a.head_dim, a.v_cache, to);
}

}  // namespace
}  // namespace POPTRANSFORMER_ISA_NAMESPACE
}  // namespace poptransformer

#endif  // POPTRANSFORMER_CUSTOM_OPS_ATTENTION_ATTENTION_TOKENS_H_
