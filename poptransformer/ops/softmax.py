"""softmax and the log-probability of given tokens, both in float32."""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, require, require_float, widen


def softmax_reference(x):
    """exp(x - max) / sum along the last axis."""
    wide = widen(x)
    weights = np.exp(wide - wide.max(-1, keepdims=True))
    return [(weights / weights.sum(-1, keepdims=True)).astype(x.dtype)]


def token_log_prob_reference(logits, token_ids):
    """logits[token] - log(sum(exp(logits)))."""
    top = logits.max(-1)
    chosen = np.take_along_axis(logits, token_ids[..., None], -1)[..., 0]
    return [(chosen - top - np.log(np.exp(logits - top[..., None]).sum(-1))).astype(logits.dtype)]


def _infer_softmax(x):
    require_float(x)
    require(x.rank >= 1 and x.shape[-1] > 0, "wants a last axis with elements")
    return [x]


def _infer_token_log_prob(logits, token_ids):
    require(logits.dtype == np.float32, "logits must be float32")
    require(token_ids.dtype == np.int32, "token ids must be int32")
    require(logits.shape[:-1] == token_ids.shape, f"wants token ids {list(logits.shape[:-1])}")
    return [Spec(token_ids.shape, np.float32)]


define("softmax", _infer_softmax, softmax_reference)
define("token_log_prob", _infer_token_log_prob, token_log_prob_reference)


def softmax(x: Value) -> Value:
    """Softmax along the last axis; computed in float32, returned in the dtype of x."""
    return emit("softmax", x)[0]


def token_log_prob(logits: Value, token_ids: Value) -> Value:
    """Natural logarithm of the probability that softmax(logits) gives to each token.

    Args:
      logits: [..., V] float32.
      token_ids: [...] int32.
    Returns: [...] float32.
    """
    return emit("token_log_prob", logits, token_ids)[0]
