"""Stop strings against a search in the whole text, however it is cut into pieces."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poptransformer.errors import UserError
from poptransformer.generation.stops import StopStrings


def run(stops, pieces):
    """Return (text emitted, whether stopped) as a stream would see them."""
    watcher, out = StopStrings(stops), []
    for piece in pieces:
        text, stopped = watcher.push(piece)
        out.append(text)
        assert stopped == watcher.is_stopped
        if stopped:
            break
    out.append(watcher.flush())
    return "".join(out), watcher.is_stopped


def whole(stops, text):
    ends = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def test_emits_what_is_safe_and_holds_what_may_match():
    watcher = StopStrings(["\nUser:"])
    assert watcher.push("Hello") == ("Hello", False)
    assert watcher.push("!\nUs") == ("!", False)
    assert watcher.push("ual\n") == ("\nUsual", False)
    assert watcher.push("User: hi") == ("", True)
    assert watcher.push("more") == ("", True)
    assert watcher.flush() == ""


def test_held_text_comes_out_at_the_end():
    watcher = StopStrings(["END"])
    assert watcher.push("the EN") == ("the ", False)
    assert watcher.flush() == "EN"
    assert not watcher.is_stopped


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abcd", "bc"], "xabcd", ("x", True)),  # the one that begins first, though the other ends first
        (["abcd", "bc"], "xabce", ("xa", True)),
        (["abcd", "bc"], "xabc", ("xa", True)),  # the text ends while the longer one may still come
        (["aab"], "aaab", ("a", True)),
        (["ab", "abc"], "abc", ("", True)),
        (["b", "a"], "xab", ("x", True)),
        (["."], "...", ("", True)),
        ([], "anything", ("anything", False)),
        (None, "anything", ("anything", False)),
        ("end", "the end.", ("the ", True)),
        (["é👍"], "café👍", ("caf", True)),
    ],
)
def test_overlaps(stops, text, expected):
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected


def test_of_two_that_begin_together_the_one_that_ends_first_stops_at_once():
    assert StopStrings(["abc", "ab"]).push("xab") == ("x", True)


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_pieces_do_not_matter(stops, pieces):
    assert run(stops, pieces) == whole(stops, "".join(pieces))


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab", max_size=20))
def test_holds_back_no_more_than_may_match(stops, text):
    watcher, out = StopStrings(stops), ""
    for count, letter in enumerate(text, 1):
        piece, stopped = watcher.push(letter)
        out += piece
        if stopped:
            return
        held = text[len(out) : count]
        assert held == "" or any(stop.startswith(held) or stop in held for stop in stops)


def test_errors():
    with pytest.raises(UserError, match="a stop string is empty, and would end every text"):
        StopStrings(["a", ""])
    with pytest.raises(UserError, match=re.escape("a stop string is text, not int; give ids as stop token ids")):
        StopStrings([50256])
