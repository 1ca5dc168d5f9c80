"""Phi against Hugging Face: golden numbers everywhere, live where torch is installed; variants, errors, sizes."""

import re

import numpy as np
import parity
import pytest
from parity import EACH_ENGINE, REFERENCE, SIXTEEN_BITS

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.models.phi import PhiConfig

BASE = {
    "model_type": "phi",
    "vocab_size": parity.VOCAB_SIZE,
    "hidden_size": 30,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": parity.MAX_LENGTH,
}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 20}
VARIANTS = {
    "plain": {"partial_rotary_factor": 0.4, "num_key_value_heads": None},
    "grouped": {"num_attention_heads": 5, "num_key_value_heads": 1, "partial_rotary_factor": 1.0},
    "norms of queries and keys": {"qk_layernorm": True, "partial_rotary_factor": 0.6},
    "tied": {"tie_word_embeddings": True, "partial_rotary_factor": 0.2, "rope_theta": 77.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}, "partial_rotary_factor": 0.61},
    "yarn, new keys": {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.8} | YARN},
    "eps and activation": {"layer_norm_eps": 0.1, "hidden_act": "gelu", "partial_rotary_factor": 0.85},
}


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_golden(engine):
    parity.check_golden("phi", engine)


def test_chunks_equal_one_prefill(monkeypatch):
    parity.check_chunks("phi", monkeypatch)


@pytest.mark.parametrize("precision", SIXTEEN_BITS)
def test_sixteen_bits_are_as_close_as_transformers(precision):
    parity.check_sixteen_bits("phi", precision)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_live(tmp_path, name):
    parity.check_variant(tmp_path, BASE | VARIANTS[name])


# ---- files


def test_keys_without_prefix_and_with_buffers(tmp_path):
    def change(tensors):
        tensors = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
        return tensors | {"layers.1.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}

    parity.check_same_as_golden("phi", parity.rewrite("phi", tmp_path, change))


def test_all_problems_of_weights_in_one_message(tmp_path):
    def change(tensors):
        del tensors["lm_head.bias"]
        tensors["model.layers.1.mlp.fc1.weight"] = np.zeros((42, 71), np.float32)
        return tensors | {"model.layers.0.self_attn.q_layernorm.weight": np.ones(14, np.float32)}

    with pytest.raises(UserError) as error:
        Session(parity.rewrite("phi", tmp_path, change), **REFERENCE)
    for part in (
        "checkpoint lacks 1 of 33 weights: lm_head.bias",
        "model.layers.1.mlp.fc1.weight: checkpoint has (42, 71), config gives (71, 42) = (intermediate_size, hidden_size)",
        "no place for: model.layers.0.self_attn.q_layernorm.weight",
    ):
        assert part in str(error.value)


# ---- configs


def test_all_problems_of_a_config_in_one_message():
    config = {"model_type": "phi", "vocab_size": "many", "hidden_size": 30, "num_attention_heads": 3, "qk_layernorm": 1,
              "layer_norm_eps": None, "partial_rotary_factor": 1.5}  # fmt: skip
    with pytest.raises(UserError) as error:
        Session(config, random_weights=True)
    assert str(error.value) == (
        "config.json: wanted positive whole numbers for vocab_size='many', intermediate_size (missing), num_hidden_layers "
        "(missing); layer_norm_eps=None: wanted a number of at least 0; qk_layernorm=1: wanted true or false; "
        "partial_rotary_factor=1.5: wanted a number above 0, at most 1"
    )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"num_attention_heads": 4}, UserError, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        ({"num_key_value_heads": 2}, UserError, "num_attention_heads=3 is not a multiple of num_key_value_heads=2"),
        ({}, UserError, "head_dim=10: rotary positions turn pairs of features, so its share of 0.5, which is 5, must be even"),
        ({"partial_rotary_factor": 0.05}, UserError, "so its share of 0.05, which is 0, must be even"),
        ({"hidden_act": "mish", "partial_rotary_factor": 1}, UnsupportedError, "activation 'mish' is not supported; there are"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, UnsupportedError, "rope_scaling of type 'su' is not supported"),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit(change, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        Session(BASE | {"partial_rotary_factor": 0.5} | change, random_weights=True, **REFERENCE)


def test_dynamic_scaling_ends_at_the_original_length():
    config = BASE | {"partial_rotary_factor": 0.4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(UserError, match="max_length=62 is more than the model's 61 positions .*'dynamic' beyond"):
        Session(config, random_weights=True, max_length=62, **REFERENCE)


def test_defaults_of_a_short_config():
    """As transformers fills them in."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PhiConfig.from_hf({"model_type": "phi"} | sizes)
    assert (config.num_kv_heads, config.max_seq_len, config.norm_eps, config.activation) == (2, 2048, 1e-5, "gelu_new")
    assert (config.is_tied, config.use_qk_norm) == (False, False)
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_share) == ("default", 1e4, 0.5)


@pytest.mark.parametrize(
    ("sizes", "num_parameters"),
    [
        pytest.param((2048, 8192, 24, 0.5), 1418270720, id="phi-1.5"),
        pytest.param((2560, 10240, 32, 0.4), 2779683840, id="phi-2"),
    ],
)
def test_full_sizes(sizes, num_parameters):
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "partial_rotary_factor")
    fixed = {"model_type": "phi", "vocab_size": 51200, "num_attention_heads": 32}
    model = parity.build(fixed | dict(zip(keys, sizes, strict=True)))
    assert parity.num_elements(model) == num_parameters
    assert [len(block.attention.rope.inv_freq) for block in model.blocks[:2]] == [16, 16]
    assert model.build_logits(64).outputs["logits"].shape == (2, 64, 51200)
