"""Rope: the frequencies by which a model turns its queries and keys."""

from __future__ import annotations

import dataclasses

import numpy as np

from poptransformer import ops


@dataclasses.dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions, without weights; all attention layers of a model share one. The fields are those of `ops.rope`.

    Attributes:
      inv_freq: [rotary_dim / 2] float32, radians a position.
      attention_scale: factor on the features that turn.
      interleaved: whether pairs are neighbours.
    """

    inv_freq: np.ndarray
    attention_scale: float = 1.0
    interleaved: bool = False

    def __call__(self, query, key, tokens):
        """query: [B, T, N, H], key: [B, T, K, H], tokens: DecoderTokens -> both turned by the tokens' positions."""
        inv_freq = query.graph.constant(self.inv_freq)
        return [ops.rope(x, tokens.position_ids, inv_freq, self.attention_scale, self.interleaved) for x in (query, key)]
