"""attention: append new keys and values to a cache, then attend over each row's own length."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Value
from poptransformer.ops.op import define, emit, require, require_float


def attention_reference(query, key, value, k_cache, v_cache, cache_len, num_tokens, scale):
    """For each row b and new token t < num_tokens[b], at position p = cache_len[b] + t: store its key and value at p, then
    out = softmax(scale * q . k[0..p]) v[0..p]. Tokens from num_tokens[b] on store nothing and give zeros.
    """
    num_rows, num_new, num_heads, _ = query.shape
    queries_per_kv = num_heads // key.shape[2]
    wide = np.result_type(np.float32, *(x.dtype for x in (query, k_cache) if x.dtype == np.float64))
    k_cache, v_cache, out = k_cache.copy(), v_cache.copy(), np.zeros(query.shape, wide)
    for b in range(num_rows):
        begin, count = int(cache_len[b]), int(num_tokens[b])
        assert 0 <= begin and 0 <= count <= num_new and begin + count <= k_cache.shape[2], "row does not fit its cache"
        k_cache[b, :, begin : begin + count] = key[b, :count].swapaxes(0, 1)
        v_cache[b, :, begin : begin + count] = value[b, :count].swapaxes(0, 1)
        for t in range(count):
            for n in range(num_heads):
                keys = k_cache[b, n // queries_per_kv, : begin + t + 1].astype(wide)  # [p + 1, H]
                values = v_cache[b, n // queries_per_kv, : begin + t + 1].astype(wide)
                scores = scale * (keys @ query[b, t, n].astype(wide))
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ values / weights.sum()
    return [out.astype(query.dtype), k_cache, v_cache]


def _infer(query, key, value, k_cache, v_cache, cache_len, num_tokens, scale):
    require(query.rank == 4 and key.rank == 4, "wants query [B, T, N, H] and key [B, T, K, H]")
    (b, t, n, h), k = query.shape, key.shape[2]
    require(key.shape == (b, t, k, h), f"key must be [{b}, {t}, K, {h}]")
    require(value.shape == key.shape, "key and value differ in shape")
    require(k > 0 and n % k == 0, f"{n} query heads cannot share {k} key/value heads evenly")
    require(query.dtype == key.dtype == value.dtype, "query, key and value differ in dtype")
    require_float(query)
    require(k_cache.rank == 4 and k_cache.shape == (b, k, k_cache.shape[2], h), f"the caches must be [{b}, {k}, S, {h}]")
    require(v_cache == k_cache, "the two caches differ")
    require_float(k_cache, "the caches must have a floating dtype")
    for name, spec in (("cache_len", cache_len), ("num_tokens", num_tokens)):
        require(spec.shape == (b,) and spec.dtype == np.int32, f"{name} must be int32 [{b}]")
    return [query, k_cache, v_cache]


define("attention", _infer, attention_reference)


def attention(query, key, value, k_cache, v_cache, cache_len, num_tokens, scale) -> tuple[Value, Value, Value]:
    """Causal attention over a cache, with a length of its own for each row.

    Whole on purpose: the cache is updated in place by kernels. Scores and sums are float32.

    Args:
      query: [B, T, N, H], the T new tokens of each row.
      key, value: [B, T, K, H]; query head n reads key/value head n // (N / K).
      k_cache, v_cache: [B, K, S, H] the keys and values of earlier tokens; their dtype may differ from the query's, and
        attention sees the new keys as the cache rounds them.
      cache_len: [B] int32, tokens of the row already in the cache.
      num_tokens: [B] int32 in 0 .. T, new tokens of the row that count; cache_len + num_tokens is at most S. The others
        are padding: they store nothing and give zeros.
      scale: factor on the scores, commonly 1 / sqrt(H).
    Returns: out [B, T, N, H] in the query's dtype, and the two caches with the new tokens in them.
    Source: Vaswani et al. 2017, arXiv:1706.03762.
    """
    inputs = (query, key, value, k_cache, v_cache, cache_len, num_tokens)
    return emit("attention", *inputs, scale=float(scale))
