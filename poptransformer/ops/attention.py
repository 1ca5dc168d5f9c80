"""attention: append new keys and values to a cache, then attend over each row's own length."""

from __future__ import annotations

import numpy as np

from poptransformer import kv_cache
from poptransformer.float8 import FLOAT8
from poptransformer.graph import Value
from poptransformer.ops.op import define, emit, is_float, require, require_float


def attention_reference(
    query, key, value, k_cache, v_cache, cache_len, num_tokens, context_len=None, alibi_slopes=None, *, scale, window=None
):
    """For each row b and new token t < num_tokens[b], at position p = cache_len[b] + t: store its key and value at p, then
    out = softmax(scale * q . k[s] + alibi_slopes[n] * (s - p)) v[s] over the visible positions s of the row: those with
    s <= p or s < context_len[b], and p - s < window. Tokens from num_tokens[b] on store nothing and give zeros.
    """
    num_rows, num_new, num_heads, _ = query.shape
    queries_per_kv = num_heads // key.shape[2]
    wide = np.result_type(np.float32, *(x.dtype for x in (query, k_cache) if x.dtype == np.float64))
    k_cache, v_cache, out = k_cache.copy(), v_cache.copy(), np.zeros(query.shape, wide)
    for b in range(num_rows):
        begin, count = int(cache_len[b]), int(num_tokens[b])
        assert 0 <= begin and 0 <= count <= num_new and begin + count <= k_cache.shape[2], "row does not fit its cache"
        k_cache[b, :, begin : begin + count] = kv_cache.store(key[b, :count].swapaxes(0, 1), k_cache.dtype)
        v_cache[b, :, begin : begin + count] = kv_cache.store(value[b, :count].swapaxes(0, 1), v_cache.dtype)
        context = 0 if context_len is None else min(int(context_len[b]), begin + count)
        for t in range(count):
            p = begin + t
            s = np.arange(0 if window is None else max(0, p - window + 1), max(p + 1, context))
            for n in range(num_heads):
                keys = kv_cache.load(k_cache[b, n // queries_per_kv, s], wide)  # [visible, H]
                values = kv_cache.load(v_cache[b, n // queries_per_kv, s], wide)
                scores = scale * (keys @ query[b, t, n].astype(wide))
                if alibi_slopes is not None:
                    scores = scores + alibi_slopes[n].astype(wide) * (s - p)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ values / weights.sum()
    return [out.astype(query.dtype), k_cache, v_cache]


def _infer(
    query, key, value, k_cache, v_cache, cache_len, num_tokens, context_len=None, alibi_slopes=None, *, scale, window=None
):
    require(query.rank == 4 and key.rank == 4, "wants query [B, T, N, H] and key [B, T, K, H]")
    (b, t, n, h), k = query.shape, key.shape[2]
    require(key.shape == (b, t, k, h), f"key must be [{b}, {t}, K, {h}]")
    require(value.shape == key.shape, "key and value differ in shape")
    require(k > 0 and n % k == 0, f"{n} query heads cannot share {k} key/value heads evenly")
    require(query.dtype == key.dtype == value.dtype, "query, key and value differ in dtype")
    require_float(query)
    dtype, width = k_cache.dtype, kv_cache.row_width(h, k_cache.dtype)
    is_cache_dtype = is_float(dtype) or dtype in (FLOAT8, kv_cache.INT8)
    require(is_cache_dtype, "the caches must have a floating dtype, float8_e4m3fn or int8")
    is_cache = k_cache.rank == 4 and k_cache.shape == (b, k, k_cache.shape[2], width)
    require(is_cache, f"caches of {dtype.name} must be [{b}, {k}, S, {width}]")
    require(v_cache == k_cache, "the two caches differ")
    for name, spec in (("cache_len", cache_len), ("num_tokens", num_tokens), ("context_len", context_len)):
        require(spec is None or spec.shape == (b,) and spec.dtype == np.int32, f"{name} must be int32 [{b}]")
    is_slopes = alibi_slopes is None or alibi_slopes.shape == (n,) and alibi_slopes.dtype == np.float32
    require(is_slopes, f"alibi_slopes must be float32 [{n}]")
    is_window = window is None or isinstance(window, int) and not isinstance(window, bool) and window > 0
    require(is_window, f"window={window!r} must be a positive whole number")
    require(window is None or context_len is None, "a window together with context_len is not supported")
    return [query, k_cache, v_cache]


define("attention", _infer, attention_reference)


def attention(
    query, key, value, k_cache, v_cache, cache_len, num_tokens, scale, *, window=None, context_len=None, alibi_slopes=None
) -> tuple[Value, Value, Value]:
    """Causal attention over a cache, with a length of its own for each row.

    Whole on purpose: the cache is updated in place by kernels. Scores and sums are float32.

    Args:
      query: [B, T, N, H], the T new tokens of each row.
      key, value: [B, T, K, H]; query head n reads key/value head n // (N / K).
      k_cache, v_cache: [B, K, S, row_width] the keys and values of earlier tokens, as kv_cache.py has them: H numbers of a
        floating dtype that may differ from the query's, or of float8_e4m3fn, or int8 codes with their scale. Attention sees
        the new keys and values as the cache rounds them.
      cache_len: [B] int32, tokens of the row already in the cache.
      num_tokens: [B] int32 in 0 .. T, new tokens of the row that count; cache_len + num_tokens is at most S. The others
        are padding: they store nothing and give zeros.
      scale: factor on the scores, commonly 1 / sqrt(H).
      window: positions that a query sees, its own included: p - s < window; None for all. Not together with context_len.
      context_len: [B] int32, or None. Positions below it are visible to every query of the row, earlier ones too, once they
        are stored: a query sees later tokens only of the same call, so the context must come in one piece.
      alibi_slopes: [N] float32, or None. alibi_slopes[n] * (s - p) is added to the scaled scores of head n.
    Returns: out [B, T, N, H] in the query's dtype, and the two caches with the new tokens in them.
    Source: Vaswani et al. 2017, arXiv:1706.03762; windows: Beltagy et al. 2020, arXiv:2004.05150; contexts: Raffel et al.
      2020, arXiv:1910.10683 (prefix language models); slopes: Press et al. 2022, arXiv:2108.12409.
    """
    inputs = (query, key, value, k_cache, v_cache, cache_len, num_tokens, context_len, alibi_slopes)
    return emit("attention", *inputs, scale=float(scale), window=window)
