"""GGUF files: every type of weights against values worked out one by one, layouts, and all that can be wrong with a file."""

import os
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from gguf_cases import QUANTISED, gguf, random_blocks, values_of, write

from poptransformer.checkpoint import Checkpoint
from poptransformer.checkpoint.gguf_file import GGUFFile
from poptransformer.checkpoint.gguf_header import GGUFHeader
from poptransformer.errors import UnsupportedError, UserError
from poptransformer.packing import Packing
from poptransformer.tokenizers import load_tokenizer

LLAMA = {
    "llama.context_length": 64,
    "llama.embedding_length": 12,
    "llama.feed_forward_length": 20,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}
GPT2 = {
    "gpt2.context_length": 64,
    "gpt2.embedding_length": 32,
    "gpt2.feed_forward_length": 64,
    "gpt2.block_count": 1,
    "gpt2.attention.head_count": 2,
}


def opened(tmp_path, *arguments, **keywords):
    return Checkpoint.open(write(tmp_path / "model.gguf", *arguments, **keywords))


# ---- weights


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_quantisation(tmp_path, kind):
    """All values, parts of them, cast, and with the axes swapped; a matrix of more than one block of rows."""
    rows, columns = 301, 256 if kind.endswith("K") else 96
    data = random_blocks(kind, rows, columns)
    wanted = values_of(kind, data[:7]).reshape(7, columns)
    with opened(tmp_path, metadata=LLAMA, tensors={"output.weight": (data, kind)}) as checkpoint:
        name = "lm_head.weight"
        assert checkpoint.shape(name) == (rows, columns) and checkpoint.stored_dtype(name) == "float32"
        assert checkpoint.num_bytes == data.nbytes
        values = checkpoint.read(name)
        assert values.dtype == np.float32 and values.ctypes.data % 64 == 0
        np.testing.assert_allclose(values[:7], wanted, rtol=3e-7, atol=2e-8)  # products in another order
        assert np.unique(values).size > 200
        np.testing.assert_array_equal(checkpoint.read(name, index=(slice(3, 290),)), values[3:290])
        part = (slice(5, 300), slice(31, 70))
        np.testing.assert_array_equal(checkpoint.read(name, index=part), values[part])
        swapped = checkpoint.read(name, np.float16, transpose=True, index=part)
        assert swapped.flags.c_contiguous
        np.testing.assert_array_equal(swapped, values[part].T.astype(np.float16))
        half = checkpoint.read(name, ml_dtypes.bfloat16)
        np.testing.assert_array_equal(half, values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_codes_go_into_packed_weights_as_they_are(tmp_path, kind, architecture):
    """Types of the packed layout are taken over, rows of heads turned back; others, and other groups, are quantised anew."""
    columns = 256
    query = random_blocks(kind, 48, columns)
    other = {"llama": "blk.0.ffn_up.weight", "gpt2": "blk.0.attn_qkv.weight"}[architecture]
    tensors = {"blk.0.attn_q.weight": (query, kind), other: (random_blocks(kind, 37, columns, seed=1), kind)}
    if architecture == "gpt2":
        del tensors["blk.0.attn_q.weight"]
    metadata = (
        LLAMA | {"llama.attention.head_count": 4, "llama.attention.head_count_kv": 4} if architecture == "llama" else GPT2
    )
    file = opened(tmp_path, architecture, metadata, tensors)
    wanted = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}.get(kind)
    for name in file.names():
        is_transposed = architecture == "gpt2"
        values = file.read(name, transpose=is_transposed)
        for form in ("int8", "int4"):
            packing = Packing(form, 32, *values.shape)
            packed = file.read_packed(name, packing, transpose=is_transposed)
            assert (packed is not None) == (form == wanted)
            if packed is not None:
                assert packed.shape == packing.shape
                np.testing.assert_allclose(packing.unpack(packed), values, rtol=1e-6, atol=1e-7)
            assert file.read_packed(name, Packing(form, 64, *values.shape), transpose=is_transposed) is None
            assert file.read_packed(name, packing, transpose=not is_transposed) is None


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats(tmp_path, kind):
    values = np.random.default_rng(1).normal(size=(33, 7)).astype(np.float32)
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
    stored = values.astype(dtype)
    with opened(tmp_path, metadata=LLAMA, tensors={"output.weight": (stored.view(np.uint8), kind)}) as checkpoint:
        assert checkpoint.dtype("lm_head.weight") == dtype
        read = checkpoint.read("lm_head.weight")
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, stored)
        np.testing.assert_array_equal(
            checkpoint.read("lm_head.weight", np.float32, transpose=True), stored.T.astype(np.float32)
        )


def test_values_beyond_the_range_of_a_dtype(tmp_path):
    data = random_blocks("Q8_0", 2, 32)
    data[1, :2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
    checkpoint = opened(tmp_path, metadata=LLAMA, tensors={"output.weight": (data, "Q8_0")})
    with pytest.raises(UserError, match=r"lm_head.weight: has float32 values beyond the range of float16; set precision: bf16"):
        checkpoint.read("lm_head.weight", np.float16)
    assert np.isfinite(checkpoint.read("lm_head.weight", ml_dtypes.bfloat16).astype(np.float32)).all()


def taking_turns(matrix, num_heads):
    """Rows as llama.cpp's converter lays them out for architecture llama."""
    return matrix.reshape(num_heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rows_of_queries_and_keys(tmp_path, architecture):
    """6 query heads and 3 key heads of 10 features; read whole, in parts that begin inside a head, and swapped."""
    names = {"attn_q": (6, "q_proj"), "attn_k": (3, "k_proj"), "attn_v": (3, "v_proj")}
    rng = np.random.default_rng(2)
    metadata = {key.replace("llama", architecture): value for key, value in LLAMA.items()} | {
        f"{architecture}.attention.head_count": 6,
        f"{architecture}.attention.head_count_kv": 3,
    }
    weights, tensors = {}, {}
    for name, (num_heads, ours) in names.items():
        for suffix, shape in (("weight", (num_heads * 10, 64)), ("bias", (num_heads * 10,))):
            values = rng.normal(size=shape).astype(np.float32)
            is_in_turns = architecture == "llama" and name != "attn_v"
            stored = taking_turns(values, num_heads) if is_in_turns else values
            tensors[f"blk.0.{name}.{suffix}"] = stored
            if suffix == "weight":
                stored = gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0)
                tensors[f"blk.0.{name}.weight"] = (stored, "Q8_0")
                values = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
                values = gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0)
            weights[f"model.layers.0.self_attn.{ours}.{suffix}"] = values
    with opened(tmp_path, architecture, metadata, tensors) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(weights)
        for name, values in weights.items():
            np.testing.assert_array_equal(checkpoint.read(name), values)
            np.testing.assert_array_equal(checkpoint.read(name, np.float16, index=(slice(7, 26),)), np.float16(values[7:26]))
            if values.ndim == 2:
                np.testing.assert_array_equal(checkpoint.read(name, transpose=True), values.T)


def test_gpt2_matrices_lie_the_other_way_round(tmp_path):
    """[out, in] in the file, quantised or not; [in, out] in Hugging Face's checkpoints."""
    rng = np.random.default_rng(3)
    plain = rng.normal(size=(96, 32)).astype(np.float32)
    data = random_blocks("Q4_1", 32, 64)
    tensors = {
        "blk.0.attn_qkv.weight": plain,
        "blk.0.attn_qkv.bias": plain[:, 0].copy(),
        "blk.0.ffn_down.weight": (data, "Q4_1"),
        "token_embd.weight": plain,
    }
    down = values_of("Q4_1", data).reshape(32, 64)
    with opened(tmp_path, "gpt2", GPT2, tensors) as checkpoint:
        assert checkpoint.config["vocab_size"] == 96
        fused, narrow = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_proj.weight"
        assert checkpoint.shape(fused) == (32, 96) and checkpoint.shape(narrow) == (64, 32)
        np.testing.assert_array_equal(checkpoint.read(fused), plain.T)
        np.testing.assert_array_equal(checkpoint.read(fused, transpose=True), plain)
        np.testing.assert_allclose(checkpoint.read(narrow), down.T, rtol=3e-7, atol=2e-8)
        np.testing.assert_allclose(checkpoint.read(narrow, transpose=True), down, rtol=3e-7, atol=2e-8)
        part = (slice(33, 60), slice(5, 9))
        np.testing.assert_allclose(checkpoint.read(narrow, index=part), down.T[part], rtol=3e-7, atol=2e-8)
        np.testing.assert_array_equal(checkpoint.read("transformer.wte.weight"), plain)
        np.testing.assert_array_equal(checkpoint.read("transformer.h.0.attn.c_attn.bias"), plain[:, 0])


@pytest.mark.parametrize("architecture", ["LLAMA", "QWEN2", "QWEN3", "GPT2"])
def test_all_weights_of_an_architecture_have_a_name(architecture):
    """Against the gguf package's own table, which maps the other way."""
    from poptransformer.checkpoint.gguf_tensors import ROPE_FACTORS, place_of

    kind = gguf.MODEL_ARCH[architecture]
    back = gguf.get_tensor_name_map(kind, 3)
    # Experts, and what no converter writes.
    other = ("exp", "inp", "rot_embd", "chexp")
    names = [gguf.TENSOR_NAMES[tensor].format(bid=2) for tensor in gguf.MODEL_TENSORS[kind]]
    names = [name for name in names if not any(part in name for part in other) and name + ".weight" != ROPE_FACTORS]
    assert len(names) >= 9
    for name in names:
        place = place_of(architecture.lower(), name + ".weight", 4, 2)
        assert back.get_name(place.name, try_suffixes=(".weight",)) == name + ".weight", place


# ---- configuration


def config_of(tmp_path, architecture="llama", tensors=None, **changes):
    base = {"llama": LLAMA, "gpt2": GPT2}.get(architecture) or {
        key.replace("llama", architecture): value for key, value in LLAMA.items()
    }
    metadata = base | {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with opened(
        tmp_path, architecture, metadata, tensors or {"token_embd.weight": np.zeros((9, 12), np.float32)}
    ) as checkpoint:
        assert checkpoint.generation_config == {}
        return checkpoint.config


def test_llama_config(tmp_path):
    config = config_of(tmp_path)
    assert config == {
        "model_type": "llama", "vocab_size": 9, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
        "hidden_act": "silu", "rms_norm_eps": float(np.float32(1e-5)), "rope_theta": 10000.0, "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": [],
    }  # fmt: skip


def test_what_the_tensors_say_about_the_config(tmp_path):
    zeros = np.zeros((12, 12), np.float32)
    names = ("token_embd.weight", "output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.bias")
    config = config_of(tmp_path, tensors=dict.fromkeys(names, zeros))
    assert not config["tie_word_embeddings"] and config["attention_bias"] and config["mlp_bias"]


def test_other_keys(tmp_path):
    config = config_of(
        tmp_path, attention__head_count=[2, 2], attention__head_count_kv=1, attention__key_length=10,
        attention__value_length=10, rope__dimension_count=10, rope__freq_base=5e5, attention__sliding_window=33, vocab_size=77,
    )  # fmt: skip
    assert config["model_type"] == "mistral" and config["sliding_window"] == 33
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 10)
    assert config["rope_theta"] == 5e5 and config["vocab_size"] == 9  # the embedding's rows
    config = config_of(tmp_path, "qwen2", attention__sliding_window=33)
    assert config["model_type"] == "qwen2" and config["use_sliding_window"] and config["max_window_layers"] == 0
    config = config_of(tmp_path, "gpt2", attention__layer_norm_epsilon=0.5)
    assert config["model_type"] == "gpt2" and config["n_inner"] == 64 and config["layer_norm_epsilon"] == 0.5


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 24.0, "finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 24.0},
        ),
    ],
)
def test_rope_scaling(tmp_path, keys, wanted):
    assert config_of(tmp_path, **{f"rope__scaling__{key}": value for key, value in keys.items()})["rope_scaling"] == wanted


def test_older_rope_scaling_and_factors(tmp_path):
    assert config_of(tmp_path, rope__scale_linear=4.0)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    tensors = {"rope_freqs.weight": np.float32([1, 2, 8])}
    for factor in (1, 4):
        with opened(tmp_path, metadata=LLAMA | {"llama.rope.scaling.factor": float(factor)}, tensors=tensors) as checkpoint:
            assert checkpoint.names() == []
            assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": [factor, 2 * factor, 8 * factor]}


def test_ends(tmp_path):
    tokens = ["a", "</s>", "<|eot_id|>", "b", "<|endoftext|>", "c"]
    metadata = LLAMA | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eom_token_id": 5,
        "tokenizer.ggml.eot_token_id": 2,
    }
    with opened(tmp_path, metadata=metadata) as checkpoint:
        assert checkpoint.config["eos_token_id"] == [1, 2, 5, 4] and checkpoint.config["bos_token_id"] == 3
        assert checkpoint.config["vocab_size"] == 6


# ---- where files lie


def test_one_file_in_a_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")  # of something else: a GGUF file has its own
    path = write(tmp_path / "tiny.gguf", metadata=LLAMA | TOKENIZER, tensors={"output_norm.weight": np.ones(12, np.float32)})
    for source in (tmp_path, path, str(path)):
        with Checkpoint.open(source) as checkpoint:
            assert checkpoint.path == path and checkpoint.has_weights and checkpoint.names() == ["model.norm.weight"]
            assert checkpoint.config["hidden_size"] == 12
            assert load_tokenizer(checkpoint.path).encode("ab") == [2]
    with Checkpoint.open(tmp_path, weights=False) as checkpoint:
        assert not checkpoint.has_weights and checkpoint.config["hidden_size"] == 12 and checkpoint.path == path


def test_several_files_in_a_folder(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name, metadata=LLAMA)
    with pytest.raises(UserError, match=r"has a\.gguf, b\.gguf, .*; give one file as the model"):
        Checkpoint.open(tmp_path)


# ---- what is refused


def error(tmp_path, kind=UserError, architecture="llama", metadata=LLAMA, tensors=None):
    path = write(tmp_path / "model.gguf", architecture, metadata, tensors)
    with pytest.raises(kind) as caught:
        with Checkpoint.open(path) as checkpoint:
            checkpoint.config  # noqa: B018
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


def test_types_without_a_reader_are_named_all_at_once(tmp_path):
    kinds = {"IQ4_XS": 256, "Q2_K": 256, "Q3_K": 256, "TQ1_0": 256, "I8": 32}
    tensors = {}
    for kind, columns in kinds.items():
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        for layer in range(4 if kind == "Q2_K" else 1):
            data = np.zeros((2, columns // block_size * block_bytes), np.uint8)
            tensors[f"blk.{layer}.ffn_{kind.lower()}.weight"] = (data, kind)
    message = error(tmp_path, UnsupportedError, tensors=tensors)
    assert message == (
        "has weights in types without a reader (IQ4_XS: blk.0.ffn_iq4_xs.weight; Q2_K: blk.0.ffn_q2_k.weight, "
        "blk.1.ffn_q2_k.weight, blk.2.ffn_q2_k.weight and 1 more; Q3_K: blk.0.ffn_q3_k.weight; TQ1_0: blk.0.ffn_tq1_0.weight; "
        "I8: blk.0.ffn_i8.weight); F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K have one: fetch the model in "
        "one of those, or make it with llama-quantize"
    )
    with Checkpoint.open(tmp_path / "model.gguf", weights=False) as checkpoint:
        assert checkpoint.config["hidden_size"] == 12  # random weights will do


def test_a_type_that_nobody_knows(tmp_path):
    path = write(tmp_path / "model.gguf", metadata=LLAMA, tensors={"output_norm.weight": np.ones(12, np.float32)})
    data = path.read_bytes()
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    assert data[at : at + 4] == bytes(4)
    path.write_bytes(data[:at] + b"\x63\0\0\0" + data[at + 4 :])
    with pytest.raises(UnsupportedError, match=r"without a reader \(type 99: model.norm.weight\)"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("phi2", {}, "GGUF files of architecture 'phi2' are not supported; those of llama, qwen2, qwen3, gpt2 are"),
        ("lama", {}, "architecture 'lama' are not supported; did you mean 'llama'?; those of llama"),
        ("llama", {"split.count": 3, "split.no": 1}, "part 2 of a model split into 3 files; join them first: llama-gguf-split"),
        ("llama", {"llama.expert_count": 8, "llama.logit_scale": 0.5}, "llama.expert_count, llama.logit_scale: no model here"),
        ("llama", {"llama.attention.causal": False}, "llama.attention.causal: no model here does what this asks for"),
        ("llama", {"llama.rope.dimension_count": 4}, "llama.rope.dimension_count=4 is not supported; heads have 6 features"),
        ("llama", {"llama.attention.value_length": 8}, "llama.attention.value_length=8 is not supported"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "type='longrope' is not supported; none, linear and yarn are"),
        ("llama", {"llama.rope.scaling.attn_factor": 0.5}, "attn_factor=0.5 is not supported without yarn"),
        (
            "llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5},
            "type='yarn' together with a tensor rope_freqs.weight, or with a yarn_ext_factor or attn_factor other than 1",
        ),
        ("llama", {"llama.feed_forward_length": [8, 12]}, "llama.feed_forward_length differs by layer, which no"),
    ],
)  # fmt: skip
def test_unsupported(tmp_path, architecture, changes, message):
    assert message in error(tmp_path, UnsupportedError, architecture, LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"llama.block_count": None, "llama.context_length": None},
            "metadata lacks llama.block_count, llama.context_length",
        ),
        ({"llama.embedding_length": "12"}, "metadata: llama.embedding_length is '12'; a whole number is wanted"),
        ({"llama.embedding_length": 1.5}, "metadata: llama.embedding_length is 1.5; a whole number is wanted"),
        ({"llama.rope.freq_base": True}, "metadata: llama.rope.freq_base is True; a number is wanted"),
        ({"llama.attention.causal": 1}, "metadata: llama.attention.causal is 1; true or false is wanted"),
        ({"llama.attention.head_count": 0}, "metadata: llama.attention.head_count is 0; at least 1 is wanted"),
        ({"general.alignment": 24}, "general.alignment=24 is not a power of two"),
        ({"tokenizer.ggml.tokens": "abc"}, "metadata: tokenizer.ggml.tokens is 'abc'; an array is wanted"),
    ],
)
def test_wrong_metadata(tmp_path, changes, message):
    metadata = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    assert message in error(tmp_path, metadata=metadata)


def test_no_architecture(tmp_path):
    assert error(tmp_path, architecture=None) == "metadata lacks general.architecture"


def test_a_weight_under_both_of_its_names(tmp_path):
    ones = np.ones(12, np.float32)
    message = error(tmp_path, tensors={"output_norm.weight": ones, "model.norm.weight": ones})
    assert message == "has model.norm.weight twice, once as model.norm.weight"


def test_heads_that_do_not_fit(tmp_path):
    tensors = {"blk.0.attn_q.weight": np.zeros((14, 12), np.float32)}
    message = error(tmp_path, metadata=LLAMA | {"llama.attention.head_count": 4}, tensors=tensors)
    assert (
        message
        == "blk.0.attn_q.weight has 14 rows, which do not make 4 heads of an even size; is the metadata of another model?"
    )


def test_rope_factors_of_another_kind(tmp_path):
    message = error(tmp_path, tensors={"rope_freqs.weight": np.zeros((1, 3), np.float32)})
    assert message == "rope_freqs.weight is F32 of shape (1, 3); a row of F32 is wanted"


def test_without_the_gguf_package(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", metadata=LLAMA, tensors={"output_norm.weight": np.ones(12, np.float32)})
    monkeypatch.setitem(__import__("sys").modules, "gguf.constants", None)
    with pytest.raises(UserError, match=r"GGUF files need the gguf package \(.*\); install it: pip install gguf"):
        Checkpoint.open(path)


# ---- damaged files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Path and content of a small file with everything in it; the head takes its first part."""
    tensors = {
        "token_embd.weight": (random_blocks("Q8_0", 4, 32), "Q8_0"),
        "blk.0.attn_q.weight": (random_blocks("Q4_1", 12, 32), "Q4_1"),
        "output_norm.weight": np.ones(32, np.float32),
        "rope_freqs.weight": np.ones(3, np.float32),
    }
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, metadata=LLAMA | TOKENIZER | {"llama.embedding_length": 32}, tensors=tensors)
    with GGUFFile(path) as file:
        head = min(tensor.begin for tensor in file.header.tensors.values())
    return path, path.read_bytes(), head


def use_all(path):
    """Whatever is done with a file: everything that is in it is looked at."""
    with Checkpoint.open(path) as checkpoint:
        checkpoint.config  # noqa: B018
        for name in checkpoint.names():
            checkpoint.read(name, np.float32)
    return load_tokenizer(path)


def test_the_whole_file(whole):
    assert use_all(whole[0]).encode("abab") == [2, 2]


def check_damage(path, data):
    """True if a UserError of one line names the file; False if the damage does no harm."""
    path.write_bytes(data)
    try:
        use_all(path)
    except UserError as caught:
        assert "model.gguf" in str(caught) and "\n" not in str(caught) and len(str(caught)) < 700
        return True
    return False


def test_truncated_anywhere(whole, tmp_path):
    path, data, head = tmp_path / "model.gguf", whole[1], whole[2]
    end = data.rindex(np.ones(3, np.float32).tobytes()) + 12  # behind it there is padding
    lengths = [*range(0, head, 3), *range(head, end, 25), end - 1]
    assert all(check_damage(path, data[:length]) for length in lengths)
    assert not check_damage(path, data[:end])


def test_bytes_flipped_in_the_head(whole, tmp_path, caplog):
    """Every second byte of the head; nothing large is allocated for a length or a count that is wrong."""
    path, data, head = tmp_path / "model.gguf", whole[1], whole[2]
    rng = np.random.default_rng(4)
    gguf.quants.Q8_0.dequantize_blocks(random_blocks("Q8_0", 1, 32))  # imported before memory is counted
    found = []
    tracemalloc.start()
    for at in range(0, head, 2):
        damaged = bytearray(data)
        damaged[at] ^= int(rng.integers(1, 256))
        found.append(check_damage(path, damaged))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(found) > 0.5 * len(found)
    assert peak < 32 << 20, peak


def test_lengths_and_counts_beyond_reason(whole, tmp_path):
    """The largest numbers there are in place of each 8 bytes that could be a length, a count, a size or an offset."""
    path, data, head = tmp_path / "model.gguf", whole[1], whole[2]
    for value in (2**64 - 1, 2**63, 2**40, len(data) + 1):
        for at in range(8, head - 8, 4):
            check_damage(path, data[:at] + value.to_bytes(8, "little") + data[at + 8 :])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda data: b"", UserError, "truncated: 0 bytes, but a GGUF file starts with a head of 24"),
        (lambda data: b"GGU", UserError, "truncated: 3 bytes, but a GGUF file starts with a head of 24"),
        (lambda data: b"PK\3\4" + data[4:], UserError, r"not a GGUF file: it starts with b'PK\x03\x04', not b'GGUF'"),
        (lambda data: b"version https://git-lfs", UserError, "is a Git LFS pointer, not the weights; fetch them with"),
        (lambda data: b"FUGG" + data[4:], UnsupportedError, "a big-endian GGUF file; convert it to little-endian"),
        (lambda data: b"GGUF\0\0\0\3" + data[8:], UnsupportedError, "a big-endian GGUF file; convert it to little-endian"),
        (lambda data: b"GGUF\1\0\0\0" + data[8:], UnsupportedError, "GGUF version 1 has no reader (2 and 3 have)"),
        (lambda data: data[:1400], UserError, "truncated: its head describes 1452 bytes, the file has 1400; fetch it again"),
        (
            lambda data: data[:300], UserError,
            "truncated or damaged GGUF file: key 7 of 13 ends beyond byte 300, where the file ends",
        ),
        (lambda data: data.replace(b"block_count", b"block_c\xffunt"), UserError, r"b'llama.block_c\xffunt', which is no text"),
        (lambda data: data.replace(b"block_count", b"block\n\n\n\n\n\n"), UserError, "which is no text"),
        (lambda data: data.replace(b"gpt-2", b"gpt\xff2"), UserError, r"tokenizer.ggml.pre: b'gpt\xff2' is not valid UTF-8"),
    ],
)  # fmt: skip
def test_damage(whole, tmp_path, change, kind, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(change(whole[1]))
    with pytest.raises(kind, match=re.escape(message)) as caught:
        use_all(path)
    assert type(caught.value) is kind and str(path) in str(caught.value)


def test_things_that_are_there_twice_or_overlap(tmp_path):
    ones = np.ones(8, np.float32)
    path = write(
        tmp_path / "a.gguf", metadata=LLAMA | {"llama.aaaa": 1, "llama.bbbb": 2}, tensors={"xx.weight": ones, "yy.weight": ones}
    )
    data = path.read_bytes()
    at = data.index(b"yy.weight") + len("yy.weight") + 4 + 8 + 4
    for damaged, message in (
        (data.replace(b"llama.bbbb", b"llama.aaaa"), "key 9 of 9 (llama.aaaa) is there twice"),
        (data.replace(b"yy.weight", b"xx.weight"), "tensor 2 of 2 (xx.weight) is there twice"),
        (data[:at] + bytes(8) + data[at + 8 :], "tensor yy.weight overlaps xx.weight"),
        (data[:at] + b"\5" + data[at + 1 :], "tensor yy.weight is at byte 5 of the data, not at a multiple of 32"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=re.escape(message)):
            Checkpoint.open(path)


def test_files_that_cannot_be_opened_and_shrink(whole, tmp_path):
    with pytest.raises(UserError, match=r"gone\.gguf: cannot be opened \(No such file or directory\)"):
        GGUFHeader(tmp_path / "gone.gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[1])
    with Checkpoint.open(path) as checkpoint:
        os.truncate(path, len(whole[1]) - 200)
        with pytest.raises(UserError, match="has shrunk since it was opened"):
            for name in checkpoint.names():
                checkpoint.read(name)
