"""Gemma against Hugging Face: golden numbers everywhere, live where torch is installed; variants, errors, sizes."""

import re

import numpy as np
import parity
import pytest
from parity import EACH_ENGINE, REFERENCE, SIXTEEN_BITS

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.models.gemma import GemmaConfig

BASE = {
    "model_type": "gemma",
    "vocab_size": parity.VOCAB_SIZE,
    "hidden_size": 30,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "max_position_embeddings": parity.MAX_LENGTH,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
VARIANTS = {
    "plain": {},
    "as the first releases have it": {"hidden_act": "gelu", "hidden_activation": None, "rope_theta": 77.0, "rms_norm_eps": 0.1},
    "more key/value heads": {"num_key_value_heads": 3, "head_dim": 2},
    "untied, biases": {"tie_word_embeddings": False, "attention_bias": True},
    "linear": {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "another activation": {"hidden_act": "silu"},
}


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_golden(engine):
    parity.check_golden("gemma", engine)


def test_chunks_equal_one_prefill(monkeypatch):
    parity.check_chunks("gemma", monkeypatch)


@pytest.mark.parametrize("precision", SIXTEEN_BITS)
def test_sixteen_bits_are_as_close_as_transformers(precision):
    parity.check_sixteen_bits("gemma", precision)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_live(tmp_path, name):
    parity.check_variant(tmp_path, BASE | VARIANTS[name])


# ---- files


def test_keys_without_prefix_with_buffers_and_a_tied_weight_held_twice(tmp_path):
    def change(tensors):
        tensors = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
        tensors["layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(9, np.float32)
        return tensors | {"lm_head.weight": tensors["embed_tokens.weight"].copy()}

    parity.check_same_as_golden("gemma", parity.rewrite("gemma", tmp_path, change))


@pytest.mark.parametrize("precision", SIXTEEN_BITS)
def test_factors_around_one_stay_in_float32(tmp_path, precision):
    """1 + 2 ** -12 is 1 in bfloat16, and 2 ** -12 is kept."""

    def change(tensors):
        return tensors | {"model.norm.weight": np.full(34, 2**-12, np.float32)}

    with Session(parity.rewrite("gemma", tmp_path, change), precision=precision, **REFERENCE) as session:
        weight = session.model.named_parameters()["model.norm.weight"].load()
        assert weight.dtype == np.float32 and set(weight.tolist()) == {1 + 2**-12}


def test_all_problems_of_weights_in_one_message(tmp_path):
    def change(tensors):
        del tensors["model.layers.0.input_layernorm.weight"]
        tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((54, 34), np.float32)
        return tensors | {"model.layers.1.pre_feedforward_layernorm.weight": np.zeros(34, np.float32)}  # Gemma 2

    with pytest.raises(UserError) as error:
        Session(parity.rewrite("gemma", tmp_path, change), **REFERENCE)
    for part in (
        "checkpoint lacks 1 of 20 weights: model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight: checkpoint has (54, 34), config gives (18, 34) = "
        "(num_key_value_heads * head_dim, hidden_size)",
        "no place for: model.layers.1.pre_feedforward_layernorm.weight",
    ):
        assert part in str(error.value)


# ---- configs


def test_all_problems_of_a_config_in_one_message():
    config = {"model_type": "gemma", "vocab_size": 0, "hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 1,
              "tie_word_embeddings": "yes", "rms_norm_eps": -1, "hidden_act": "gelu", "hidden_activation": "relu"}  # fmt: skip
    with pytest.raises(UserError) as error:
        Session(config, random_weights=True)
    assert str(error.value) == (
        "config.json: wanted positive whole numbers for vocab_size=0, intermediate_size (missing), num_hidden_layers "
        "(missing); hidden_activation and hidden_act differ, 'relu' and 'gelu_pytorch_tanh': set one of them; "
        "rms_norm_eps=-1: wanted a number of at least 0; "
        "tie_word_embeddings='yes': wanted true or false"
    )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"num_key_value_heads": 2}, UserError, "num_attention_heads=3 is not a multiple of num_key_value_heads=2"),
        ({"head_dim": 13}, UserError, "head_dim=13: rotary positions turn pairs of features, so it must be even"),
        ({"num_hidden_layers": 10_001}, UserError, "num_hidden_layers=10001 is more than any model has; at most 10000"),
        ({"use_bidirectional_attention": True}, UnsupportedError, "use_bidirectional_attention: true is not supported"),
        ({"hidden_act": ["gelu"]}, UnsupportedError, "activation ['gelu'] is not supported; there are gelu"),
        ({"hidden_act": "mish"}, UnsupportedError, "activation 'mish' is not supported; there are gelu"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor is not supported for this family"),
    ],
)
def test_configs_that_do_not_fit(change, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        Session(BASE | change, random_weights=True, **REFERENCE)


def test_defaults_of_a_short_config():
    """As transformers fills them in."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 16}
    config = GemmaConfig.from_hf({"model_type": "gemma"} | sizes)
    assert (config.num_kv_heads, config.head_dim, config.max_seq_len, config.norm_eps) == (16, 256, 8192, 1e-6)
    assert (config.activation, config.is_tied, config.attention_bias) == ("gelu_pytorch_tanh", True, False)
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_share) == ("default", 1e4, 1)


@pytest.mark.parametrize(
    ("sizes", "num_parameters"),
    [
        pytest.param((2048, 16384, 18, 8, 1), 2506172416, id="gemma-2b"),
        pytest.param((3072, 24576, 28, 16, 16), 8537680896, id="gemma-7b"),
    ],
)
def test_full_sizes(sizes, num_parameters):
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    model = parity.build({"model_type": "gemma", "vocab_size": 256000} | dict(zip(keys, sizes, strict=True)))
    assert parity.num_elements(model) == num_parameters
    assert model.build_logits(64).outputs["logits"].shape == (2, 64, 256000)
