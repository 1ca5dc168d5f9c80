"""Prompts in every form that people give them, and the forms that are refused."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poptransformer.errors import UserError
from poptransformer.generation.prompts import encode_prompts, is_single


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]


def encode(prompts, tokenizer=None, vocab_size=26, bos=25):
    return encode_prompts(prompts, tokenizer, vocab_size, bos)


@pytest.mark.parametrize(
    ("prompts", "encoded"),
    [
        ("abc", [[0, 1, 2]]),
        (["abc", "d"], [[0, 1, 2], [3]]),
        (["abc", [5], (6, 7)], [[0, 1, 2], [5], [6, 7]]),
        ("", [[25]]),
        ([""], [[25]]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(3), [[0, 1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (([1, 2], range(2)), [[1, 2], [0, 1]]),
        ([[]], [[25]]),
        ([[], [1]], [[25], [1]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([1, 2], np.uint8), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2]), [3]], [[1, 2], [3]]),
        ([np.int32(1), 2], [[1, 2]]),
        (np.array(["ab", "c"]), [[0, 1], [2]]),
        (np.array([1, 2], dtype=object), [[1, 2]]),
        (np.zeros(0, np.int64), [[25]]),
        (np.zeros((2, 0), np.int64), [[25], [25]]),
        (np.str_("ab"), [[0, 1]]),
    ],
)
def test_forms(prompts, encoded):
    got = encode(prompts, Letters())
    assert got == encoded
    assert all(type(token_id) is int for ids in got for token_id in ids)


@pytest.mark.parametrize("prompts", [[], (), None, np.zeros((0, 3), np.int64)])
def test_no_prompts(prompts):
    with pytest.raises(UserError, match="no prompts; give a string, a list of token ids, or a list of those"):
        encode(prompts)


@pytest.mark.parametrize(
    "prompts", [5, 1.5, {1, 2}, {"a": 1}, iter([1]), (x for x in "ab"), np.array(5), b"abc", bytearray(b"a")]
)
def test_what_is_no_prompt(prompts):
    with pytest.raises(UserError, match="is no prompt; give a string, a list of token ids, or a list of those"):
        encode(prompts)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1.0, 2.0], "prompt 0: wanted a string or whole numbers, not 1.0; prompt 1: wanted"),
        ([True], "prompt 0: wanted a string or whole numbers, not [True]"),
        ([None, "a"], "prompt 0: wanted a string or whole numbers, not None"),
        ([[1, [2]]], "prompt 0: wanted a string or whole numbers, not [1, [2]]"),
        ([[1.5]], "not [1.5]"),
        ([b"ab"], "not b'ab'"),
        ([np.array(4)], "not array(4)"),
        (np.array([1.0, 2.0]), "prompt 0: wanted a string or whole numbers"),
        (np.zeros((1, 2, 3), np.int64), "prompt 0: wanted a string or whole numbers"),
        ([[float("nan")] * 1000], "..."),
        ([-1], "prompt 0: token id -1 is outside the vocabulary of 26"),
        ([[1], [2, 26]], "prompt 1: token id 26 is outside the vocabulary of 26"),
        ([2**40], "token id 1099511627776 is outside"),
    ],
)
def test_refused(prompts, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        encode(prompts, Letters())
    assert len(str(error.value)) < 300


def test_all_problems_in_one_message():
    with pytest.raises(UserError, match=r"^prompt 0: is text, but .*; prompt 2: token id 99 is outside"):
        encode(["abc", [1], [99]])


def test_text_without_a_tokenizer():
    with pytest.raises(UserError, match="prompt 0: is text, but the checkpoint has no tokenizer; give token ids"):
        encode("abc")


def test_empty_without_a_token_to_begin_with():
    with pytest.raises(
        UserError, match=re.escape("prompt 1: is empty, and the model has no token to begin with (bos_token_id)")
    ):
        encode([[1], []], bos=None)


@given(st.lists(st.lists(st.integers(0, 25), min_size=1), min_size=1))
def test_ids_come_back(prompts):
    assert encode(prompts) == prompts
    assert [encode(prompt)[0] for prompt in prompts] == prompts
    assert not is_single(prompts) and all(map(is_single, prompts))
