"""A row's text and its end, with a tokenizer of two bytes a character."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poptransformer.generation.result import Timings
from poptransformer.generation.row import Row
from poptransformer.generation.settings import GenerationSettings


class Bytes:
    """A tokenizer whose ids are bytes of UTF-8; 256 is special."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def is_special(self, token_id):
        return token_id == 256


def make_row(max_new=100, stop=(), stop_ids=(), tokenizer=True, seed=3):
    settings = GenerationSettings(stop=stop, seed=seed)
    return Row(0, [1, 2], settings, stop_ids, max_new, Bytes() if tokenizer else None)


def take(row, ids):
    return row.take(ids, [-float(i) for i in range(len(ids))])


def take_all(row, ids, size):
    """Give ids in groups; returns the pieces' text joined."""
    text = ""
    for begin in range(0, len(ids), size):
        if row.finish_reason:
            break
        text += take(row, ids[begin : begin + size]).text
    return text


def test_a_piece_and_the_result():
    row = make_row(max_new=5)
    piece = take(row, [104, 105])
    assert (piece.text, piece.token_ids, piece.logprobs, piece.row) == ("hi", [104, 105], [-0.0, -1.0], 0)
    assert piece.finish_reason is row.finish_reason is None
    assert row.ids == [1, 2, 104, 105]
    piece = take(row, [33, 33, 33])
    assert (piece.text, piece.finish_reason) == ("!!!", "length")
    timings = Timings()
    result = row.result(True, timings)
    assert (result.text, result.token_ids, result.finish_reason) == ("hi!!!", [104, 105, 33, 33, 33], "length")
    assert result.logprobs == [0, -1, 0, -1, -2] and result.timings is timings
    assert (result.prompt_token_ids, result.seed) == ([1, 2], 3)
    assert row.result(False, timings).logprobs is None


def test_no_more_than_asked_for():
    row = make_row(max_new=3)
    piece = take(row, [97, 98, 99, 100, 101])
    assert (piece.token_ids, piece.text, piece.finish_reason) == ([97, 98, 99], "abc", "length")


def test_a_stop_id_counts_and_has_no_text():
    row = make_row(stop_ids=(256, 98))
    piece = take(row, [97, 98, 99])
    assert (piece.token_ids, piece.text, piece.finish_reason) == ([97, 98], "a", "stop")


def test_a_stop_id_as_the_last_token_allowed():
    row = make_row(max_new=2, stop_ids=(98,))
    assert take(row, [97, 98]).finish_reason == "stop"


def test_a_special_token_that_does_not_stop_has_no_text():
    assert take(make_row(), [97, 256, 98]).text == "ab"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_over_several_tokens(size):
    row = make_row(stop=("\nUser:",))
    assert take_all(row, list(b"Hello\nUse\nUser: more"), size) == "Hello\nUse"
    assert row.finish_reason == "stop"
    assert bytes(row.new_ids) == b"Hello\nUse\nUser:"  # up to the token that completed it
    assert row.result(False, Timings()).text == "Hello\nUse"


def test_text_that_may_be_a_stop_string_is_held_and_given_back():
    row = make_row(stop=("END",), max_new=6)
    assert take(row, list(b"the E")).text == "the "
    piece = take(row, list(b"N"))
    assert (piece.text, piece.finish_reason) == ("EN", "length")


def test_held_text_comes_out_before_a_stop_id():
    row = make_row(stop=("END",), stop_ids=(256,))
    piece = take(row, [*b"an EN", 256])
    assert (piece.text, piece.finish_reason) == ("an EN", "stop")


def test_a_stop_string_completed_by_the_last_token_allowed():
    row = make_row(stop=("c",), max_new=3)
    piece = take(row, list(b"abc"))
    assert (piece.text, piece.finish_reason, piece.token_ids) == ("ab", "stop", list(b"abc"))


def test_a_stop_string_of_many_bytes():
    row = make_row(stop=("👍",))
    assert take_all(row, list("café👍 yes".encode()), 1) == "café"
    assert row.finish_reason == "stop" and bytes(row.new_ids) == "café👍".encode()


def test_half_a_character_is_never_sent_but_not_lost():
    row = make_row(max_new=3)
    first, second = take(row, [0xE2, 0x82]), take(row, [0xAC])
    assert (first.text, second.text) == ("", "€")
    row = make_row(max_new=3)
    assert take(row, [97, 0xE2, 0x82]).text == "a" + "\ufffd"  # it ends there: what is left of a character shows as one


def test_a_stop_string_of_replacement_characters():
    """What the flush brings out may complete a stop string."""
    row = make_row(max_new=2, stop=("\ufffd",))
    piece = take(row, [97, 0xE2])
    assert (piece.text, piece.finish_reason) == ("a", "stop")


def test_without_a_tokenizer():
    row = make_row(tokenizer=False, max_new=2)
    piece = take(row, [1000, 2000])
    assert (piece.text, piece.token_ids, piece.finish_reason) == (None, [1000, 2000], "length")
    assert row.result(False, Timings()).text is None


def test_numpy_tokens_become_plain_numbers():
    row = make_row(max_new=1)
    row.take(np.array([97], np.int32), np.array([-0.5], np.float32))
    assert type(row.new_ids[0]) is int and type(row.logprobs[0]) is float


@given(st.text("abé€👍", max_size=30), st.lists(st.text("abé€", min_size=1, max_size=3), max_size=3), st.integers(1, 7))
def test_groups_of_tokens_do_not_matter(text, stops, size):
    ids = list(text.encode())
    if not ids:
        return
    row, at_once = make_row(len(ids), tuple(stops)), make_row(len(ids), tuple(stops))
    assert take_all(row, ids, size) == take(at_once, ids).text
    assert (row.new_ids, row.finish_reason) == (at_once.new_ids, at_once.finish_reason)
    ends = [at for at in map(text.find, stops) if at >= 0]
    assert row.result(False, Timings()).text == (text[: min(ends)] if ends else text)
    assert row.finish_reason == ("stop" if ends else "length")
