"""Parameters to checkpoint keys, and one message for all that does not fit."""

import logging

import pytest

from poptransformer.checkpoint import WantedWeight, match_weights
from poptransformer.errors import UnsupportedError, UserError


class Held:
    """The part of a checkpoint that matching needs."""

    def __init__(self, dtypes=(), **shapes):
        self.dtypes = dict(dtypes)
        self.shapes = {name.replace("__", "."): shape for name, shape in shapes.items()}

    def names(self):
        return list(self.shapes)

    def shape(self, name):
        return self.shapes[name]

    def stored_dtype(self, name):
        return self.dtypes.get(name, "float32")


def want(*keys, shape=(2, 3), meaning=""):
    return WantedWeight(keys, shape, meaning)


def message(wanted, checkpoint, ignore=()):
    with pytest.raises(UserError) as caught:
        match_weights(wanted, checkpoint, ignore)
    return str(caught.value)


def test_the_first_key_that_is_there():
    checkpoint = Held(wte__weight=(2, 3), transformer__h__weight=(2, 3), h__weight=(2, 3))
    wanted = {
        "embedding": want("transformer.wte.weight", "wte.weight"),
        "block": want("transformer.h.weight", "h.weight"),  # both are there; the other is no leftover
        "head": want("lm_head.weight", "wte.weight"),  # tied: a key may serve twice
    }
    assert match_weights(wanted, checkpoint) == {
        "embedding": "wte.weight",
        "block": "transformer.h.weight",
        "head": "wte.weight",
    }


def test_ignored_keys_are_counted(caplog):
    checkpoint = Held(a=(2, 3), h__0__attn__bias=(1,), h__1__attn__bias=(1,))
    with caplog.at_level(logging.DEBUG, "poptransformer.checkpoint.weights"):
        assert match_weights({"a": want("a")}, checkpoint, [r"h\.\d+\.attn\.bias"]) == {"a": "a"}
    assert caplog.messages == ["2 keys of the checkpoint are no weights and were ignored"]


def test_ignore_matches_whole_keys():
    assert "h.attn.bias.weight" in message({}, Held(h__attn__bias__weight=(1,)), [r"h\.attn\.bias"])


def test_missing():
    wanted = {"a": want("a"), "head": want("lm_head.weight", "head"), "norm": want("model.norm.weight")}
    assert message(wanted, Held(a=(2, 3))) == (
        "checkpoint lacks 2 of 3 weights: lm_head.weight, model.norm.weight; "
        "set random_weights: true to run without a checkpoint"
    )


def test_misshapen():
    meaning = "(num_kv_heads * head_dim, hidden_size)"
    wanted = {"k": want("k_proj.weight", shape=(6, 4), meaning=meaning), "b": want("b")}
    assert message(wanted, Held(k_proj__weight=(4, 6), b=(3,))) == (
        "k_proj.weight: checkpoint has (4, 6), config gives (6, 4) = (num_kv_heads * head_dim, hidden_size)\n"
        "b: checkpoint has (3,), config gives (2, 3)"
    )


def test_extra():
    assert message({"a": want("a")}, Held(a=(2, 3), rotary=(1,), mask=(1,)), ["mask"]) == (
        "checkpoint has 1 weight that this model has no place for: rotary; "
        "is it of another model family, or config.json of another checkpoint?"
    )


def test_what_is_not_stored_as_floats():
    dtypes = {"a": "int8", "b": "F8_E4M3", "d": "int8", "e": "bfloat16", "mask": "bool"}
    checkpoint = Held(dtypes, a=(2, 3), b=(2, 3), d=(2, 3), e=(2, 3), mask=(1,), a_scale=(1,))
    wanted = {name: want(name) for name in "abde"} | {"again": want("a")}
    with pytest.raises(UnsupportedError) as caught:
        match_weights(wanted, checkpoint, ["mask"])
    assert str(caught.value).splitlines() == [
        "a, d: stored as int8: a quantised checkpoint; this version reads float32, float16 and bfloat16",
        "b: stored as F8_E4M3: a quantised checkpoint; this version reads float32, float16 and bfloat16",
        "checkpoint has 1 weight that this model has no place for: a_scale; "
        "is it of another model family, or config.json of another checkpoint?",
    ]


def test_everything_in_one_message():
    text = message({"a": want("a"), "b": want("b")}, Held(a=(1,), c=(1,)))
    assert [line.split(":")[0] for line in text.splitlines()] == [
        "checkpoint lacks 1 of 2 weights",
        "a",
        "checkpoint has 1 weight that this model has no place for",
    ]


def test_long_lists_are_cut():
    names = [f"w{i:02}" for i in range(28)]
    shown = ", ".join(names[:8])
    assert f"28 of 28 weights: {shown} and 20 more; set" in message({name: want(name) for name in names}, Held())
    assert f"28 weights that this model has no place for: {shown} and 20 more; is" in message(
        {}, Held(**{name: (1,) for name in names})
    )
    lines = message({name: want(name) for name in names}, Held(**{name: (1,) for name in names})).splitlines()
    assert len(lines) == 9 and lines[-1] == "and 20 more"
