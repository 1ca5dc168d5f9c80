"""Models saved with packed weights: the same numbers as before, mapped and not read; damaged, foreign and other files."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY

from poptransformer import Session, UserError
from poptransformer.checkpoint import Checkpoint, quantize, saved
from poptransformer.checkpoint.safetensors_writer import write_safetensors
from poptransformer.checkpoint.saved import HOW_TO_SAVE

GOLDEN = REPOSITORY / "tests" / "golden"
FAMILIES = (
    "bloom", "chatglm2", "chatglm6b", "chatglm6b_bin", "gemma", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2",
    "qwen3", "rwkv",
)  # fmt: skip
IDS = [251, 3, 1, 4, 1, 5, 9, 254, 6, 5, 3, 5]  # as a ChatGLM-6B has them: a blank, and where its filling begins


def open_numpy(model, **options):
    """A Session that runs in NumPy."""
    return Session(model, backend="reference", max_length=32, **options)


@pytest.fixture(scope="module")
def pocket_int4(tmp_path_factory):
    """gpt2-pocket, saved in int4 in groups of 64."""
    folder = tmp_path_factory.mktemp("saved") / "pocket"
    with open_numpy(REPOSITORY / "examples/gpt2/gpt2-pocket", precision="int4", group_size=64) as session:
        assert session.save_quantized(folder) == folder
    return folder


@pytest.fixture
def copy(pocket_int4, tmp_path):
    """A copy of it to spoil."""
    return shutil.copytree(pocket_int4, tmp_path / "copy")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gives_the_same_logits(family, tmp_path):
    """Those whose weights are reordered, transposed or tied among them."""
    with open_numpy(GOLDEN / family, precision="int8") as session:
        wanted, names = session.logits(IDS), set(session.model.named_parameters())
        session.save_quantized(tmp_path / "saved")
        prompts = "Hello there", session.tokenizer and session.tokenizer.encode("Hello there")
    with open_numpy(tmp_path / "saved") as session:
        np.testing.assert_array_equal(session.logits(IDS), wanted)
        assert str(session.precision) == "int8"
        assert set(session._checkpoint.names()) == names
        assert (session.tokenizer and session.tokenizer.encode(prompts[0])) == prompts[1]


@pytest.mark.parametrize("precision, group_size", [("int4", -1), ("fp8", -1), ("bf16", None), ("fp32", None)])
def test_each_precision(tiny, tmp_path, precision, group_size):
    with open_numpy(tiny, precision=precision, group_size=group_size) as session:
        wanted, arrays = session.logits(IDS), [parameter.load() for parameter in session.model.parameters()]
        session.save_quantized(tmp_path / "new" / "saved")
    with open_numpy(tmp_path / "new" / "saved") as session:
        assert session.precision.name == precision and (session.precision.packing or (0, None))[1] == group_size
        np.testing.assert_array_equal(session.logits(IDS), wanted)
        for parameter, array in zip(session.model.parameters(), arrays, strict=True):
            assert parameter.load().dtype == array.dtype
            np.testing.assert_array_equal(parameter.load(), array)


def test_text_and_tokens_are_the_same(pocket, pocket_int4):
    """With the kernels: text in, text out, and the stops of the files."""
    with Session(pocket, precision="int4", group_size=64) as one, Session(pocket_int4) as other:
        texts = [session.generate("Once upon a time", max_new_tokens=8)[0].text for session in (one, other)]
        assert texts[0] == texts[1] and len(texts[0]) > 8
        assert one.eos_token_ids == other.eos_token_ids


def test_arrays_are_mapped_and_not_copied(pocket_int4):
    import jax

    with Checkpoint.open(pocket_int4) as checkpoint:
        packed = [name for name in checkpoint.names() if checkpoint.stored_dtype(name) == "uint8"]
        arrays = [checkpoint.map(name) for name in packed]
        plain = {name: checkpoint.map(name) for name in checkpoint.names() if name not in packed}
    assert len(packed) == 4 * 8 + 1
    for array in arrays:
        assert array.ctypes.data % 64 == 0 and not array.flags.writeable
        on_device = jax.device_put(array, jax.local_devices(backend="cpu")[0])
        assert on_device.unsafe_buffer_pointer() == array.ctypes.data
    assert all(np.isfinite(array).all() for array in plain.values())  # they outlive the file that was closed


def small_gguf(path):
    """A Llama of one layer in Q4_0, as llama.cpp has its rows, with the tokenizer of gpt2-pocket and a chat template."""
    from gguf_cases import random_blocks, write

    fields = json.loads((REPOSITORY / "examples/gpt2/gpt2-pocket/tokenizer.json").read_text(encoding="utf-8"))["model"]
    sizes = {"context_length": 61, "embedding_length": 32, "block_count": 1, "attention.head_count": 4}
    sizes |= {"feed_forward_length": 64, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    tokens = sorted(fields["vocab"], key=fields["vocab"].get)
    metadata = {f"llama.{key}": value for key, value in sizes.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in fields["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    }
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    tensors = {f"blk.0.{name}.weight": (random_blocks("Q4_0", *shape), "Q4_0") for name, shape in shapes.items()}
    tensors |= {f"blk.0.{name}.weight": np.ones(32, np.float32) for name in ("attn_norm", "ffn_norm")}
    tensors["token_embd.weight"] = np.random.default_rng(0).standard_normal((len(tokens), 32)).astype(np.float32)
    tensors["output_norm.weight"] = np.ones(32, np.float32)
    return write(path, "llama", metadata, tensors)


def test_gguf_files_keep_their_codes_and_tokenizer(tmp_path):
    pytest.importorskip("gguf", reason="needs gguf: pip install -r requirements.txt")
    text, message, found = "In 1969 a  cat\nsat", [{"role": "user", "content": "Hello"}], []
    with open_numpy(small_gguf(tmp_path / "small.gguf"), precision="int4") as session:
        session.save_quantized(tmp_path / "saved")
        for each in (session, open_numpy(tmp_path / "saved")):
            tokenizer = each.tokenizer
            ids = tokenizer.encode(text)
            names = tokenizer.bos_token_id, tokenizer.eos_token_id, each.eos_token_ids
            found.append((ids, tokenizer.decode(ids), names, tokenizer.chat_format.encode(message), each.logits(ids)))
    *one, wanted = found[0]
    *other, logits = found[1]
    assert one == other and one[0][0] == 0 and one[2][:2] == (0, 5)
    np.testing.assert_array_equal(logits, wanted)


@pytest.mark.parametrize("family, precision", [("llama", "fp8"), ("gpt_neox", "int8"), ("gpt2", "int4"), ("opt", "bf16")])
def test_ranks_share_a_saved_model(family, precision, tmp_path):
    """Each has its part of what one alone has, whether borders of groups allow to take the codes or not."""
    with open_numpy(GOLDEN / family, precision=precision) as session:
        wanted = session.logits(IDS)
        session.save_quantized(tmp_path / "saved")
    with open_numpy(tmp_path / "saved", num_replicas=2, kv_cache="int8") as session:
        logits = session.logits(IDS)
        assert np.corrcoef(logits.ravel(), wanted.ravel())[0, 1] > 0.995  # seen: 0.998 in int4, where a cut crosses groups
        with pytest.raises(
            UserError, match="num_replicas=2: weights are cut; save the model from a Session with num_replicas: 1"
        ):
            session.save_quantized(tmp_path / "again")


def test_the_file_has_the_precision(pocket_int4):
    for wrong, message in (
        (
            {"precision": "int8"},
            r"precision='int8': .*model.safetensors was saved in int4; leave precision out, or give the model",
        ),
        ({"precision": "fp32"}, "precision='fp32': .* was saved in int4"),
        ({"precision": "int4", "group_size": 32}, "group_size=32: .* was saved with group_size=64; leave group_size out"),
    ):
        with pytest.raises(UserError, match=message):
            Session(pocket_int4, **wrong)
    with open_numpy(pocket_int4, precision="int4", group_size=64, kv_cache="bf16") as session:
        assert (session.precision.name, session.precision.cache_dtype.name) == ("int4", "bfloat16")


def test_what_cannot_be_saved(pocket_int4, tiny, tmp_path):
    with open_numpy(tiny, random_weights=True) as session, pytest.raises(UserError, match="no weights to save"):
        session.save_quantized(tmp_path / "x")
    with open_numpy(tiny) as session:
        with pytest.raises(UserError, match=r"pocket: is there already and not empty; give another name"):
            session.save_quantized(pocket_int4)
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"file: is there already and is no folder"):
            session.save_quantized(tmp_path / "file")
        with pytest.raises(UserError, match="cannot be saved there"):
            session.save_quantized(tmp_path / "file" / "below")
        (tmp_path / "empty").mkdir()
        assert session.save_quantized(tmp_path / "empty") == tmp_path / "empty"
    with pytest.raises(UserError, match="this Session is closed"):
        session.save_quantized(tmp_path / "closed")


def test_nothing_half_done_stays(tiny, tmp_path):
    def broken():
        raise UserError("a weight that cannot be read")

    with open_numpy(tiny, precision="int8") as session:
        list(session.model.parameters())[-1].load = broken
        with pytest.raises(UserError, match="cannot be read"):
            session.save_quantized(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def rewrite(folder, change, keep=lambda name: True):
    """Write a saved file again with other metadata or fewer tensors."""
    path = folder / "model.safetensors"
    with Checkpoint.open(folder) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.names() if keep(name)}
        metadata = checkpoint._files[0].metadata | change
    tensors = {name: (array.shape, array.dtype, lambda array=array: array) for name, array in tensors.items()}
    write_safetensors(path, tensors, {key: value for key, value in metadata.items() if value is not None})


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"version": "2"},
            r"was saved in version 2 of the format for packed models, and this release reads version 1; save .* with",
        ),
        ({"version": None}, "was saved in version None"),
        ({"packings": "{"}, r"does not say how the weights are packed \(JSONDecodeError"),
        ({"packings": "[1]"}, "does not say how the weights are packed"),
        ({"packings": '{"a": {"kind": "int3"}}'}, "does not say how the weights are packed"),
        ({"packings": None}, "does not say how the weights are packed .KeyError"),
        ({"group_size": "many"}, "does not say how the weights are packed"),
        ({"precision": "int5"}, "precision='int5' is not supported"),
        (
            {"packings": "{}"},
            r"transformer.wte.weight is uint8\[256, 4224\], wanted is uint8\[256, 4224\] \(int8 in groups of 64",
        ),
    ],
)
def test_other_metadata(copy, change, message):
    rewrite(copy, change)
    with pytest.raises(UserError, match=message) as caught:
        open_numpy(copy)
    assert "model.safetensors" in str(caught.value) or "precision" in change


def test_other_weights(copy):
    rewrite(copy, {}, keep=lambda name: "ln_f" not in name)
    with pytest.raises(
        UserError, match=r"does not fit its config.json: lacks transformer.ln_f.bias, transformer.ln_f.weight. Is"
    ):
        open_numpy(copy)


def test_another_config(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"n_layer": config["n_layer"] - 1, "n_positions": 100}))
    with pytest.raises(
        UserError, match=r"has transformer.h.7.* and 4 more, for which this model has no place; transformer.wpe"
    ):
        open_numpy(copy)


def test_truncated_and_shrinking_files(copy):
    path = copy / "model.safetensors"
    size = path.stat().st_size
    with Checkpoint.open(copy) as checkpoint:
        os.truncate(path, size - 1)
        with pytest.raises(UserError, match="has become shorter since it was opened"):
            checkpoint.map("transformer.wte.weight")
    for length in (size - 1, size // 2, 100, 3):
        os.truncate(path, length)
        with pytest.raises(UserError, match="model.safetensors: truncated"):
            open_numpy(copy)


def test_command_line(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert quantize.main(["--model", str(tiny), "--precision", "int8", "--group-size", "128", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    with Checkpoint.open(out) as checkpoint:
        assert (checkpoint.saved.precision, checkpoint.saved.group_size) == ("int8", 128)
    assert quantize.main(["--model", str(tiny), "--precision", "int8", "--out", str(out)]) == 1
    assert "error: " in capsys.readouterr().err
    run = subprocess.run([*HOW_TO_SAVE.replace("python", sys.executable).split(), "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "--group-size" in run.stdout


def test_other_files_are_not_taken_for_ours(tiny):
    with Checkpoint.open(tiny) as checkpoint:
        assert checkpoint.saved is None
    assert saved.read_saved("x", {"format": "pt"}) is None
