"""Choosing the next token: repetition_penalty, mark_tokens, sample.

Every setting is a value of its own row, so changing one recompiles nothing. A row's randomness depends on its seed and
the position of the token alone: neighbours, batch size and steps per call change nothing.
"""

from __future__ import annotations

import numpy as np

from poptransformer.graph import Spec, Value
from poptransformer.ops.op import define, emit, require

THREEFRY_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
THREEFRY_PARITY = 0x1BD11BDA
LEAST_TEMPERATURE = 1e-30  # below it choices are the same, but a float32 logit over the temperature would be infinite


def threefry2x32(key, counter):
    """Threefry-2x32 with 20 rounds: a hash of a 64-bit key and a 64-bit counter; gives the first 32 bits of two.

    Args:
      key, counter: pairs of uint32 arrays that broadcast.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    keys = (*key, key[0] ^ key[1] ^ np.uint32(THREEFRY_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in THREEFRY_ROTATIONS[group % 2]:
            x = x + y
            y = ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x


def gumbel_noise(seed, position, vocab_size):
    """Noise with the standard Gumbel distribution: [B, 2] uint32, [B] int32 -> [B, V] float32; -log(-log(u)), u in (0, 1)."""
    with np.errstate(over="ignore"):
        token = np.arange(vocab_size, dtype=np.uint32)[None]
        bits = threefry2x32((seed[:, :1], seed[:, 1:]), (position.astype(np.uint32)[:, None], token))
    uniform = ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.log(-np.log(uniform))


def keep_mask(scaled, top_k, top_p, min_p):
    """Which of one row's tokens may be chosen: [V] logits over temperature -> [V] bool.

    Tokens with equal logits are kept or dropped together. top_k keeps the k best; top_p then keeps each token for which
    the better ones have together less than top_p of the probability that is left; min_p keeps those that have at least
    min_p of the best one's probability.
    """
    order = np.sort(scaled)[::-1]
    keep = scaled >= order[min(top_k, len(order)) - 1] if top_k > 0 else np.ones(len(scaled), bool)
    probability = np.where(keep, np.exp(scaled - order[0]), 0).astype(np.float64)
    probability /= probability.sum()
    if top_p < 1:
        descending = np.sort(probability)[::-1]
        mass_before = np.concatenate([[0], np.cumsum(descending)])[np.searchsorted(-descending, -probability, "left")]
        keep &= mass_before < top_p
    return keep & (scaled >= order[0] + np.log(np.maximum(min_p, np.finfo(np.float32).tiny)))


def sample_reference(logits, temperature, top_k, top_p, min_p, seed, position, top_k_limit=None):
    """argmax of logits where temperature is 0, else of logits / temperature + Gumbel noise over the tokens kept."""
    token_ids = np.argmax(logits, -1).astype(np.int32)
    for b in np.flatnonzero(temperature > 0):
        scaled = (logits[b] / np.maximum(temperature[b], np.float32(LEAST_TEMPERATURE))).astype(np.float32)
        keep = keep_mask(scaled, int(top_k[b]), float(top_p[b]), float(min_p[b]))
        noise = gumbel_noise(seed[b : b + 1], position[b : b + 1], logits.shape[1])[0]
        token_ids[b] = np.argmax(np.where(keep, scaled + noise, -np.inf))
    return [token_ids]


def repetition_penalty_reference(logits, seen, penalty):
    """Logits of seen tokens are divided by the penalty where positive, multiplied where negative."""
    penalised = np.where(logits > 0, logits / penalty[:, None], logits * penalty[:, None])
    return [np.where(seen, penalised, logits).astype(logits.dtype)]


def mark_tokens_reference(seen, token_ids, num_tokens):
    """seen[b, id] = True for the first num_tokens[b] ids of row b."""
    seen = seen.copy()
    for b, count in enumerate(num_tokens):
        seen[b, token_ids[b, :count]] = True
    return [seen]


def _require_rows(batch_size, **specs):
    for name, (spec, dtype, *rest) in specs.items():
        shape = (batch_size, *rest)
        require(spec == Spec(shape, dtype), f"{name} must be {Spec(shape, dtype)}, not {spec}")


def _infer_sample(logits, temperature, top_k, top_p, min_p, seed, position, top_k_limit=None):
    require(logits.rank == 2 and logits.dtype == np.float32, "wants float32 logits [B, V]")
    _require_rows(
        logits.shape[0],
        temperature=(temperature, np.float32),
        top_k=(top_k, np.int32),
        top_p=(top_p, np.float32),
        min_p=(min_p, np.float32),
        seed=(seed, np.uint32, 2),
        position=(position, np.int32),
    )
    return [Spec(logits.shape[:1], np.int32)]


def _infer_repetition_penalty(logits, seen, penalty):
    require(logits.rank == 2 and logits.dtype == np.float32, "wants float32 logits [B, V]")
    _require_rows(logits.shape[0], seen=(seen, bool, logits.shape[1]), penalty=(penalty, np.float32))
    return [logits]


def _infer_mark_tokens(seen, token_ids, num_tokens):
    require(seen.rank == 2 and seen.dtype == bool, "wants bool seen [B, V]")
    require(token_ids.rank == 2, "wants token ids [B, T]")
    _require_rows(seen.shape[0], token_ids=(token_ids, np.int32, token_ids.shape[1]), num_tokens=(num_tokens, np.int32))
    return [seen]


define("sample", _infer_sample, sample_reference)
define("repetition_penalty", _infer_repetition_penalty, repetition_penalty_reference)
define("mark_tokens", _infer_mark_tokens, mark_tokens_reference)


def sample(logits, temperature, top_k, top_p, min_p, seed, position, top_k_limit=None) -> Value:
    """Choose one token for each row.

    Args:
      logits: [B, V] float32.
      temperature: [B] float32; 0 takes the best token (the first of equals).
      top_k: [B] int32, number of best tokens to choose from; 0 means all.
      top_p: [B] float32 in (0, 1], share of the probability to choose from; 1 means all.
      min_p: [B] float32 in [0, 1], least probability relative to the best token's; 0 means all.
      seed: [B, 2] uint32, low and high half of the row's seed.
      position: [B] int32, position in the row of the token to choose.
      top_k_limit: the largest top_k that a run will ask for, or None where it is not known: backends that find the best by
        sorting sort that many.
    Returns: [B] int32.
    Source: top_p (nucleus): Holtzman et al. 2020, arXiv:1904.09751; min_p: Nguyen et al. 2024, arXiv:2407.01082; choice
      by adding Gumbel noise: Maddison et al. 2014, arXiv:1411.0030.
    """
    known = {} if top_k_limit is None else {"top_k_limit": int(top_k_limit)}
    return emit("sample", logits, temperature, top_k, top_p, min_p, seed, position, **known)[0]


def repetition_penalty(logits, seen, penalty) -> Value:
    """Make tokens that a row already has less likely (penalty > 1) or more (< 1).

    Args:
      logits: [B, V] float32.
      seen: [B, V] bool, tokens of the row so far.
      penalty: [B] float32; 1 changes nothing.
    Returns: [B, V] float32.
    Source: Keskar et al. 2019, arXiv:1909.05858; RepetitionPenaltyLogitsProcessor in HF transformers.
    """
    return emit("repetition_penalty", logits, seen, penalty)[0]


def mark_tokens(seen, token_ids, num_tokens) -> Value:
    """Note which tokens a row has.

    Args:
      seen: [B, V] bool.
      token_ids: [B, T] int32.
      num_tokens: [B] int32, ids of the row that count; the others are padding.
    Returns: [B, V] bool.
    """
    return emit("mark_tokens", seen, token_ids, num_tokens)[0]
