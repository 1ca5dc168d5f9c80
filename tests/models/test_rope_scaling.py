"""Frequencies of every kind of scaling, with the settings of real models, against transformers as it is installed."""

import math
import re

import numpy as np
import pytest
from tolerance import assert_close

from poptransformer import UnsupportedError, UserError
from poptransformer.models.rope_scaling import KINDS, RopeScaling

f32 = np.float32
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
# name -> (head_dim, max_position_embeddings, rope_theta, rope_scaling without its type)
SETTINGS = {
    "default: Llama 2": (128, 4096, 10000.0, {}),
    "default: Qwen2": (64, 131072, 1000000.0, {}),
    "linear: Vicuna 16K": (128, 4096, 10000.0, {"factor": 4.0}),
    "dynamic": (96, 2048, 10000.0, {"factor": 2.0}),
    "llama3: Llama 3.1": (
        128, 131072, 500000.0,
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "llama3: Llama 3.2 1B": (
        64, 131072, 500000.0,
        {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "llama3: no original length": (64, 8192, 500000.0, {"factor": 2, "low_freq_factor": 1, "high_freq_factor": 4}),
    "yarn: Qwen2.5": (128, 32768, 1000000.0, YARN),
    "yarn: attention_factor": (64, 131072, 10000.0, YARN | {"attention_factor": 0.7}),
    "yarn: mscale": (64, 131072, 10000.0, YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn: one mscale": (64, 131072, 10000.0, YARN | {"mscale": 0.707}),
    "yarn: not truncated": (64, 131072, 10000.0, YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2}),
    "yarn: factor 1": (64, 131072, 10000.0, YARN | {"factor": 1.0}),
    "yarn: factor null": (64, 131072, 10000.0, YARN | {"factor": None}),
    "yarn: a short ramp": (6, 61, 30.0, {"factor": 4.0, "original_max_position_embeddings": 13}),
}  # fmt: skip


def both_keys(kind, theta, settings):
    """The same in the keys of before transformers 5 and since."""
    yield "old", {"rope_theta": theta, "rope_scaling": {"type": kind} | settings if kind != "default" else None}
    yield "between", {"rope_theta": theta, "rope_scaling": {"rope_type": kind} | settings}
    yield "new", {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | settings}


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_transformers(name):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-dev.txt")
    pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    head_dim, max_seq_len, theta, settings = SETTINGS[name]
    for _, config in both_keys(name.partition(":")[0], theta, settings):
        rope = RopeScaling.from_hf(config, max_seq_len).rope(head_dim, max_seq_len)
        sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "max_position_embeddings": max_seq_len}
        wanted = LlamaRotaryEmbedding(transformers.LlamaConfig(**sizes, **config))
        # Both take powers in float32, by other roundings.
        assert_close(rope.inv_freq, wanted.inv_freq.numpy(), rtol=1e-6, atol=0)
        assert rope.attention_scale == pytest.approx(wanted.attention_scaling, rel=1e-12)
        assert not rope.interleaved


def test_every_kind_is_compared():
    assert {name.partition(":")[0] for name in SETTINGS} | {"factors"} == set(KINDS)  # transformers has no such kind


def test_factors_say_the_same_as_llama3():
    """Divisors of Llama 3.1's frequencies, as GGUF files have them in place of what they were computed from."""
    head_dim, max_seq_len, theta, settings = SETTINGS["llama3: Llama 3.1"]
    plain, wanted = (
        RopeScaling.from_hf({"rope_theta": theta, "rope_scaling": scaling}, max_seq_len).rope(head_dim, max_seq_len)
        for scaling in (None, {"rope_type": "llama3"} | settings)
    )
    factors = plain.inv_freq / wanted.inv_freq
    assert factors.min() == 1 and factors.max() == 8
    scaling = {"rope_type": "factors", "factors": factors.tolist()}
    rope = RopeScaling.from_hf({"rope_theta": theta, "rope_scaling": scaling}, max_seq_len).rope(head_dim, max_seq_len)
    assert_close(rope.inv_freq, wanted.inv_freq, rtol=2e-7, atol=0)  # a division back and forth
    with pytest.raises(UserError, match="rope_scaling has 64 factors for the 32 pairs of head_dim=64"):
        RopeScaling.from_hf({"rope_scaling": scaling}, 100).rope(64, 100)


def test_numbers_worked_out_by_hand():
    """llama3 with theta 16 over 8 features: angles 1, 1/2, 1/4, 1/8; over 4 pi positions 2, 1, 1/2 and 1/4 turns."""
    scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0.5, "high_freq_factor": 1.5}
    config = {"rope_theta": 16, "rope_scaling": scaling | {"original_max_position_embeddings": 4 * math.pi}}
    rope = RopeScaling.from_hf(config, 100).rope(8, 100)
    assert_close(rope.inv_freq, np.array([1, 0.5 * (0.5 / 8 + 0.5), 0.25 / 8, 0.125 / 8], f32))
    linear = RopeScaling.from_hf({"rope_theta": 16, "rope_scaling": {"type": "linear", "factor": 2}}, 100).rope(8, 100)
    assert_close(linear.inv_freq, np.array([0.5, 0.25, 0.125, 0.0625], f32))
    assert_close(RopeScaling.from_hf({}, 100).rope(4, 100).inv_freq, np.array([1, 0.01], f32))
    yarn = RopeScaling.from_hf({"rope_scaling": {"type": "yarn", "factor": math.e}}, 100).rope(4, 100)
    assert yarn.attention_scale == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling of type 'longrope' is not supported; there are default, linear, ",
        ),
        ({"rope_scaling": {"rope_type": None}}, "rope_scaling of type None is not supported"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_scaling of type ['yarn'] is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "that differ by the kind of layer are not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not supported"),
    ],
)
def test_unsupported(config, message):
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        RopeScaling.from_hf(config, 100)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling='linear': wanted a group of keys"),
        ({"rope_scaling": {"type": "linear"}}, "of type 'linear': wanted positive numbers for factor=None"),
        ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, "wanted positive numbers for factor='2'"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "wanted positive numbers for factor=True"),
        ({"rope_scaling": {"type": "yarn", "factor": -1, "beta_fast": 0}}, "positive numbers for factor=-1, beta_fast=0"),
        (
            {"rope_theta": 0, "rope_scaling": {"type": "llama3", "original_max_position_embeddings": "8k"}},
            "wanted positive numbers for rope_theta=0, original_max_position_embeddings='8k', factor=None, "
            "low_freq_factor=None, high_freq_factor=None",
        ),
        ({"rope_theta": float("nan")}, "wanted positive numbers for rope_theta=nan"),
        ({"rope_scaling": {"type": "factors"}}, "of type 'factors': wanted positive numbers for factors=None"),
        ({"rope_scaling": {"type": "factors", "factors": [1, 0, "2"]}}, "positive numbers for factors[1]=0, factors[2]='2'"),
    ],
)
def test_what_makes_no_sense(config, message):
    with pytest.raises(UserError, match=re.escape(message)):
        RopeScaling.from_hf(config, 100)


def test_lengths_and_sizes_that_are_refused():
    dynamic = RopeScaling.from_hf({"rope_scaling": {"type": "dynamic", "factor": 2}}, 100)
    assert_close(dynamic.rope(8, 100).inv_freq, RopeScaling.from_hf({}, 100).rope(8, 100).inv_freq, rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match="max_length=101: .*'dynamic' beyond max_position_embeddings=100 .* at most 100"):
        dynamic.rope(8, 101)
    with pytest.raises(UserError, match="head_dim=7: rotary positions turn pairs of features, so it must be even"):
        dynamic.rope(7, 100)
