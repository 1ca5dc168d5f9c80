"""Settings: what is allowed, how they spread over rows, and numbers of every kind."""

import fractions
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poptransformer.errors import UserError
from poptransformer.generation.settings import GenerationSettings, check_stop_ids, settings_per_row

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({}, 0),
        ({"top_k": 5}, 1),
        ({"top_p": 0.9}, 1),
        ({"min_p": 0.1}, 1),
        ({"top_k": 5, "temperature": 0}, 0),
        ({"seed": 3}, 0),
    ],
)
def test_temperature_is_one_where_something_is_to_be_chosen(settings, temperature):
    assert GenerationSettings(**settings).temperature == temperature


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("max_new_tokens", [0, -1, 1.5, True, "3", NAN], "a whole number of at least 1"),
        ("temperature", [-0.1, NAN, INF, "warm", True, 10**400, 1j], "a number of at least 0"),
        ("top_k", [-1, 1.0, None, False], "a whole number of at least 0"),
        ("top_p", [0, 1.01, -1, NAN, None], "a number in (0, 1]"),
        ("min_p", [-0.1, 1.01, NAN, None], "a number in [0, 1]"),
        ("repetition_penalty", [0, -1, NAN, INF, None, 10**400], "a number above 0"),
        ("seed", [1.5, "x", True, NAN], "a whole number"),
        ("ignore_eos", [1, None, "yes"], "true or false"),
        ("stop_token_ids", [5.5, [5.5], [True], "x", [-1], ["x"]], "whole numbers of at least 0"),
        ("stop", [5, 5.5, "", [""], [5], ["a", ""]], "strings that are not empty"),
    ],
)
def test_values_out_of_range(name, values, wanted):
    for value in values:
        with pytest.raises(UserError, match=re.escape(name + "=") + r".*: wanted " + re.escape(wanted)):
            settings_per_row(1, **{name: value})


def test_all_problems_of_a_row_in_one_message():
    with pytest.raises(UserError, match=r"temperature=-1: wanted .*; top_p=2: wanted "):
        settings_per_row(1, temperature=-1, top_p=2)


def test_a_message_names_the_row_when_there_are_several():
    with pytest.raises(UserError, match=r"^prompt 1: top_k=-2: wanted"):
        settings_per_row(3, top_k=[0, -2, 1])


def test_unknown_settings():
    with pytest.raises(
        UserError, match=r"unknown generation setting 'topk'; did you mean 'top_k'\?; settings: max_new_tokens, "
    ):
        settings_per_row(1, topk=5)
    with pytest.raises(UserError, match="'zzz'; settings: "):
        settings_per_row(1, zzz=5)
    with pytest.raises(UserError, match="'topk'; did you mean 'top_k'?.*'tempreature'; did you mean 'temperature'?"):
        settings_per_row(1, topk=5, tempreature=1)


def test_a_list_gives_each_row_its_own():
    rows = settings_per_row(3, temperature=[0, 0.5, None], top_k=7, seed=np.array([1, 2, 3]), max_new_tokens=(4, None, 6))
    assert [row.temperature for row in rows] == [0, 0.5, 1]
    assert [row.top_k for row in rows] == [7, 7, 7]
    assert [row.seed for row in rows] == [1, 2, 3]
    assert [row.max_new_tokens for row in rows] == [4, None, 6]


@pytest.mark.parametrize("value", [[], [1, 2], np.arange(4), ()])
def test_lists_of_the_wrong_length(value):
    with pytest.raises(UserError, match=f"seed: {len(value)} values for 3 prompts; give one value, or one for each prompt"):
        settings_per_row(3, seed=value)


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ("END", [("END",), ("END",)]),
        (["a", "b", "c"], [("a", "b", "c")] * 2),
        ([["a"], ["b", "c"]], [("a",), ("b", "c")]),
        ([["a"], "b"], [("a",), ("b",)]),
        ([None, ["b"]], [(), ("b",)]),
        ([], [(), ()]),
        (None, [(), ()]),
        (np.array(["a", "b"]), [("a", "b")] * 2),
        ((text for text in "ab"), [("a", "b")] * 2),
    ],
)
def test_stop_strings_for_all_or_for_each(value, rows):
    assert [row.stop for row in settings_per_row(2, stop=value)] == rows


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (5, [(5,), (5,)]),
        (np.int64(5), [(5,), (5,)]),
        ([5, 6, 7], [(5, 6, 7)] * 2),
        ({5}, [(5,), (5,)]),
        (np.array([5, 6]), [(5, 6)] * 2),
        (np.array([[5], [6]]), [(5,), (6,)]),
        ([[5], 6], [(5,), (6,)]),
        ([[], [6]], [(), (6,)]),
        (range(3), [(0, 1, 2)] * 2),
    ],
)
def test_stop_ids_for_all_or_for_each(value, rows):
    assert [row.stop_token_ids for row in settings_per_row(2, stop_token_ids=value)] == rows


def test_stop_lists_of_the_wrong_length():
    with pytest.raises(UserError, match="stop: 3 values for 2 prompts"):
        settings_per_row(2, stop=[["a"], ["b"], ["c"]])


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8, np.uint64, np.array, int])
def test_whole_numbers_of_every_kind(kind):
    (row,) = settings_per_row(1, seed=kind(5), top_k=kind(5), max_new_tokens=kind(5), temperature=kind(1))
    assert (row.seed, row.top_k, row.max_new_tokens, row.temperature) == (5, 5, 5, 1)
    assert type(row.seed) is int and row.seed_words() == (5, 0)
    assert GenerationSettings(seed=np.int8(-5)).seed_words() == (2**32 - 5, 2**32 - 1)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.array, fractions.Fraction, float])
def test_numbers_of_every_kind(kind):
    (row,) = settings_per_row(1, temperature=kind(0.5), top_p=kind(0.5), min_p=kind(0.5), repetition_penalty=kind(0.5))
    assert (row.temperature, row.top_p, row.min_p, row.repetition_penalty) == (0.5, 0.5, 0.5, 0.5)


@given(st.integers())
def test_seed_words_are_the_low_64_bits(seed):
    low, high = GenerationSettings(seed=seed).seed_words()
    assert 0 <= low < 2**32 and 0 <= high < 2**32
    assert (low + (high << 32) - seed) % 2**64 == 0


def test_a_seed_is_drawn_for_each_row():
    assert len({row.seed for row in settings_per_row(20)}) > 15


def test_stop_ids_that_the_device_cannot_look_for():
    check_stop_ids(range(64), 100)
    with pytest.raises(UserError, match="stop_token_ids: 100 is outside the vocabulary of 100"):
        check_stop_ids([5, 100], 100)
    with pytest.raises(UserError, match="stop_token_ids: 65 with the model's own; at most 64 are supported"):
        check_stop_ids(range(65), 100)
