"""token_shift: each token's features mixed with those of the token before it (RWKV)."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, require, require_float, widen


def token_shift_reference(x, shift_state, cache_len, num_tokens, *mixes):
    """mix * x[t] + (1 - mix) * x[t - 1], where x[-1] is the state, or 0 at the beginning of a row."""
    wide = widen(x)
    before = np.where(cache_len[:, None] > 0, shift_state, 0).astype(wide.dtype)  # [B, D]
    previous = np.concatenate([before[:, None], wide[:, :-1]], 1)  # [B, T, D]
    mixed = [(widen(mix) * wide + (1 - widen(mix)) * previous).astype(x.dtype) for mix in mixes]
    newest = wide[np.arange(len(x)), np.maximum(num_tokens, 1) - 1]  # [B, D]
    return [*mixed, np.where(num_tokens[:, None] > 0, newest, shift_state).astype(shift_state.dtype)]


def _infer(x, shift_state, cache_len, num_tokens, *mixes):
    require(x.rank == 3 and x.shape[1] > 0, "wants x [B, T, D] with at least one token")
    require_float(x)
    b, _, d = x.shape
    require(shift_state == Spec((b, d), np.float32), f"shift_state must be float32 [{b}, {d}]")
    for name, spec in (("cache_len", cache_len), ("num_tokens", num_tokens)):
        require(spec.shape == (b,) and spec.dtype == np.int32, f"{name} must be int32 [{b}]")
    require(len(mixes) > 0, "wants at least one mix")
    for mix in mixes:
        require_float(mix, "a mix must have a floating dtype")
        require(mix.shape == (d,), f"a mix must be [{d}]")
    return [*(x for _ in mixes), shift_state]


define("token_shift", _infer, token_shift_reference)


def token_shift(x: Value, shift_state: Value, cache_len: Value, num_tokens: Value, *mixes: Value) -> tuple[Value, ...]:
    """Mix each token with the one before it, by shares that differ from feature to feature.

    Sums are float32, and results are rounded once.

    Args:
      x: [B, T, D], the T new tokens of each row.
      shift_state: [B, D] float32, x of the row's newest token so far; not looked at in rows with cache_len 0, which begin
        with zeros.
      cache_len: [B] int32, tokens of the row that came before.
      num_tokens: [B] int32 in 0 .. T, new tokens of the row that count; the results for the others mean nothing.
      mixes: one or more of [D], the new token's share (HF: time_mix_key, ...).
    Returns: for each mix [B, T, D] in the dtype of x, then the new shift_state; rows without a new token keep theirs.
    Source: Peng et al. 2023, arXiv:2305.13048; extract_key_value in HF modeling_rwkv.py.
    """
    return emit("token_shift", x, shift_state, cache_len, num_tokens, *mixes)
