"""PopART lowering of attention.

Three ways to get the new keys and values into a cache [B, K, S, H]: rows that begin anew (cache_len is known to be 0) have
nothing before them, so the new tokens are the cache, padded, and attention sees those T only; one token of one row is a
DynamicUpdate; all else chooses, position by position, between old and new.
"""

import numpy as np

from poptransformer.backends.popart.lowering import lowering

_MASKED = -1e30  # finite, so that a row without a visible position stays free of NaN


@lowering("attention")
def attention(emitter, query, key, value, k_cache, v_cache, cache_len, num_tokens, context_len, alibi_slopes, scale, window):
    num_rows, num_new, num_heads, head_dim = query.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    dtype = k_cache.dtype
    is_token = _is_token(emitter, num_tokens, num_new)  # [B, T]
    key, value = (emitter.transpose(emitter.cast(new, dtype), (0, 2, 1, 3)) for new in (key, value))  # [B, K, T, H]
    if cache_len.is_constant(0) and k_cache.is_zero_state and num_new <= capacity:
        is_new = emitter.reshape(is_token, (num_rows, 1, num_new, 1))
        keys, values = (emitter.where(is_new, new, 0) for new in (key, value))
        k_cache, v_cache = (emitter.pad_end(new, capacity, axis=2) for new in (keys, values))
    else:
        k_cache, v_cache = (
            _append(emitter, cache, new, cache_len, num_tokens, is_token) for cache, new in ((k_cache, key), (v_cache, value))
        )
        keys, values = k_cache, v_cache
    stored = keys.shape[2]  # positions that queries look at

    grouped = emitter.reshape(query, (num_rows, num_new, num_kv_heads, group, head_dim))
    grouped = emitter.transpose(grouped, (0, 2, 3, 1, 4))
    grouped = emitter.cast(emitter.reshape(grouped, (num_rows, num_kv_heads, group * num_new, head_dim)), dtype)
    scores = emitter.matmul(grouped, emitter.transpose(keys, (0, 1, 3, 2)), np.float32)
    scores = emitter.reshape(emitter.mul(scores, scale), (num_rows, num_kv_heads, group, num_new, stored))
    position = emitter.add(_column(emitter, cache_len), np.arange(num_new, dtype=np.int32)[None])  # [B, T]
    visible = _visible(emitter, position, stored, window, context_len, cache_len, num_tokens)  # [B, T, S]
    if alibi_slopes is not None:
        ages = emitter.sub(emitter.constant(np.arange(stored, dtype=np.int32)), emitter.reshape(position, (*position.shape, 1)))
        ages = emitter.reshape(emitter.cast(ages, np.float32), (num_rows, 1, 1, num_new, stored))
        slopes = emitter.reshape(alibi_slopes, (num_kv_heads, group, 1, 1))
        scores = emitter.add(scores, emitter.mul(slopes, ages))
    visible = emitter.reshape(visible, (num_rows, 1, 1, num_new, stored))
    weights = emitter.softmax(emitter.where(visible, scores, _MASKED))
    weights = emitter.reshape(emitter.cast(weights, dtype), (num_rows, num_kv_heads, group * num_new, stored))
    out = emitter.reshape(emitter.matmul(weights, values, query.dtype), (num_rows, num_kv_heads, group, num_new, head_dim))
    out = emitter.reshape(emitter.transpose(out, (0, 3, 1, 2, 4)), query.shape)
    out = emitter.where(emitter.reshape(is_token, (num_rows, num_new, 1, 1)), out, 0)
    return out, k_cache, v_cache


def _column(emitter, x):
    """[B] -> [B, 1]"""
    return emitter.reshape(x, (x.shape[0], 1))


def _is_token(emitter, num_tokens, num_new):
    return emitter.less(emitter.constant(np.arange(num_new, dtype=np.int32)[None]), _column(emitter, num_tokens))


def _append(emitter, cache, new, cache_len, num_tokens, is_token):
    """cache [B, K, S, H] with new [B, K, T, H] from position cache_len on, the first num_tokens of each row."""
    num_rows, num_kv_heads, capacity, _ = cache.shape
    num_new = new.shape[2]
    if num_rows == num_new == 1:
        at = emitter.minimum(cache_len, capacity - 1)  # a row at rest may be full
        old = emitter.dynamic_slice(cache, at, 1, axis=2)
        new = emitter.where(emitter.reshape(is_token, (1, 1, 1, 1)), new, old)
        return emitter.dynamic_update(cache, at, new, axis=2)
    offset = emitter.sub(emitter.constant(np.arange(capacity, dtype=np.int32)[None]), _column(emitter, cache_len))  # [B, S]
    is_new = emitter.logical_and(emitter.greater_equal(offset, 0), emitter.less(offset, _column(emitter, num_tokens)))
    if num_new > 1:  # a product with ones and zeros moves token t to position cache_len + t
        token = emitter.constant(np.arange(num_new, dtype=np.int32))
        moves = emitter.equal(emitter.reshape(offset, (num_rows, capacity, 1)), token)  # [B, S, T]
        moves = emitter.reshape(emitter.cast(moves, cache.dtype), (num_rows, 1, capacity, num_new))
        new = emitter.matmul(moves, new)
    return emitter.where(emitter.reshape(is_new, (num_rows, 1, capacity, 1)), new, cache)


def _visible(emitter, position, stored, window, context_len, cache_len, num_tokens):
    """Which of the positions each query sees: [B, T, S]."""
    places = emitter.constant(np.arange(stored, dtype=np.int32))
    end = emitter.add(position, 1)
    if context_len is not None:
        context = emitter.minimum(context_len, emitter.add(cache_len, num_tokens))
        end = emitter.maximum(end, _column(emitter, context))
    visible = emitter.less(places, emitter.reshape(end, (*position.shape, 1)))
    if window is not None and window < stored:
        begin = emitter.reshape(emitter.sub(position, window), (*position.shape, 1))
        visible = emitter.logical_and(visible, emitter.greater(places, begin))
    return visible
