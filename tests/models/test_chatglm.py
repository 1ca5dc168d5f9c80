"""ChatGLM-6B, ChatGLM2 and ChatGLM3 against the NumPy reference in tests/golden: numbers, variants, rows, errors, sizes."""

import json
import re

import numpy as np
import parity
import pytest
from conftest import REPOSITORY
from golden import chatglm_reference as reference
from parity import EACH_ENGINE, REFERENCE
from tolerance import assert_close

from poptransformer import Session, UnsupportedError, UserError
from poptransformer.models import find_model

FOLDER = REPOSITORY / "tests" / "golden"
STORED = ("chatglm6b", "chatglm2", "chatglm3")
VARIANTS = json.loads((FOLDER / "chatglm_variants.json").read_text(encoding="utf-8"))["variants"]
GMASK, SOP = 251, 254  # of tests/golden/chatglm6b
CONTEXT = [9, 30, 31, 77, 5, GMASK]
# Worst seen: 4.8e-6 of the stored; 3.3e-5 of a logit of -9.3 in the variant without a last norm.
FLOAT32 = {"rtol": 1e-5, "atol": 3e-5}


def golden_cases(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]


def check(session, cases):
    for case in cases:
        logits = session.logits(case["prompt"])
        assert_close(logits[case["positions"]][:, case["tokens"]], np.float32(case["logits"]), **FLOAT32)
    num_new = [len(case["greedy"]) for case in cases]
    outs = session.generate([case["prompt"] for case in cases], max_new_tokens=num_new, ignore_eos=True)
    assert [out.token_ids for out in outs] == [case["greedy"] for case in cases]


@pytest.fixture(scope="module")
def chatglm6b():
    with Session(FOLDER / "chatglm6b") as session:
        yield session


@pytest.mark.parametrize("engine", EACH_ENGINE)
@pytest.mark.parametrize("name", STORED)
def test_golden(name, engine):
    """Logits of each prompt, and the greedy tokens of all in one uneven batch."""
    cases = golden_cases(name)
    with Session(FOLDER / name, batch_size=len(cases), **engine) as session:
        check(session, cases if engine == REFERENCE else cases[1:3] + cases[:1] + cases[3:])


def test_bin_shards_are_the_same_checkpoint():
    with Session(FOLDER / "chatglm6b_bin", batch_size=3, **REFERENCE) as session:
        check(session, golden_cases("chatglm6b")[:3])


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path, name):
    """Configs without a stored checkpoint: the reference draws their weights again."""
    save_file = pytest.importorskip("safetensors.numpy", reason="needs safetensors").save_file
    variant = VARIANTS[name]
    (tmp_path / "config.json").write_text(json.dumps(variant["config"]), encoding="utf-8")
    weights = reference.random_weights(variant["config"], variant["seed"])
    save_file({key: np.ascontiguousarray(weight) for key, weight in weights.items()}, tmp_path / "model.safetensors")
    with Session(tmp_path, batch_size=len(variant["cases"]), **REFERENCE) as session:
        check(session, variant["cases"])


# ---- rows of ChatGLM-6B


def test_the_context_sees_all_of_itself_and_nothing_after(chatglm6b):
    ids = [*CONTEXT, SOP, 40, 41, 42]
    logits = chatglm6b.logits(ids)
    later_context = chatglm6b.logits([*ids[:4], 6, *ids[5:]])
    assert np.abs(later_context - logits).max(axis=1).min() > 1e-3  # each position, the first as well
    later_filling = chatglm6b.logits([*ids[:-1], 43])
    np.testing.assert_array_equal(later_filling[:-1], logits[:-1])


def test_a_long_prompt_stays_in_one_piece(chatglm6b, monkeypatch):
    ids = [*range(5, 60), GMASK, SOP, 40, 41]
    whole = chatglm6b.logits(ids)
    tokens = chatglm6b.generate(ids, max_new_tokens=5, ignore_eos=True)[0].token_ids
    monkeypatch.setattr("poptransformer.generation.wave.MAX_BUCKET", 16)
    np.testing.assert_array_equal(chatglm6b.logits(ids), whole)
    assert chatglm6b.generate(ids, max_new_tokens=5, ignore_eos=True)[0].token_ids == tokens


def test_a_stream_goes_on_after_another_call(chatglm6b):
    prompt = [*CONTEXT, SOP]
    wanted = chatglm6b.generate(prompt, max_new_tokens=20, ignore_eos=True)[0].token_ids
    found = []
    for piece in chatglm6b.stream(prompt, max_new_tokens=20, ignore_eos=True):
        found += piece.token_ids
        chatglm6b.generate([8, 9, GMASK, SOP, 7], max_new_tokens=2)
    assert found == wanted


def test_decoding_gives_what_scoring_gives(chatglm6b):
    prompt = [*CONTEXT, SOP, 44]
    out = chatglm6b.generate(prompt, max_new_tokens=20, ignore_eos=True, logprobs=True)[0]
    at_once = chatglm6b.score(prompt + out.token_ids)[len(prompt) - 1 :]
    assert_close(np.float32(out.logprobs), at_once, rtol=1e-5, atol=2e-5)


def test_rows_without_a_blank_or_its_filling_are_refused(chatglm6b):
    message = r"hold a blank, \[gMASK\] \(251\) or \[MASK\] \(250\), and <sop> \(254\).*append 251, 254"
    with pytest.raises(UserError, match=f"prompt 1: .*{message}.*prompt 2: "):
        chatglm6b.generate([[*CONTEXT, SOP], [5, 6], [5, GMASK]], max_new_tokens=1)
    with pytest.raises(UserError, match=message):
        chatglm6b.logits([5, SOP])


# Root of the mean square difference from float32, in standard deviations of the logits. Seen on all engines alike: 0.016, 0.020
# and 0.084 in bf16 (three layers of wide weights add up), 0.0017, 0.0016 and 0.0041 in fp16.
SHARE_OF_DEVIATION = {"bf16": 0.1, "fp16": 0.006}


@pytest.mark.parametrize("precision", SHARE_OF_DEVIATION)
@pytest.mark.parametrize("name", STORED)
def test_sixteen_bits(name, precision):
    prompt = golden_cases(name)[2]["prompt"]
    with Session(FOLDER / name, **REFERENCE) as exact, Session(FOLDER / name, precision=precision) as rounded:
        wanted, logits = exact.logits(prompt), rounded.logits(prompt)
    assert 0 < parity.rms(logits - wanted) < SHARE_OF_DEVIATION[precision] * wanted.std()


# ---- configs

FIRST = {
    "model_type": "chatglm", "architectures": ["ChatGLMModel"], "vocab_size": 130528, "hidden_size": 4096, "num_layers": 28,
    "num_attention_heads": 32, "inner_hidden_size": 16384, "max_sequence_length": 2048, "bos_token_id": 130004,
    "eos_token_id": 130005, "mask_token_id": 130000, "gmask_token_id": 130001, "layernorm_epsilon": 1e-05,
    "position_encoding_2d": True,
}  # fmt: skip
SECOND = {
    "model_type": "chatglm", "architectures": ["ChatGLMModel"], "padded_vocab_size": 65024, "hidden_size": 4096,
    "ffn_hidden_size": 13696, "num_layers": 28, "num_attention_heads": 32, "kv_channels": 128, "multi_query_attention": True,
    "multi_query_group_num": 2, "seq_length": 32768, "layernorm_epsilon": 1e-05, "rmsnorm": True, "add_qkv_bias": True,
    "add_bias_linear": False, "post_layer_norm": True,
}  # fmt: skip


@pytest.mark.parametrize("config, size", [(FIRST, 6_173_286_400), (SECOND, 6_243_584_000)], ids=["6b", "2-6b and 3-6b"])
def test_sizes_of_the_published_models(config, size):
    assert parity.num_elements(parity.build(config)) == size


def refusal(config, kind=UserError):
    with pytest.raises(kind) as caught:
        find_model(config).config_class.from_hf(config)
    return str(caught.value)


def test_generations_are_told_apart_by_their_keys():
    assert refusal({"model_type": "chatglm", "hidden_size": 8}).endswith("this one has none of them")
    message = refusal(FIRST | {"kv_channels": 128})
    assert "both inner_hidden_size, max_sequence_length, position_encoding_2d and kv_channels" in message


@pytest.mark.parametrize("config", [FIRST, SECOND], ids=["6b", "2-6b"])
def test_all_missing_and_wrong_keys_are_named(config):
    keys = [key for key, value in config.items() if type(value) is int and key != "eos_token_id"]
    required = [key for key in keys if key != "inner_hidden_size"]
    kept = {key: value for key, value in config.items() if key not in required}
    kept |= {} if config is FIRST else {"kv_channels": None}
    message = refusal(kept)
    for key in required:
        assert re.search(rf"{key} \(missing\)|{key}=None", message), (key, message)
    assert "hidden_size='x'" in refusal(config | {"hidden_size": "x"})


@pytest.mark.parametrize("config", [FIRST, SECOND], ids=["6b", "2-6b"])
def test_variants_without_support_are_refused(config):
    message = refusal(config | {"pre_seq_len": 128, "quantization_bit": 4}, UnsupportedError)
    assert "pre_seq_len=128" in message and "quantization_bit=4" in message
    assert find_model(config).config_class.from_hf(config | {"pre_seq_len": None, "quantization_bit": 0})


def test_sizes_that_do_not_divide():
    assert "hidden_size=4098 is not a multiple of 4 * num_attention_heads=128" in refusal(FIRST | {"hidden_size": 4098})
    assert "kv_channels=126 is not a multiple of 4" in refusal(SECOND | {"kv_channels": 126})
    assert "num_attention_heads=32 is not a multiple of multi_query_group_num=3" in refusal(
        SECOND | {"multi_query_group_num": 3}
    )
    assert "rope_ratio=0" in refusal(SECOND | {"rope_ratio": 0})


def test_32k_of_the_second_generation_is_refused():
    config = SECOND | {"rope_ratio": 16, "_name_or_path": "THUDM/chatglm2-6b-32k"}
    assert "divides positions" in refusal(config, UnsupportedError)
    config |= {"_name_or_path": "THUDM/chatglm3-6b-32k"}
    assert find_model(config).config_class.from_hf(config).rope_theta == 160000
