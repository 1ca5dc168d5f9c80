"""GPT-NeoX against Hugging Face: golden numbers everywhere, live where torch is installed; variants, errors, sizes."""

import re

import numpy as np
import parity
import pytest
from parity import EACH_ENGINE, REFERENCE, SIXTEEN_BITS

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.models.fused_qkv import part_by_part
from poptransformer.models.gpt_neox import GPTNeoXConfig

BASE = {
    "model_type": "gpt_neox",
    "vocab_size": parity.VOCAB_SIZE,
    "hidden_size": 30,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": parity.MAX_LENGTH,
    "rotary_pct": 0.4,
}
VARIANTS = {
    "plain": {},
    "one half after the other": {"use_parallel_residual": False, "rotary_emb_base": 77, "rotary_pct": 1.0},
    "no bias, tied": {"attention_bias": False, "tie_word_embeddings": True},
    "activation and eps of the 20B": {"hidden_act": "gelu_fast", "layer_norm_eps": 0.1},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "both names of theta": {"rope_theta": 10.0, "rotary_emb_base": 500},
    "new keys": {
        "rotary_pct": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50, "partial_rotary_factor": 0.6},
    },
}


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_golden(engine):
    parity.check_golden("gpt_neox", engine)


def test_chunks_equal_one_prefill(monkeypatch):
    parity.check_chunks("gpt_neox", monkeypatch)


@pytest.mark.parametrize("precision", SIXTEEN_BITS)
def test_sixteen_bits_are_as_close_as_transformers(precision):
    parity.check_sixteen_bits("gpt_neox", precision)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_live(tmp_path, name):
    parity.check_variant(tmp_path, BASE | VARIANTS[name])


# ---- files


def test_part_by_part():
    """Two heads of three features: rows 0 to 2 are the first head's query, 3 to 5 its key, and so on."""
    rows = [0, 1, 2, 9, 10, 11, 3, 4, 5, 12, 13, 14, 6, 7, 8, 15, 16, 17]
    assert part_by_part(18, 2).tolist() == rows


def test_keys_as_in_the_released_files(tmp_path):
    """Masks and frequencies beside the weights; without prefix; the head under its old name."""

    def change(tensors):
        head = tensors.pop("embed_out.weight") if "embed_out.weight" in tensors else tensors.pop("lm_head.weight")
        tensors = {key.removeprefix("gpt_neox."): tensor for key, tensor in tensors.items()}
        tensors["layers.0.attention.bias"] = np.ones((1, 1, 67, 67), np.float32)
        tensors["layers.0.attention.masked_bias"] = np.array(-1e9, np.float32)
        return tensors | {"layers.1.attention.rotary_emb.inv_freq": np.ones(3, np.float32), "embed_out.weight": head}

    parity.check_same_as_golden("gpt_neox", parity.rewrite("gpt_neox", tmp_path, change))


def test_the_head_under_its_new_name(tmp_path):
    def change(tensors):
        head = tensors.pop("embed_out.weight") if "embed_out.weight" in tensors else tensors.pop("lm_head.weight")
        return tensors | {"lm_head.weight": head}

    parity.check_same_as_golden("gpt_neox", parity.rewrite("gpt_neox", tmp_path, change))


def test_all_problems_of_weights_in_one_message(tmp_path):
    def change(tensors):
        del tensors["gpt_neox.final_layer_norm.bias"]
        tensors["gpt_neox.layers.1.attention.query_key_value.weight"] = np.zeros((65, 39), np.float32)  # grouped queries
        return tensors | {"score.weight": np.ones((2, 39), np.float32)}

    with pytest.raises(UserError) as error:
        Session(parity.rewrite("gpt_neox", tmp_path, change), **REFERENCE)
    for part in (
        "checkpoint lacks 1 of 28 weights: gpt_neox.final_layer_norm.bias",
        "gpt_neox.layers.1.attention.query_key_value.weight: checkpoint has (65, 39), config gives (117, 39) = "
        "(3 * hidden_size, hidden_size)",
        "no place for: score.weight",
    ):
        assert part in str(error.value)


# ---- configs


def test_all_problems_of_a_config_in_one_message():
    config = {"model_type": "gpt_neox", "vocab_size": 9, "hidden_size": 30, "num_attention_heads": 3.0,
              "use_parallel_residual": "true", "rotary_pct": -1}  # fmt: skip
    with pytest.raises(UserError) as error:
        Session(config, random_weights=True)
    assert str(error.value) == (
        "config.json: wanted positive whole numbers for num_attention_heads=3.0, intermediate_size (missing), "
        "num_hidden_layers (missing); use_parallel_residual='true': wanted true or false; "
        "partial_rotary_factor=-1: wanted a number above 0, at most 1"
    )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"num_attention_heads": 4}, UserError, "hidden_size=30 is not a multiple of num_attention_heads=4"),
        (
            {"rotary_pct": 0.3},
            UserError,
            "head_dim=10: rotary positions turn pairs of features, so its share of 0.3, which is 3",
        ),
        ({"hidden_act": "mish"}, UnsupportedError, "activation 'mish' is not supported; there are gelu"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, UnsupportedError, "rope_scaling of type 'su' is not supported"),
    ],
)
def test_configs_that_do_not_fit(change, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        Session(BASE | change, random_weights=True, **REFERENCE)


def test_defaults_of_a_short_config():
    """As transformers fills them in."""
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GPTNeoXConfig.from_hf({"model_type": "gpt_neox"} | sizes)
    assert (config.max_seq_len, config.norm_eps, config.activation) == (2048, 1e-5, "gelu")
    assert (config.is_tied, config.attention_bias, config.is_parallel) == (False, True, True)
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_share) == ("default", 1e4, 0.25)


@pytest.mark.parametrize(
    ("sizes", "num_parameters"),
    [
        pytest.param((50304, 512, 2048, 6, 8), 70426624, id="pythia-70m"),
        pytest.param((50432, 6144, 24576, 44, 64), 20554567680, id="gpt-neox-20b"),
    ],
)
def test_full_sizes(sizes, num_parameters):
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    model = parity.build({"model_type": "gpt_neox"} | dict(zip(keys, sizes, strict=True)))
    assert parity.num_elements(model) == num_parameters
    assert model.build_logits(64).outputs["logits"].shape == (2, 64, sizes[0])
