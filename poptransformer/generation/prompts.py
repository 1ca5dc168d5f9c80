"""Prompts as users give them: a string, token ids, or a list of those."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import numpy as np

from poptransformer.errors import UserError


def is_single(prompts) -> bool:
    """Whether this is one prompt (a string or a flat sequence of ids) rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and all(isinstance(item, numbers.Number) for item in prompts)
    return _is_sequence(prompts) and len(prompts) > 0 and all(isinstance(item, numbers.Integral) for item in prompts)


def encode_prompts(prompts, tokenizer, vocab_size: int, bos_token_id: int | None) -> list[list[int]]:
    """Turn prompts into token ids.

    Args:
      prompts: one prompt or a list of them; each a string or a sequence of token ids.
      tokenizer: None if the checkpoint has none; prompts must then be ids.
      bos_token_id: what an empty prompt becomes; None if the model has no such token.
    Returns: a list of ids for each prompt.
    Raises: UserError naming every prompt that cannot be used and why.
    """
    if is_single(prompts):
        prompts = [prompts]
    if not _is_sequence(prompts) or len(prompts) == 0:
        what = "no prompts" if _is_sequence(prompts) or prompts is None else f"{_shorten(prompts)} is no prompt"
        raise UserError(f"{what}; give a string, a list of token ids, or a list of those")
    encoded, problems = [], []
    for number, prompt in enumerate(prompts):
        try:
            encoded.append(_encode(prompt, tokenizer, vocab_size, bos_token_id))
        except UserError as error:
            problems.append(f"prompt {number}: {error}")
    if problems:
        raise UserError("; ".join(problems))
    return encoded


def _encode(prompt, tokenizer, vocab_size, bos_token_id):
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("is text, but the checkpoint has no tokenizer; give token ids")
        ids = tokenizer.encode(prompt)
    else:
        if not _is_sequence(prompt) or not all(_is_id(item) for item in prompt):
            raise UserError(f"wanted a string or whole numbers, not {_shorten(prompt)}")
        ids = [int(item) for item in prompt]
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise UserError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    if not ids:
        if bos_token_id is None:
            raise UserError("is empty, and the model has no token to begin with (bos_token_id)")
        ids = [bos_token_id]
    return ids


def _is_sequence(value):
    """Bytes are left out: they would count as ids, and mean text."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))


def _is_id(item):
    return isinstance(item, numbers.Integral) and not isinstance(item, (bool, np.bool_))


def _shorten(value):
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
