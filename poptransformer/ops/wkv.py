"""wkv: the recurrence that RWKV-4 has in the place of attention."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, require, require_float, widen

# Maximum of a state that has seen no token: no exponent is less, and differences from it are no NaN, as with -infinity.
EMPTY = float(np.finfo(np.float32).min)


def wkv_reference(key, value, time_decay, time_first, wkv_state, cache_len, num_tokens):
    """One token after the other, all features of a row at once.

    With a, b the decayed sums of e^key * value and e^key over the tokens so far, out = (a + e^(time_first + key) * value) /
    (b + e^(time_first + key)). The state holds a / e^m and b / e^m with m the greatest exponent, and m.
    """
    wide_key, wide_value = widen(key), widen(value)
    state, out = wkv_state.copy(), np.zeros(key.shape, wide_key.dtype)
    with np.errstate(over="ignore", under="ignore"):
        decay = -np.exp(time_decay)
        for b in np.flatnonzero(num_tokens):
            numerator, denominator, maximum = state[b] if cache_len[b] else (0.0, 0.0, EMPTY)
            for t in range(num_tokens[b]):
                k, v = wide_key[b, t], wide_value[b, t]
                top = np.maximum(maximum, time_first + k)
                old, new = np.exp(maximum - top), np.exp(time_first + k - top)
                out[b, t] = (old * numerator + new * v) / (old * denominator + new)
                top = np.maximum(maximum + decay, k)
                old, new = np.exp(maximum + decay - top), np.exp(k - top)
                numerator, denominator, maximum = old * numerator + new * v, old * denominator + new, top
            state[b] = numerator, denominator, maximum
    return [out.astype(key.dtype), state]


def _infer(key, value, time_decay, time_first, wkv_state, cache_len, num_tokens):
    require(key.rank == 3 and key.shape[1] > 0, "wants key [B, T, D] with at least one token")
    require_float(key)
    require(value == key, "key and value differ")
    b, _, d = key.shape
    for name, spec in (("time_decay", time_decay), ("time_first", time_first)):
        require(spec == Spec((d,), np.float32), f"{name} must be float32 [{d}]")
    require(wkv_state == Spec((b, 3, d), np.float32), f"wkv_state must be float32 [{b}, 3, {d}]")
    for name, spec in (("cache_len", cache_len), ("num_tokens", num_tokens)):
        require(spec.shape == (b,) and spec.dtype == np.int32, f"{name} must be int32 [{b}]")
    return [key, wkv_state]


define("wkv", _infer, wkv_reference)


def wkv(key, value, time_decay, time_first, wkv_state, cache_len, num_tokens) -> tuple[Value, Value]:
    """Average of the values of a row's tokens so far, each weighed by e^key and, feature by feature, by its age.

    A token i steps back weighs e^(key - (i - 1) * e^time_decay), the newest one e^(key + time_first). Whole on purpose: the
    state is updated in place by kernels. Everything is computed in float32, relative to the greatest exponent, so that keys of
    any size are safe.

    Args:
      key, value: [B, T, D], the T new tokens of each row.
      time_decay: [D] float32, as in the checkpoint: the logarithm of what a step takes off the exponent.
      time_first: [D] float32, what the newest token has added to its key (the original code's u).
      wkv_state: [B, 3, D] float32, numerator and denominator divided by e^maximum, and maximum; not looked at in rows with
        cache_len 0, which begin without a token.
      cache_len: [B] int32, tokens of the row that came before.
      num_tokens: [B] int32 in 0 .. T, new tokens of the row that count. The others are padding: they change nothing and give
        zeros.
    Returns: out [B, T, D] in the dtype of key, and the new wkv_state; rows without a new token keep theirs.
    Source: Peng et al. 2023, arXiv:2305.13048; rwkv_linear_attention_cpu in HF modeling_rwkv.py.
    """
    return emit("wkv", key, value, time_decay, time_first, wkv_state, cache_len, num_tokens)
