"""The NumPy ChatGLMs that the golden numbers come from: what pins them down, and transformers' GLM where that is the same."""

import json
import math

import numpy as np
import pytest
import safetensors.numpy
from conftest import REPOSITORY
from golden import chatglm_reference as reference
from tolerance import assert_close

FOLDER = REPOSITORY / "tests" / "golden"
VARIANTS = json.loads((FOLDER / "chatglm_variants.json").read_text(encoding="utf-8"))["variants"]
STORED = ("chatglm6b", "chatglm2", "chatglm3")
NUMBERS_ARE_ROUNDED = {"rtol": 0, "atol": 1e-6}

V1 = VARIANTS["v1, rows of both masks"]["config"]
MASK, GMASK, SOP = (V1[f"{name}_token_id"] for name in ("mask", "gmask", "bos"))
V2 = VARIANTS["v3, rope_ratio"]["config"]
WEIGHTS = {"v1": reference.random_weights(V1, 7), "v2": reference.random_weights(V2, 7)}


def read(name):
    """Return config, weights and cases of a golden checkpoint."""
    config = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    weights = safetensors.numpy.load_file(FOLDER / name / "model.safetensors")
    return config, weights, json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]


def logits_of_v1(ids, **change):
    return reference.logits(V1 | change, WEIGHTS["v1"], ids)


# ---- the numbers are these functions'


def check_cases(config, weights, cases):
    for case in cases:
        prompt, greedy = case["prompt"], case["greedy"]
        found = reference.logits(config, weights, prompt)
        assert_close(found[case["positions"]][:, case["tokens"]], np.array(case["logits"]), **NUMBERS_ARE_ROUNDED)
        # Each of the tokens is the best one behind those before it, and by how much it is.
        behind = reference.logits(config, weights, prompt + greedy)[len(prompt) - 1 : -1]
        assert list(behind.argmax(axis=1)) == greedy
        second, first = np.sort(behind, axis=1)[:, -2:].T
        assert abs((first - second).min() - case["least_margin"]) < 1e-5 and case["least_margin"] > 1e-3
        assert reference.greedy(config, weights, prompt, 2) == greedy[:2]
        assert_close(reference.logits(config, weights, prompt, np.float32), found.astype(np.float32), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", STORED)
def test_stored(name):
    check_cases(*read(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    variant = VARIANTS[name]
    check_cases(variant["config"], reference.random_weights(variant["config"], variant["seed"]), variant["cases"])


def test_files_have_the_same_weights():
    """The shards of chatglm6b_bin those of chatglm6b, and the head; the file that the index leaves out is wrong."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")
    _, weights, _ = read("chatglm6b")
    folder = FOLDER / "chatglm6b_bin"
    assert (folder / "config.json").read_text() == (FOLDER / "chatglm6b" / "config.json").read_text()
    weight_map = json.loads((folder / "pytorch_model.bin.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert weight_map.keys() == weights.keys() | {"lm_head.weight"}
    for key, file in weight_map.items():
        wanted = weights["transformer.word_embeddings.weight" if key == "lm_head.weight" else key]
        assert wanted.dtype == (np.float32 if "layernorm" in key else np.float16)
        assert_close(torch.load(folder / file, weights_only=True)[key].numpy(), wanted, rtol=0, atol=0)
    (stray,) = {path.name for path in folder.glob("*.bin")} - set(weight_map.values())
    for key, weight in torch.load(folder / stray, weights_only=True).items():
        assert np.abs(weight.numpy() - weights[key]).max() > 0.1


@pytest.mark.parametrize("name", STORED)
def test_files_hold_all_weights_and_the_frequencies(name):
    """The originals' files hold the frequencies too; no implementation takes them from there."""
    config, weights, _ = read(name)
    others = weights.keys() - reference.shapes(config).keys()
    assert others and all(key.endswith("inv_freq") and weights[key].dtype == np.float16 for key in others)
    for key, shape in reference.shapes(config).items():
        assert weights[key].shape == shape, key


@pytest.mark.parametrize("config", [V1, VARIANTS["v2, biases everywhere"]["config"], VARIANTS["v2, layer norm"]["config"]])
def test_every_weight_shows(config):
    ids = [5, 6, 7, GMASK, SOP, 9]
    weights = reference.random_weights(config, 7)
    before = reference.logits(config, weights, ids)
    generator = np.random.default_rng(0)
    for key, weight in weights.items():
        used = weight[ids] if "embeddings" in key else weight
        noise = 0.1 * generator.standard_normal(used.shape).astype(np.float32)
        changed = weight.copy()
        if "embeddings" in key:
            changed[ids] += noise
        else:
            changed += noise
        assert np.abs(reference.logits(config, weights | {key: changed}, ids) - before).max() > 1e-2, key


# ---- transformers' GLM is ChatGLM3 in other rows and names


@pytest.mark.parametrize("change", [{}, {"rope_ratio": 7}, {"add_qkv_bias": False}, {"multi_query_group_num": 4}])
def test_like_glm_of_transformers(change):
    torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-dev.txt")
    config = V2 | change
    weights = reference.random_weights(config, 5)
    num_heads, num_groups, head_dim = config["num_attention_heads"], config["multi_query_group_num"], config["kv_channels"]
    model = transformers.GlmForCausalLM(
        transformers.GlmConfig(
            vocab_size=config["padded_vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["ffn_hidden_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=num_heads,
            num_key_value_heads=num_groups,
            head_dim=head_dim,
            rms_norm_eps=config["layernorm_epsilon"],
            attention_bias=config["add_qkv_bias"],
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0 * config["rope_ratio"],
                "partial_rotary_factor": 0.5,
            },
            pad_token_id=0,
            attn_implementation="eager",
        )
    ).double()
    names = {
        "transformer.embedding.word_embeddings": "model.embed_tokens",
        "transformer.encoder.final_layernorm": "model.norm",
        "transformer.output_layer": "lm_head",
        "transformer.encoder.layers": "model.layers",
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.gate_up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
    }
    renamed = {}
    for key, weight in weights.items():
        for old, new in names.items():
            key = key.replace(old, new)
        if "query_key_value" in key:
            rows = np.split(weight, [num_heads * head_dim, (num_heads + num_groups) * head_dim])
            for letter, part in zip("qkv", rows, strict=True):
                renamed[key.replace("self_attention.query_key_value", f"self_attn.{letter}_proj")] = torch.from_numpy(part)
        else:
            renamed[key] = torch.from_numpy(weight)
    model.load_state_dict(renamed)
    ids = [5, 6, 7, 100, 3, 3, 50, 8, 9]
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    # transformers computes the angles, the norms and the softmax in float32.
    assert_close(reference.logits(config, weights, ids), wanted, rtol=0, atol=2e-5)


def test_multi_query_attention_is_a_matter_of_rows():
    """As many groups as heads, and without groups: the same in another order of the rows."""
    grouped = V2 | {"multi_query_group_num": V2["num_attention_heads"]}
    weights = reference.random_weights(grouped, 3)
    num_heads, head_dim = V2["num_attention_heads"], V2["kv_channels"]
    per_head = {
        key: weight.reshape(3, num_heads, head_dim, -1).swapaxes(0, 1).reshape(weight.shape)
        if "query_key_value" in key
        else weight
        for key, weight in weights.items()
    }
    ids = [3, 1, 4, 1, 5]
    ungrouped = V2 | {"multi_query_attention": False}
    assert_close(reference.logits(ungrouped, per_head, ids), reference.logits(grouped, weights, ids), rtol=0, atol=1e-12)


# ---- ChatGLM-6B: who sees whom


PROMPT = [5, 6, 7, GMASK, 8, SOP]  # the context is 5 tokens long


@pytest.mark.parametrize("place", [0, 2, 4])
def test_all_see_the_whole_context(place):
    changed = list(PROMPT) + [20, 21]
    changed[place] = 30 if changed[place] != GMASK else MASK
    difference = np.abs(logits_of_v1(changed) - logits_of_v1(PROMPT + [20, 21])).max(axis=1)
    assert difference.min() > 1e-2


@pytest.mark.parametrize("is_2d", [True, False])
def test_no_one_sees_later_tokens_of_the_answer(is_2d):
    change = {} if is_2d else {"position_encoding_2d": False}
    short, long, other = (logits_of_v1(PROMPT + more, **change) for more in ([20], [20, 21, 22], [20, 23, 22]))
    assert_close(long[:7], short, rtol=0, atol=1e-12)
    assert_close(other[:7], short, rtol=0, atol=1e-12)
    assert np.abs(other[7:] - long[7:]).max(axis=1).min() > 1e-2


def test_sop_is_no_context():
    """Tokens before <sop> do not see it: another beginning of the answer, at the same positions, leaves them alone."""
    row = reference.describe(V1, PROMPT)
    other = reference.logits(V1, WEIGHTS["v1"], PROMPT[:-1] + [40], row=row)
    assert_close(other[:5], logits_of_v1(PROMPT)[:5], rtol=0, atol=1e-12)
    assert np.abs(other[5] - logits_of_v1(PROMPT)[5]).max() > 1e-2


def test_second_generation_is_causal():
    first, second = (reference.logits(V2, WEIGHTS["v2"], [5, 6, 7, last]) for last in (8, 9))
    assert_close(first[:3], second[:3], rtol=0, atol=1e-12)
    assert np.abs(first[3] - second[3]).max() > 1e-2


# ---- ChatGLM-6B: rows and positions


@pytest.mark.parametrize(
    ("ids", "row"),
    [
        ([5, GMASK, SOP], (2, 1, True)),
        ([5, MASK, 6, SOP, 7], (3, 1, False)),
        ([MASK, 5, GMASK, SOP], (3, 2, True)),  # [gMASK] goes before [MASK]
        ([GMASK, MASK, 5, SOP, 9, SOP, GMASK], (3, 0, True)),  # the first of each
        ([5, MASK, MASK, SOP], (3, 1, False)),
    ],
)
def test_rows(ids, row):
    assert reference.describe(V1, ids) == row


@pytest.mark.parametrize("ids", [[5, GMASK], [5, SOP], []])
def test_rows_without_their_tokens(ids):
    with pytest.raises(ValueError):
        reference.logits(V1, WEIGHTS["v1"], ids)


def test_positions():
    one_kind = V1 | {"position_encoding_2d": False}
    for is_gmask in (True, False):
        row = reference.Row(context_length=4, mask_position=2, is_gmask=is_gmask)
        assert reference.positions(V1, row, 8) == ([0, 1, 2, 3, 2, 2, 2, 2], [0, 0, 0, 0, 1, 2, 3, 4])
    assert reference.positions(one_kind, row._replace(is_gmask=True), 7)[0] == [0, 1, 2, 3, 4, 5, 6]
    assert reference.positions(one_kind, row._replace(is_gmask=False), 7)[0] == [0, 1, 2, 3, 2, 2, 2]


def test_new_tokens_do_not_change_the_row():
    """A [gMASK] that is generated in a row of [MASK] is a token like any other."""
    config, ids = V1, [5, MASK, 6, SOP]
    row = reference.describe(config, ids)
    as_prompted = reference.logits(config, WEIGHTS["v1"], ids + [GMASK, 7], row=row)
    assert_close(as_prompted[:4], logits_of_v1(ids), rtol=0, atol=1e-12)
    assert np.abs(logits_of_v1(ids + [GMASK, 7])[3] - as_prompted[3]).max() > 1e-3


# ---- ChatGLM-6B: what goes past attention and MLP


@pytest.mark.parametrize("num_layers", [1, 2, 28, 40])
def test_alpha_is_that_of_28_layers(num_layers):
    """A block that adds nothing leaves its twice normed input, times sqrt(56), however many layers there are."""
    config = V1 | {"num_layers": num_layers}
    silent = {key: np.float64(0 * weight if ".dense" in key else weight) for key, weight in WEIGHTS["v1"].items()}
    x = np.random.default_rng(1).standard_normal((5, V1["hidden_size"]))
    out = reference.block_of_first(config, silent, 1, x, reference.Row(3, 1, True))
    name, eps = "transformer.layers.1", V1["layernorm_epsilon"]
    a = math.sqrt(56) * reference.layer_norm(x, silent, f"{name}.input_layernorm", eps)
    assert_close(out, math.sqrt(56) * reference.layer_norm(a, silent, f"{name}.post_attention_layernorm", eps))


# ---- rotary positions


def turn_v1(x, place, block):
    return reference.turn_in_first(V1, x, place, block)


def turn_v2(x, place):
    return reference.turn_neighbours(x, place, reference.frequencies_of_second(V2))


def vectors(num, width):
    return np.random.default_rng(2).standard_normal((num, width))


def test_turns_keep_norms():
    for x in vectors(5, 12):
        assert abs(np.linalg.norm(turn_v1(x, 31, 17)) - np.linalg.norm(x)) < 1e-12
        assert abs(np.linalg.norm(turn_v1(x, 31, 17)[:6]) - np.linalg.norm(x[:6])) < 1e-12
    for x in vectors(5, V2["kv_channels"]):
        assert abs(np.linalg.norm(turn_v2(x, 31)) - np.linalg.norm(x)) < 1e-12


def test_scores_depend_on_distances_alone():
    q, k = vectors(2, 12)
    score = turn_v1(q, 9, 4) @ turn_v1(k, 6, 2)
    assert abs(turn_v1(q, 109, 24) @ turn_v1(k, 106, 22) - score) < 1e-12
    assert abs(turn_v1(q, 10, 4) @ turn_v1(k, 6, 2) - score) > 1e-2
    assert abs(turn_v1(q, 9, 5) @ turn_v1(k, 6, 2) - score) > 1e-2
    q, k = vectors(2, V2["kv_channels"])
    score = turn_v2(q, 9) @ turn_v2(k, 6)
    assert abs(turn_v2(q, 109) @ turn_v2(k, 106) - score) < 1e-12
    assert abs(turn_v2(q, 10) @ turn_v2(k, 6) - score) > 1e-2


def test_what_turns():
    """ChatGLM-6B: pairs (i, i + 3) in each half, one half by each position. The others: neighbours in the first half."""
    for i in range(12):
        unit = np.eye(12)[i]
        first, second = (set(np.flatnonzero(turn_v1(unit, *place)[:])) for place in ((1, 0), (0, 1)))
        partner = i + 3 if i % 6 < 3 else i - 3
        assert (first, second) == (({i, partner}, {i}) if i < 6 else ({i}, {i, partner}))
    width = V2["kv_channels"]
    for i in range(width):
        wanted = {i, i ^ 1} if i < width // 2 else {i}
        assert set(np.flatnonzero(turn_v2(np.eye(width)[i], 1))) == wanted
    assert_close(reference.turn_neighbours(np.eye(4)[0], math.pi / 2, [1.0]), np.eye(4)[1], rtol=0, atol=1e-15)
    assert_close(reference.turn_halves(np.eye(4)[0], math.pi / 2, [1.0, 1.0]), np.eye(4)[2], rtol=0, atol=1e-15)


def test_frequencies():
    exact = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    rounded = reference.half_precision_frequencies(64)
    assert rounded.dtype == np.float16
    assert_close(rounded.astype(np.float64), exact, rtol=2**-11, atol=0)
    assert np.abs(rounded - exact).max() > 1e-4
    width = V2["kv_channels"] // 2
    assert_close(reference.frequencies_of_second(V2), (50 * 10000.0) ** (-np.arange(0, width, 2) / width))


# ---- the tokenizers' files fit the models


@pytest.mark.parametrize("name", ["chatglm6b", "chatglm6b_bin"])
def test_tokens_of_first(name):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece: pip install sentencepiece")
    config = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    settings = json.loads((FOLDER / name / "tokenizer_config.json").read_text(encoding="utf-8"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / name / "ice_text.model"))
    moved = settings["num_image_tokens"]
    for key in ("bos", "eos", "mask", "gmask", "pad"):
        assert pieces.piece_to_id(settings[f"{key}_token"]) + moved == config[f"{key}_token_id"], key
    assert pieces.vocab_size() + moved < config["vocab_size"]
    blanks = ["<n>", "<|tab|>"] + [f"<|blank_{length}|>" for length in range(2, 81)]
    assert pieces.encode("".join(blanks), out_type=str)[1:] == blanks
    # Control tokens come from ids alone, never from text; what has no piece becomes bytes; full width becomes ASCII.
    for text in ("[gMASK] <sop>[MASK]", "价 Ω 😀"):
        ids = pieces.encode(text)
        assert not any(pieces.is_control(i) or pieces.is_unknown(i) for i in ids) and pieces.decode(ids) == text
    assert pieces.decode(pieces.encode("你好，你：")) == "你好,你:"


@pytest.mark.parametrize(("name", "num_special"), [("chatglm2", 5), ("chatglm3", 9)])
def test_tokens_of_second(name, num_special):
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece: pip install sentencepiece")
    config = json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / name / "tokenizer.model"))
    assert (pieces.unk_id(), pieces.bos_id(), pieces.eos_id(), pieces.pad_id()) == (0, 1, 2, -1)
    assert pieces.vocab_size() + num_special < config["padded_vocab_size"]
    ends = {"chatglm2": 2, "chatglm3": [2, pieces.vocab_size() + 6, pieces.vocab_size() + 8]}
    assert config["eos_token_id"] == ends[name]
    assert pieces.encode("\n") == [pieces.piece_to_id("▁"), pieces.piece_to_id("<0x0A>")]
    for text in ("[gMASK]sop<|user|>", "价 Ω 😀", "你好，\n\n答："):
        ids = pieces.encode(text)
        assert not any(pieces.is_unknown(i) or pieces.is_control(i) for i in ids) and pieces.decode(ids) == text
