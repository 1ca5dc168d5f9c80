"""BLOOM against Hugging Face: golden numbers everywhere, live where torch is installed; variants, errors, sizes."""

import re

import numpy as np
import parity
import pytest
from parity import EACH_ENGINE, REFERENCE, SIXTEEN_BITS
from tolerance import assert_close

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.models.bloom import MAX_SEQ_LEN, BloomConfig, alibi_slopes

BASE = {"model_type": "bloom", "vocab_size": parity.VOCAB_SIZE, "hidden_size": 33, "n_layer": 2, "n_head": 3}
VARIANTS = {
    "plain": {},
    "residuals of the norms": {"apply_residual_connection_post_layernorm": True},
    "eleven heads": {"n_head": 11},
    "one head, eps": {"n_head": 1, "layer_norm_epsilon": 0.1},
    "untied, four heads": {"hidden_size": 36, "n_head": 4, "tie_word_embeddings": False},
    "of several ranks": {"pretraining_tp": 4, "slow_but_exact": False},
}


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_golden(engine):
    parity.check_golden("bloom", engine)


def test_chunks_equal_one_prefill(monkeypatch):
    parity.check_chunks("bloom", monkeypatch)


@pytest.mark.parametrize("precision", SIXTEEN_BITS)
def test_sixteen_bits_are_as_close_as_transformers(precision):
    parity.check_sixteen_bits("bloom", precision)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_live(tmp_path, name):
    parity.check_variant(tmp_path, BASE | VARIANTS[name])


# ---- slopes


def test_slopes_worked_out_by_hand():
    assert_close(alibi_slopes(1), np.float32([2**-8]))
    assert_close(alibi_slopes(8), np.float32([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]))
    assert_close(alibi_slopes(3), np.float32([2**-4, 2**-8, 2**-2]))
    assert_close(alibi_slopes(6), np.float32([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]))


def test_slopes_equal_those_of_transformers():
    torch, _ = parity.import_torch_and_transformers()
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for num_heads in (1, 2, 3, 5, 11, 16, 32, 71, 112, 128):  # 112 is BLOOM's own
        wanted = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)[:, 0, 1].numpy()
        assert_close(alibi_slopes(num_heads), wanted, rtol=1e-5, atol=0)  # its base is rounded before the powers


# ---- files


def test_keys_without_prefix_and_a_tied_weight_held_twice(tmp_path):
    def change(tensors):
        tensors = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
        return tensors | {"lm_head.weight": tensors["word_embeddings.weight"].copy()}

    parity.check_same_as_golden("bloom", parity.rewrite("bloom", tmp_path, change))


def test_keys_as_in_the_released_configs(tmp_path):
    """bloom-560m says n_embed and num_attention_heads, and keys of its training beside them."""
    keys = {"hidden_size": None, "n_embed": 39, "n_head": None, "num_attention_heads": 3, "n_layer": None,
            "num_hidden_layers": 2, "offset_alibi": 100, "attention_softmax_in_fp32": True, "n_inner": None}  # fmt: skip
    parity.check_same_as_golden("bloom", parity.rewrite("bloom", tmp_path, **keys))


def test_all_problems_of_weights_in_one_message(tmp_path):
    def change(tensors):
        del tensors["transformer.word_embeddings_layernorm.bias"]
        tensors["transformer.h.1.self_attention.query_key_value.weight"] = np.zeros((65, 39), np.float32)
        return tensors | {"transformer.h.2.input_layernorm.bias": np.ones(39, np.float32)}

    with pytest.raises(UserError) as error:
        Session(parity.rewrite("bloom", tmp_path, change), **REFERENCE)
    for part in (
        "checkpoint lacks 1 of 29 weights: transformer.word_embeddings_layernorm.bias",
        "transformer.h.1.self_attention.query_key_value.weight: checkpoint has (65, 39), config gives (117, 39) = "
        "(3 * hidden_size, hidden_size)",
        "no place for: transformer.h.2.input_layernorm.bias",
    ):
        assert part in str(error.value)


# ---- configs


def test_all_problems_of_a_config_in_one_message():
    config = {"model_type": "bloom", "vocab_size": 9, "n_embed": 0, "num_attention_heads": True, "layer_norm_epsilon": "1e-5",
              "tie_word_embeddings": 0}  # fmt: skip
    with pytest.raises(UserError) as error:
        Session(config, random_weights=True)
    assert str(error.value) == (
        "config.json: wanted positive whole numbers for n_embed=0, num_attention_heads=True, n_layer (missing); "
        "layer_norm_epsilon='1e-5': wanted a number of at least 0; tie_word_embeddings=0: wanted true or false"
    )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"n_head": 4}, UserError, "hidden_size=33 is not a multiple of n_head=4"),
        ({"num_attention_heads": 11}, UserError, "n_head=3 and num_attention_heads=11 mean the same and differ"),
        ({"n_embed": 30}, UserError, "n_embed=30 and hidden_size=33 mean the same and differ"),
        ({"slow_but_exact": True, "pretraining_tp": 4}, UnsupportedError, "slow_but_exact: true with pretraining_tp=4 is not "
         "supported; set slow_but_exact: false"),
    ],
)  # fmt: skip
def test_configs_that_do_not_fit(change, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        Session(BASE | change, random_weights=True, **REFERENCE)


def test_rows_have_no_limit_of_the_model():
    """2048 tokens unless more are asked for, and then up to where float32 counts distances exactly."""
    with Session(BASE, random_weights=True, **REFERENCE) as session:
        assert session.max_length == 2048
    with Session(BASE, random_weights=True, max_length=9001, **REFERENCE) as session:
        assert session.max_length == 9001
    assert np.float32(MAX_SEQ_LEN - 1) < np.float32(MAX_SEQ_LEN) == np.float32(MAX_SEQ_LEN + 1)
    with pytest.raises(UserError, match="max_length=16777217 is more than the model's 16777216 positions"):
        Session(BASE, random_weights=True, max_length=MAX_SEQ_LEN + 1, **REFERENCE)


def test_defaults_of_a_short_config():
    """As transformers fills them in."""
    config = BloomConfig.from_hf({"model_type": "bloom", "vocab_size": 9, "hidden_size": 8, "n_layer": 1, "n_head": 2})
    assert (config.norm_eps, config.is_tied, config.use_normed_residual) == (1e-5, True, False)


@pytest.mark.parametrize(
    ("sizes", "num_parameters"),
    [
        pytest.param((1024, 24, 16), 559214592, id="bloom-560m"),
        pytest.param((4096, 30, 32), 7069016064, id="bloom-7b1"),
        pytest.param((14336, 70, 112), 176247271424, id="bloom"),
    ],
)
def test_full_sizes(sizes, num_parameters):
    model = parity.build(
        {"model_type": "bloom", "vocab_size": 250880} | dict(zip(("n_embed", "n_layer", "n_head"), sizes, strict=True))
    )
    assert parity.num_elements(model) == num_parameters
    assert model.build_logits(64).outputs["logits"].shape == (2, 64, 250880)
