"""OPT against Hugging Face: golden numbers everywhere, live where torch is installed; variants, errors, sizes."""

import re

import numpy as np
import parity
import pytest
from parity import EACH_ENGINE, REFERENCE, SIXTEEN_BITS

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.models.opt import OPTConfig

BASE = {
    "model_type": "opt",
    "vocab_size": parity.VOCAB_SIZE,
    "hidden_size": 33,
    "ffn_dim": 43,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": parity.MAX_LENGTH,
}
VARIANTS = {
    "plain": {"word_embed_proj_dim": None},
    "as OPT-350M": {"do_layer_norm_before": False, "word_embed_proj_dim": 17},
    "norms first, projections": {"word_embed_proj_dim": 40},
    "no final norm": {"_remove_final_layer_norm": True},
    "as Galactica": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    "untied": {"tie_word_embeddings": False, "word_embed_proj_dim": 17},
}


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_golden(engine):
    parity.check_golden("opt", engine)


def test_chunks_equal_one_prefill(monkeypatch):
    parity.check_chunks("opt", monkeypatch)


@pytest.mark.parametrize("precision", SIXTEEN_BITS)
def test_sixteen_bits_are_as_close_as_transformers(precision):
    parity.check_sixteen_bits("opt", precision)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_live(tmp_path, name):
    parity.check_variant(tmp_path, BASE | VARIANTS[name])


@parity.needs_library
def test_opt_350m_compiled(tmp_path):
    """The variant that is least like the golden checkpoint."""
    parity.check_variant(tmp_path, BASE | VARIANTS["as OPT-350M"], parity.ENGINES["xla-custom-ops"])


# ---- files


@pytest.mark.parametrize("prefix", ["decoder.", ""])
def test_keys_with_less_of_a_prefix(tmp_path, prefix):
    """The released files begin with `decoder.`; with the tied head beside the table."""

    def change(tensors):
        table = tensors["model.decoder.embed_tokens.weight"]
        tensors = {prefix + key.removeprefix("model.decoder."): tensor for key, tensor in tensors.items()}
        return tensors | {"lm_head.weight": table.copy()}

    parity.check_same_as_golden("opt", parity.rewrite("opt", tmp_path, change))


def test_all_problems_of_weights_in_one_message(tmp_path):
    def change(tensors):
        del tensors["model.decoder.layers.1.fc2.bias"]
        tensors["model.decoder.embed_positions.weight"] = np.zeros((67, 39), np.float32)
        return tensors | {"model.decoder.project_in.weight": np.ones((39, 17), np.float32)}

    with pytest.raises(UserError) as error:
        Session(parity.rewrite("opt", tmp_path, change), **REFERENCE)
    for part in (
        "checkpoint lacks 1 of 36 weights: model.decoder.layers.1.fc2.bias",
        "model.decoder.embed_positions.weight: checkpoint has (67, 39), config gives (69, 39) = "
        "(max_position_embeddings + 2, hidden_size)",
        "no place for: model.decoder.project_in.weight",
    ):
        assert part in str(error.value)


# ---- configs


def test_all_problems_of_a_config_in_one_message():
    config = {"model_type": "opt", "hidden_size": 30, "num_attention_heads": 3, "ffn_dim": 2**31, "num_hidden_layers": 1,
              "word_embed_proj_dim": -5, "enable_bias": None, "do_layer_norm_before": "before"}  # fmt: skip
    with pytest.raises(UserError) as error:
        Session(config, random_weights=True)
    assert str(error.value) == (
        "config.json: wanted positive whole numbers for vocab_size (missing), word_embed_proj_dim=-5, ffn_dim=2147483648; "
        "do_layer_norm_before='before': wanted true or false; enable_bias=None: wanted true or false"
    )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"num_attention_heads": 4}, UserError, "hidden_size=33 is not a multiple of num_attention_heads=4"),
        ({"activation_function": "mish"}, UnsupportedError, "activation 'mish' is not supported; there are gelu"),
    ],
)
def test_configs_that_do_not_fit(change, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        Session(BASE | change, random_weights=True, **REFERENCE)


def test_defaults_of_a_short_config():
    """As transformers fills them in."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "ffn_dim": 7, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = OPTConfig.from_hf({"model_type": "opt"} | sizes)
    assert (config.embedding_size, config.max_seq_len, config.activation) == (8, 2048, "relu")
    assert config.is_tied and config.is_pre_norm and config.use_final_norm and config.use_bias and config.use_norm_weights


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        pytest.param({"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}, 125239296,
                     id="opt-125m"),
        pytest.param({"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
                      "word_embed_proj_dim": 512, "do_layer_norm_before": False}, 331196416, id="opt-350m"),
    ],
)  # fmt: skip
def test_full_sizes(config, num_parameters):
    model = parity.build({"model_type": "opt", "vocab_size": 50272} | config)
    assert parity.num_elements(model) == num_parameters
    assert model.build_logits(64).outputs["logits"].shape == (2, 64, 50272)
