"""XLA lowering of attention: the project's kernel where it is built, else plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax

from poptransformer.backends.xla.lowering import lowering, product
from poptransformer.float8 import FLOAT8, LARGEST
from poptransformer.kv_cache import INT8, LEAST_SCALE, PER_CODE, SCALE_BYTES

_MASKED = -1e30  # finite, so that a row without a visible position stays free of NaN


@lowering("attention")
def attention(context, *arrays, scale, window):
    *required, context_len, alibi_slopes = arrays
    options = {"window": window, "context_len": context_len, "alibi_slopes": alibi_slopes}
    if context.use_kernel("attention", isa=lambda: _kernel().attention_isa(required[0], context.allow_bfloat16)):
        return _kernel().attention(*required, scale, **options, allow_bfloat16=context.allow_bfloat16)
    return plain_attention(*required, scale, **options)


def _kernel():
    from poptransformer.backends.xla import custom_ops

    return custom_ops


def plain_attention(
    query, key, value, k_cache, v_cache, cache_len, num_tokens, scale, *, window=None, context_len=None, alibi_slopes=None
):
    """The op in jnp; shapes and meaning as in `poptransformer.ops.attention`. Reads all S positions of the cache."""
    num_rows, num_new, num_heads, head_dim = query.shape
    num_kv_heads, capacity = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    key, value = (_store(x, k_cache.dtype) for x in _confine(key, value, k_cache.dtype))
    # Rows and heads are merged, and query heads of a group stand beside the new tokens, so that both steps are plain
    # products of [B * K, G * T, ...] with the cache as it lies; XLA:CPU copies a cache that is wanted in two shapes.
    cache_shape, rows_shape = k_cache.shape, (-1, *k_cache.shape[2:])
    k_cache = _append(k_cache.reshape(rows_shape), key, cache_len, num_tokens)
    v_cache = _append(v_cache.reshape(rows_shape), value, cache_len, num_tokens)
    keys, values = _load(k_cache), _load(v_cache)
    grouped = query.reshape(num_rows, num_new, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_rows * num_kv_heads, group * num_new, head_dim).astype(keys.dtype)
    if num_new == 1:
        # Else XLA:GPU turns the query anew for each of the cache's positions.
        grouped = lax.optimization_barrier(grouped)
    scores = _batched_dot(grouped, keys, contract=2) * scale  # [B * K, G * T, S]
    position = cache_len[:, None] + jnp.arange(num_new)  # [B, T]
    visible = _visible(position, capacity, window, context_len, cache_len + num_tokens)  # [B, T, S]
    visible = jnp.repeat(jnp.tile(visible, (1, group, 1)), num_kv_heads, axis=0)  # [B * K, G * T, S]
    if alibi_slopes is not None:
        distance = (jnp.arange(capacity) - position[:, None, None, :, None]).astype(jnp.float32)  # [B, 1, 1, T, S]
        scores += (alibi_slopes.reshape(num_kv_heads, group, 1, 1) * distance).reshape(scores.shape)
    weights = jax.nn.softmax(jnp.where(visible, scores, _MASKED), axis=-1).astype(values.dtype)
    out = _batched_dot(weights, values, contract=1).reshape(num_rows, num_kv_heads, group, num_new, head_dim)
    out = out.transpose(0, 3, 1, 2, 4).reshape(query.shape)
    k_cache, v_cache = k_cache.reshape(cache_shape), v_cache.reshape(cache_shape)
    is_token = jnp.arange(num_new) < num_tokens[:, None]  # [B, T]
    return jnp.where(is_token[:, :, None, None], out, 0).astype(query.dtype), k_cache, v_cache


def _visible(position, capacity, window, context_len, length):
    """Which of the cache's positions each query sees: [B, T, S], for queries at position [B, T] in rows of length [B]."""
    stored = jnp.arange(capacity)
    end = position + 1  # [B, T]
    if context_len is not None:
        end = jnp.maximum(end, jnp.minimum(context_len, length)[:, None])
    visible = stored < end[:, :, None]
    if window is not None:
        visible &= stored > position[:, :, None] - min(window, capacity)
    return visible


def _confine(key, value, dtype):
    """Values that are not finite in the cache's dtype become 0, and the same features of their keys NaN; both [B, T, K, H].

    Whoever sees such a token still gets NaN. Whoever does not, because another row has the cache now, gets nothing of it: its
    score is masked, while a value in the cache is always multiplied, and 0 * NaN is NaN. One NaN in a key is enough, and needs
    no look at the other features, which would be a kernel of its own on a GPU.
    """
    is_finite = jnp.isfinite(value if dtype in (FLOAT8, INT8) else value.astype(dtype))
    return jnp.where(is_finite, key, jnp.nan), jnp.where(is_finite, value, 0)


def _store(x, dtype):
    """kv_cache.store in jnp, bit for bit."""
    if dtype == FLOAT8:
        return _to_float8(x)
    if dtype != INT8:
        return x.astype(dtype)
    wide = x.astype(jnp.float32)
    is_finite = jnp.isfinite(wide).all(-1, keepdims=True)
    wide = jnp.where(is_finite, wide, 0)
    scale = jnp.abs(wide).max(-1, keepdims=True) * PER_CODE
    scale = jnp.where(scale < LEAST_SCALE, 0, scale)
    codes = jnp.round(wide * jnp.where(scale > 0, 1 / scale, 0)).astype(jnp.int8)
    scale = jnp.where(is_finite, scale, jnp.nan)
    return jnp.concatenate([codes, lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)


def _to_float8(x):
    """float8.to_float8 in jnp. XLA's own conversion may round twice, to float16 first; here it gets what is exact."""
    wide = x.astype(jnp.float32)
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(wide, jnp.uint32) & 0x7F800000, jnp.float32)
    step = jnp.maximum(power, 2.0**-6) * 2.0**-3  # between neighbours
    rounded = jnp.clip(jnp.round(wide / step) * step, -LARGEST, LARGEST)
    return jnp.where(jnp.isfinite(wide), rounded, jnp.nan).astype(FLOAT8)


def _load(cache):
    """The numbers of a cache [B * K, S, row_width] as its products take them: [B * K, S, H]."""
    if cache.dtype == FLOAT8:
        return cache.astype(jnp.float32)
    if cache.dtype != INT8:
        return cache
    scale = lax.bitcast_convert_type(cache[..., -SCALE_BYTES:], jnp.float32)
    return cache[..., :-SCALE_BYTES].astype(jnp.float32) * scale[..., None]


def _batched_dot(x, cache, contract):
    """x [B * K, M, C] times cache [B * K, S, H] over the cache's axis `contract`: [B * K, M, the other axis] float32."""
    return product(x, cache, (((2,), (contract,)), ((0,), (0,))))


def _append(cache, new, cache_len, num_tokens):
    """Write rows new [B, T, K, row_width] into cache [B * K, S, row_width], whose dtype they have, from position cache_len on,
    only the first num_tokens of each row.

    A window of T positions is read, mixed and written back, so that padding near the cache's end changes nothing (an
    update that does not fit would be moved, over earlier tokens). A loop over the rows compiles to in-place updates.
    """
    num_rows, num_new, num_kv_heads, _ = new.shape
    capacity = cache.shape[1]
    window = min(num_new, capacity)
    new = new.transpose(0, 2, 1, 3)  # [B, K, T, H]
    for row in range(num_rows):
        begin = jnp.minimum(cache_len[row], capacity - window)
        offset = jnp.arange(window) + begin - cache_len[row]  # token that belongs at each position of the window
        is_new = (offset >= 0) & (offset < num_tokens[row])
        at = (row * num_kv_heads, begin, 0)
        old = lax.dynamic_slice(cache, at, (num_kv_heads, window, new.shape[-1]))
        moved = new[row] if num_new == 1 else jnp.take(new[row], offset, axis=1, mode="clip")
        cache = lax.dynamic_update_slice(cache, jnp.where(is_new[:, None], moved, old), at)
    return cache
