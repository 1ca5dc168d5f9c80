"""ChatGLM-6B, ChatGLM2 and ChatGLM3 against the NumPy reference in tests/golden: numbers, variants, rows, errors, sizes."""

import functools
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
from poptransformer.backends import make_engine
from poptransformer.graph import Graph
from poptransformer.models import find_model
from poptransformer.models.decoder_model import DecoderTokens

FOLDER = REPOSITORY / "tests" / "golden"
STORED = ("chatglm6b", "chatglm2", "chatglm3")
VARIANTS = json.loads((FOLDER / "chatglm_variants.json").read_text(encoding="utf-8"))["variants"]
MASK, GMASK, SOP = 250, 251, 254  # of tests/golden/chatglm6b
CONTEXT = [9, 30, 31, 77, 5, GMASK]
# Worst seen: 4.8e-6 of the stored; 3.3e-5 of a logit of -9.3 in the variant without a last norm.
FLOAT32 = {"rtol": 1e-5, "atol": 3e-5}


def golden_cases(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]


def check(session, cases, scored):
    for case in scored:
        logits = session.logits(case["prompt"])
        assert_close(logits[case["positions"]][:, case["tokens"]], np.float32(case["logits"]), **FLOAT32)
    num_new = [len(case["greedy"]) for case in cases]
    outs = session.generate([case["prompt"] for case in cases], max_new_tokens=num_new, ignore_eos=True)
    assert [out.token_ids for out in outs] == [case["greedy"] for case in cases]


@pytest.fixture(scope="module")
def chatglm6b():
    with Session(FOLDER / "chatglm6b") as session:
        yield session


# The graph of chatglm3 is that of chatglm2 in other sizes, which matter to kernels.
RUNS = [
    pytest.param(name, *engine.values, id=f"{name}-{engine.id}", marks=engine.marks)
    for name in STORED
    for engine in EACH_ENGINE
    if (name, engine.id) != ("chatglm3", "xla")
]


@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_golden(name, engine):
    """Logits of each prompt, and the greedy tokens of all in one uneven batch."""
    cases = golden_cases(name)
    scored = cases
    if engine != REFERENCE:
        # More rows take longer to compile: these have one and both blanks, and an answer that has begun. A compiled graph
        # serves one length: the longest prompt stands for all there.
        cases = [cases[i] for i in (3, 5, 6, 8)] if name == "chatglm6b" else cases
        scored = [max(cases, key=lambda case: len(case["prompt"]))]
    with Session(FOLDER / name, batch_size=len(cases), **engine) as session:
        check(session, cases, scored)


def test_bin_shards_are_the_same_checkpoint():
    with Session(FOLDER / "chatglm6b_bin", batch_size=3, **REFERENCE) as session:
        cases = golden_cases("chatglm6b")[:3]
        check(session, cases, cases)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(tmp_path, name):
    """Configs without a stored checkpoint: the reference draws their weights again."""
    save_file = pytest.importorskip("safetensors.numpy", reason="needs safetensors").save_file
    variant = VARIANTS[name]
    (tmp_path / "config.json").write_text(json.dumps(variant["config"]), encoding="utf-8")
    weights = reference.random_weights(variant["config"], variant["seed"])
    save_file({key: np.ascontiguousarray(weight) for key, weight in weights.items()}, tmp_path / "model.safetensors")
    with Session(tmp_path, batch_size=len(variant["cases"]), **REFERENCE) as session:
        check(session, variant["cases"], variant["cases"])


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
    blank, sop = r"a blank, \[gMASK\] \(251\) or \[MASK\] \(250\)", r"<sop> \(254\), where the blank's filling begins"
    wanted = (
        rf"prompt 1: token ids for ChatGLM-6B lack {blank} and {sop}; append 251, 254 to have the text continued; "
        rf"prompt 2: token ids for ChatGLM-6B lack {sop}; append 254 to .*; "
        rf"prompt 3: token ids for ChatGLM-6B lack {blank}; put 251 before 254 to "
    )
    with pytest.raises(UserError, match=wanted):
        chatglm6b.generate([[*CONTEXT, SOP], [5, 6], [5, MASK], [5, SOP]], max_new_tokens=1)
    with pytest.raises(UserError, match=blank):
        chatglm6b.logits([5, SOP])


@pytest.mark.parametrize(
    ("ids", "is_2d", "places", "blocks"),
    [
        ([5, GMASK, 6, SOP, 7, 8], True, [0, 1, 2, 1, 1, 1], [0, 0, 0, 1, 2, 3]),
        ([5, 6, MASK, SOP, 7, 8], True, [0, 1, 2, 2, 2, 2], [0, 0, 0, 1, 2, 3]),
        ([MASK, 5, GMASK, SOP, SOP, GMASK], True, [0, 1, 2, 2, 2, 2], [0, 0, 0, 1, 2, 3]),
        ([5, GMASK, 6, SOP, 7, 8], False, [0, 1, 2, 3, 4, 5], None),
        ([MASK, 5, 6, SOP, 7, 8], False, [0, 1, 2, 0, 0, 0], None),
    ],
)
def test_positions(ids, is_2d, places, blocks):
    """All at once, and the last one alone, as it is decoded."""
    config = json.loads((FOLDER / "chatglm6b" / "config.json").read_text(encoding="utf-8"))
    model = parity.build(config | {"position_encoding_2d": is_2d}, max_length=32)
    for begin in (0, len(ids) - 1):
        graph = Graph("positions")
        inputs = {"index": np.arange(begin, len(ids), dtype=np.int32)[None].repeat(2, 0)}
        inputs |= {name: np.full(2, number, np.int32) for name, number in model.describe_row(ids).items()}
        values = {name: graph.input(name, array.shape, np.int32) for name, array in inputs.items()}
        found = model._positions(DecoderTokens(values["index"], None, None, values, {}))
        for name, value in found.items():
            graph.output(name, value)
        engine = make_engine("reference", "auto", "auto", "")
        engine.compile("positions", graph)
        outputs = engine.run("positions", inputs)
        assert outputs["position_ids"].tolist() == [places[begin:]] * 2
        assert blocks is None or outputs["block_position_ids"].tolist() == [blocks[begin:]] * 2


def test_a_head_of_its_own(tmp_path):
    """tie_word_embeddings: false makes lm_head count, which stands in most files and is the table there."""
    case = golden_cases("chatglm6b")[1]

    def change(tensors):
        return tensors | {"lm_head.weight": 2 * tensors["transformer.word_embeddings.weight"]}

    with Session(parity.rewrite("chatglm6b", tmp_path, change, tie_word_embeddings=False), **REFERENCE) as session:
        logits = session.logits(case["prompt"])[case["positions"]][:, case["tokens"]]
        assert_close(logits, 2 * np.float32(case["logits"]), rtol=1e-5, atol=6e-5)


# ---- 16 bits


@pytest.fixture(scope="module")
def in_torch():
    """A function of a golden checkpoint's name: a long text, and its logits by torch in float32, bf16 and fp16."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")
    safetensors = pytest.importorskip("safetensors.numpy")
    import chatglm_in_torch

    @functools.cache
    def run(name):
        config = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
        weights = safetensors.load_file(FOLDER / name / "model.safetensors")
        ids = [int(i) for i in np.random.default_rng(3).integers(9, 240, 120)]
        if name == "chatglm6b":
            ids[70:72] = GMASK, SOP
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return ids, {key: chatglm_in_torch.logits(config, weights, ids, dtype) for key, dtype in dtypes.items()}

    return run


@pytest.mark.parametrize("precision", parity.SIXTEEN_BITS)
@pytest.mark.parametrize("name", STORED)
def test_sixteen_bits_are_as_close_as_torch(in_torch, name, precision):
    ids, theirs = in_torch(name)
    with Session(FOLDER / name, precision=precision, custom_ops=False) as session:
        ours = parity.rms(session.logits(ids) - theirs["fp32"])
    assert 0 < ours <= parity.rms(theirs[precision] - theirs["fp32"])  # seen: 0.71 to 0.88 times theirs


@pytest.mark.parametrize("name", STORED)
def test_torch_agrees_in_float32(in_torch, name):
    ids, theirs = in_torch(name)
    with Session(FOLDER / name, **REFERENCE) as session:
        assert_close(session.logits(ids), theirs["fp32"], rtol=0, atol=1e-4)


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


GLM_4 = SECOND | {"padded_vocab_size": 151552, "num_layers": 40, "seq_length": 131072, "rope_ratio": 500}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        pytest.param(FIRST, 6_173_286_400, id="6b"),
        pytest.param(SECOND, 6_243_584_000, id="2-6b and 3-6b"),
        pytest.param(GLM_4, 9_399_951_360, id="glm-4 as it was published"),
    ],
)
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


def test_architectures():
    """The originals say ChatGLMModel, what transformers saves anew says ChatGLMForConditionalGeneration; both have the head."""
    for config in (FIRST, SECOND):
        assert find_model(config | {"architectures": ["ChatGLMForConditionalGeneration"]})
        with pytest.raises(UnsupportedError, match="architectures=.'ChatGLMForSequenceClassification'. is not supported"):
            find_model(config | {"architectures": ["ChatGLMForSequenceClassification"]})


def test_special_tokens():
    ids = {"bos_token_id": 0, "mask_token_id": 130528, "gmask_token_id": "[gMASK]"}
    assert refusal(FIRST | ids) == (
        "config.json: wanted token ids within the vocabulary for mask_token_id=130528, gmask_token_id='[gMASK]'"
    )
    first_release = FIRST | {"vocab_size": 150528, "bos_token_id": 150004, "mask_token_id": None}
    del first_release["gmask_token_id"]
    config = find_model(first_release).config_class.from_hf(first_release)
    assert (config.mask_token_id, config.gmask_token_id) == (150000, 150001)
