"""Pickles as data: values of every protocol, and pickles that would run code, take memory or make no sense."""

import collections
import io
import os
import pathlib
import pickle
import pickletools
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poptransformer.checkpoint import inert_pickle
from poptransformer.checkpoint.inert_pickle import Function, Pairs, PickleReader
from poptransformer.errors import UnsupportedError, UserError

NAMES = {
    "collections OrderedDict": Function(PickleReader.read_ordered_dict),
    "torch float16": "float16",
    "torch pair": Function(lambda reader, arguments: ["made", *arguments]),
}


def read(data, load_persistent=None):
    return PickleReader("x.bin", io.BytesIO(data), NAMES, load_persistent, {"torch unread": "odd tensors"}).read()


def error(data, kind=UserError, load_persistent=None):
    with pytest.raises(UserError) as caught:
        read(data, load_persistent)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("x.bin: ")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500
    return str(caught.value)


def plain(value):
    """Our values as Python's; dicts come as lists of pairs."""
    if isinstance(value, Pairs):
        return {key: plain(each) for key, each in value.pairs}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


numbers = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False)
values = st.recursive(
    numbers | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(value=values, protocol=st.sampled_from([3, 4, 5]))
def test_values(value, protocol):
    assert plain(read(pickle.dumps(value, protocol))) == value


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_protocols(protocol):
    shared = ["a"]
    value = {"text": "äö\u20ac", "more": (1, -2.5, 2**70, None, True, shared, shared), "empty": ((), [], {})}
    got = read(pickle.dumps(value, protocol))
    assert plain(got) == value
    more = got.named()["more"]
    assert more[5] is more[6]


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_ordered_dict_whose_state_is_left_out(protocol):
    value = collections.OrderedDict(b=1, a=2)
    value._metadata = collections.OrderedDict(version=1)
    got = read(pickle.dumps(value, protocol))
    assert isinstance(got, Pairs) and got.pairs == [("b", 1), ("a", 2)]


def test_what_other_writers_emit():
    for data, wanted in (
        (b"(lp0\nI1\naI01\na.", [1, True]),
        (b"(dp0\nS'a'\nL5L\nsU\x01bNs.", {"a": 5, "b": None}),
        (b"(U\x01aK\x01d.", {"a": 1}),
        (b"(K\x01K\x02l.", [1, 2]),
        (b"]2e0.", None),  # what DUP left is in the way of the mark
        (b"K\x01K\x020.", 1),
        (b"K\x01(K\x02K\x031.", 1),
        (b"K\x01(0.", 1),  # POP of a mark
        (b"ccollections\nOrderedDict\n(]](U\x01aK\x01eatR.", {"a": 1}),  # as Python 2 wrote them
    ):
        if wanted is None:
            error(data)
        else:
            assert plain(read(data)) == wanted


def test_several_in_one_file():
    file = io.BytesIO(pickle.dumps(1) + pickle.dumps("two", 2) + b"rest")
    reader = PickleReader("x.bin", file, NAMES)
    assert (reader.read(), reader.read()) == (1, "two")
    assert file.read() == b"rest"


def test_names_and_functions():
    assert read(b"ctorch\nfloat16\n.") == "float16"
    assert read(b"\x80\x04\x8c\x05torch\x8c\x07float16\x93.") == "float16"
    assert read(b"ctorch\npair\nK\x01K\x02\x86R.") == ["made", 1, 2]


def test_persistent_ids():
    assert read(b"K\x05Q.", lambda reader, value: ("loaded", value)) == ("loaded", 5)
    assert "its pickle has a persistent id, which" in error(b"K\x05Q.")
    assert "has the instruction PERSID" in error(b"P5\n.", load_persistent=lambda reader, value: value)


# Pickles that run code where they are obeyed


class Runs:
    """Calls something when it is read by Python's pickle."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


CAN_RUN = "which weights do not; such a file can run code, so it is not read any further"


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Runs(os.system, "touch pwned"), "posix.system"),
        (Runs(eval, "open('pwned', 'w')"), "eval"),
        ({"a": [1, (Runs(exec, "open('pwned', 'w')"),)]}, "exec"),
        (Runs(getattr, "os", "system"), "getattr"),
        (collections.Counter("aab"), "collections.Counter"),
        (pathlib.PurePosixPath("x"), "PurePosixPath"),
    ],
)
def test_calls_are_refused_by_name(tmp_path, monkeypatch, value, name, protocol):
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(value, protocol)
    message = error(data)
    assert name in message
    assert CAN_RUN in message
    assert os.listdir(tmp_path) == []


def test_the_attack_would_work(tmp_path, monkeypatch):
    """The pickles above do run code where Python reads them, so the test above can fail."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Runs(eval, "open('pwned', 'w').close()"), 2))
    assert os.listdir(tmp_path) == ["pwned"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cos\nsystem\n(S'touch pwned'\ntR.", "needs os.system, " + CAN_RUN),
        (b"(S'touch pwned'\nios\nsystem\n.", "needs os.system, " + CAN_RUN),  # INST
        (b"(cos\nsystem\nS'touch pwned'\no.", "needs os.system, " + CAN_RUN),  # OBJ
        (b"\x8c\x02os\x8c\x06system\x93(S'touch pwned'\ntR.", "needs os.system, " + CAN_RUN),
        (b"cbuiltins\neval\n.", "needs builtins.eval, " + CAN_RUN),  # named, and never called
        (b"]cbuiltins\neval\na0K\x01.", "needs builtins.eval, " + CAN_RUN),  # nor kept
        # A dotted name reaches through an allowed one; a space in one part is no border of two.
        (b"\x8c\x0bcollections\x8c\x18OrderedDict.__subclasses__\x93.", "damaged"),
        (
            b"\x8c\x0bcollections\x8c\x1aOrderedDict.__subclasses__\x93.",
            "needs collections.OrderedDict.__subclasses__, " + CAN_RUN,
        ),
        (b"\x8c\x05torch\x8c\x0fpair.call.check\x93.", "needs torch.pair.call.check, " + CAN_RUN),
        (b"\x8c\x05torch\x8c\x09\xc2\xa0float16\x93.", "needs torch.\\xa0float16, "),
        (b"K\x01K\x02\x93.", "has a name that is no text"),
        (b"]\x8c\x06system\x93.", "has a name that is no text"),
        # Names made up on the way, and names that would spoil a terminal.
        (b"cos\x1b[2J\nsystem\n.", "needs os\\x1b[2J.system, "),
        (b"c" + b"o" * 5000 + b"\nsystem\n.", "o..., " + CAN_RUN),
        # Calls of what is no function of ours.
        (b"ctorch\nfloat16\n)R.", "has a call of something that is no function"),
        (b"K\x05)R.", "has a call of something that is no function"),
        (b"ctorch\npair\nK\x05R.", "has a call of something that is no function"),
        (b"ctorch\npair\n]R.", "has a call of something that is no function"),
        # Objects with a class and a state.
        (b"ccollections\nOrderedDict\n)\x81.", "has the instruction NEWOBJ"),
        (b"ccollections\nOrderedDict\n)}\x92.", "has the instruction NEWOBJ_EX"),
        (b"(icollections\nOrderedDict\n.", "has the instruction INST"),
        (b"(ccollections\nOrderedDict\no.", "has the instruction OBJ"),
        (b"ctorch\nfloat16\n}b.", "has an object with a state of its own"),
        (b"}}b.", "has an object with a state of its own"),
        (b"ctorch\npair\n)R}b.", "has an object with a state of its own"),
        (b"ctorch\npair\n}b.", "has an object with a state of its own"),
        (b"ccollections\nOrderedDict\n)R(N}tb.", "has an object with a state of its own"),
        (b"ccollections\nOrderedDict\n(K\x01tR.", "has an OrderedDict of something else than pairs"),
        (b"ccollections\nOrderedDict\n(]]tR.", "has an OrderedDict of something else than pairs"),
        (b"ccollections\nOrderedDict\n(](]K\x01aatR.", "damaged"),
        (b"ccollections\nOrderedDict\n(]]K\x01aatR.", "has an OrderedDict of something else than pairs"),
        # The registry of extensions, buffers beside the file, sets (whose members Python would hash).
        (b"\x82\x01.", "has the instruction EXT1"),
        (b"\x83\x01\x01.", "has the instruction EXT2"),
        (b"\x84\x01\x01\x01\x01.", "has the instruction EXT4"),
        (b"\x97.", "has the instruction NEXT_BUFFER"),
        (b"\x98.", "has the instruction READONLY_BUFFER"),
        (b"\x96\x01\0\0\0\0\0\0\0a.", "has the instruction BYTEARRAY8"),
        (b"\x8f.", "has the instruction EMPTY_SET"),
        (b"(\x91.", "has the instruction FROZENSET"),
    ],
)
def test_hostile(tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    assert message in error(data)
    assert os.listdir(tmp_path) == []


def test_names_without_a_reader():
    message = error(b"ctorch\nunread\n.", UnsupportedError)
    assert message == "x.bin: holds odd tensors (torch.unread), for which there is no reader"


# Pickles that make no sense


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02",
        b"K\x01",  # no STOP
        b"\xff.",
        b"K",
        b"a.",
        b"K\x01a.",
        b"K\x01K\x02s.",
        b"]K\x01K\x02s.",
        b"}(K\x01u.",
        b"(K\x01d.",
        b"t.",
        b"e.",
        b"1.",
        b"0.",
        b"2.",
        b"R.",
        b"b.",
        b"q\x00.",
        b"h\x00.",
        b"g7\n.",
        b"K\x01p-1\n.",
        b"K\x01r\xff\xff\xff\xff.",
        b"\x85.",
        b"\x86.",
        b"K\x01(\x85.",
        b"X\xff\xff\xff\xffa.",
        b"\x8d" + b"\xff" * 8 + b"a.",
        b"\x8d" + struct.pack("<q", 1 << 40) + b"a.",
        b"B\xff\xff\xff\x7fa.",
        b"\x8b\xff\xff\xff\x7fa.",
        b"\x8b\xff\xff\xff\xffa.",
        b"T\xff\xff\xff\xffa.",
        b"I" + b"9" * 5000 + b"\n.",
        b"L" + b"9" * 5000 + b"L\n.",
        b"p" + b"9" * 5000 + b"\n.",
        b"X\x01\0\0\0\xff.",
        b"S'a\n.",
        b"Fx\n.",
        b"cos.",
        b"\x95" + b"\xff" * 8 + b".",
    ],
)
def test_damaged(data):
    assert "damaged: its pickle cannot be read (" in error(data)


def test_every_truncation():
    value = collections.OrderedDict(a=[1, 2.5, "text"], b=(None, 2**70))
    for protocol in (0, 2, 4):
        data = pickle.dumps(value, protocol)
        for size in range(len(data)):
            error(data[:size])


@settings(deadline=None, max_examples=300)
@given(
    data=st.binary(max_size=60)
    | st.lists(st.sampled_from([o.code.encode("latin-1") for o in pickletools.opcodes])).map(b"".join)
)
def test_noise(data):
    try:
        read(data)
    except UserError:
        pass


# Pickles that take memory or time


def seconds_of(data, message):
    start = time.perf_counter()
    assert message in error(data)
    return time.perf_counter() - start


def test_bombs(monkeypatch):
    monkeypatch.setattr(inert_pickle, "MAX_STEPS", 20_000)
    many = "takes more than 20000 steps, which weights do not"
    pairs = b"](" + b"(K\x01K\x01l" * 3000 + b"eq\x00" + b"ccollections\nOrderedDict\nh\x00\x85R0" * 1000 + b"."
    for data, message in (
        (b"}" * 30_000 + b".", many),
        (b"(" * 30_000 + b".", many),
        (b"]" + b"\x85" * 30_000 + b".", many),
        (pairs, many),  # 1000 dicts of 3000 pairs, made of one list
        (b"K\x01" + b"r\xff\xff\xff\x7f" + b".", "damaged"),
        (b"K\x01" + b"p99999999999999999999\n" + b".", "damaged"),
    ):
        assert seconds_of(data, message) < 2


def test_deep_nesting():
    """100,000 levels: neither reading, nor looking, nor giving back the memory recurs."""
    depth = 100_000
    for data in (
        b")" + b"\x85" * depth + b".",
        b"]" * depth + b"a" * (depth - 1) + b".",
        b"}U\x01a" * depth + b"N" + b"s" * depth + b".",
    ):
        value = read(data)
        assert isinstance(value, (tuple, list, Pairs))
        del value


def test_keys_are_not_hashed():
    """Numbers with one hash make a dict take quadratic time, and a tuple nested deep enough ends the process."""
    modulus = (1 << 61) - 1
    keys = b"".join(pickle.dumps(i * modulus, 2)[2:-1] + b"N" for i in range(1, 50_000))
    start = time.perf_counter()
    assert len(read(b"}(" + keys + b"u.").pairs) == 49_999
    assert time.perf_counter() - start < 5
    assert read(b"})" + b"\x85" * 200_000 + b"Ns.").named() == {}


def test_a_value_inside_itself():
    value = read(b"]q\x00h\x00a.")
    assert value[0] is value
    value = read(b"}q\x00U\x01ah\x00s.")
    assert value.named()["a"] is value
