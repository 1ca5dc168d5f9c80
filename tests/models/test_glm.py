"""GLM-4 in its Hugging Face form against transformers: variants, errors, sizes."""

import parity
import pytest
from parity import EACH_ENGINE

from poptransformer import UserError
from poptransformer.models.glm import GLMConfig

BASE = {
    "model_type": "glm",
    "vocab_size": parity.VOCAB_SIZE,
    "hidden_size": 30,
    "intermediate_size": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": parity.MAX_LENGTH,
    "pad_token_id": 0,
    "eos_token_id": [1, 2],
}
VARIANTS = {
    "no biases": {"attention_bias": False},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "whole heads turn": {"partial_rotary_factor": 1.0, "rope_theta": 300.0, "rms_norm_eps": 1e-2},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 300.0, "factor": 3.0, "original_max_position_embeddings": 20,
            "partial_rotary_factor": 0.5,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("engine", [engine for engine in EACH_ENGINE if engine.id != "xla"])  # test_chatglm has the like there
def test_published_settings_live(tmp_path, engine):
    parity.check_variant(tmp_path, BASE | {"partial_rotary_factor": 0.5, "attention_bias": True}, engine)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_live(tmp_path, name):
    parity.check_variant(tmp_path, BASE | VARIANTS[name])


@pytest.mark.parametrize("precision", parity.SIXTEEN_BITS)
def test_sixteen_bits_are_as_close_as_transformers(tmp_path, precision):
    parity.write_random_checkpoint(tmp_path, BASE)
    parity.check_folder_in_sixteen_bits(tmp_path, precision, parity.VOCAB_SIZE, num_tokens=58)


def test_all_missing_keys_are_named():
    with pytest.raises(UserError) as caught:
        GLMConfig.from_hf({"model_type": "glm"})
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert f"{key} (missing)" in str(caught.value)


def test_size_of_the_published_model():
    config = {
        "model_type": "glm", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
    }  # fmt: skip
    assert parity.num_elements(parity.build(config)) == 9_399_951_360
