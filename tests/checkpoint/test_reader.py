"""Checkpoints as folders: one file, shards, and everything that can be missing."""

import json
import logging
import pathlib
import re
import shutil

import numpy as np
import pytest

from poptransformer.checkpoint import Checkpoint
from poptransformer.checkpoint.formats import FORMATS, choose_weights
from poptransformer.errors import UnsupportedError, UserError

save_file = pytest.importorskip("safetensors.numpy").save_file

POCKET = pathlib.Path(__file__).parents[2] / "examples" / "gpt2" / "gpt2-pocket"
A, B, C = (np.full((2, 3), value, np.float32) for value in (1, 2, 3))


@pytest.fixture
def folder(tmp_path):
    """A folder with a configuration and nothing else."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    return tmp_path


@pytest.fixture
def sharded(folder):
    """Weights a, b, c in two shards, with the index and a file that does not belong to them."""
    save_file({"a": A, "b": B}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": C}, folder / "model-00002-of-00002.safetensors")
    save_file({"a": C, "stray": C}, folder / "adapter.safetensors")
    write_index(folder, a=1, b=1, c=2)
    return folder


def write_index(folder, stem="model", suffix="safetensors", **shard_of):
    weight_map = {name: f"{stem}-{shard:05}-of-00002.{suffix}" for name, shard in shard_of.items()}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_pickle(tensors, path):
    torch = pytest.importorskip("torch")
    torch.save({name: torch.from_numpy(array) for name, array in tensors.items()}, path)


@pytest.fixture
def sharded_pickles(folder):
    """Weights a, b, c in two shards of torch.save, with what training leaves behind."""
    save_pickle({"a": A, "b": B}, folder / "pytorch_model-00001-of-00002.bin")
    save_pickle({"c": C}, folder / "pytorch_model-00002-of-00002.bin")
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth", "other.bin"):
        (folder / name).write_bytes(b"not read")
    write_index(folder, "pytorch_model", "bin", a=1, b=1, c=2)
    return folder


def test_pocket_model():
    with Checkpoint.open(POCKET) as checkpoint:
        assert checkpoint.path == POCKET
        assert checkpoint.has_weights
        assert checkpoint.config["n_embd"] == 256
        assert checkpoint.generation_config["eos_token_id"] == 0
        assert checkpoint.shape("transformer.wte.weight") == (4096, 256)
        assert checkpoint.dtype("transformer.wte.weight") == np.float16
        part = checkpoint.read("transformer.wte.weight", dtype=np.float32, transpose=True, index=(slice(5, 9),))
        assert part.shape == (256, 4) and part.dtype == np.float32
        assert checkpoint.num_bytes == sum(checkpoint.read(name).nbytes for name in checkpoint.names())


def test_one_file_with_its_folder_around_it():
    checkpoint = Checkpoint.open(str(POCKET / "model.safetensors"))
    assert checkpoint.path == POCKET
    assert checkpoint.config["n_embd"] == 256
    assert checkpoint.has_weights


def test_shards(sharded):
    checkpoint = Checkpoint.open(sharded)
    assert sorted(checkpoint.names()) == ["a", "b", "c"]
    assert checkpoint.num_bytes == 3 * A.nbytes
    for name, wanted in (("a", A), ("b", B), ("c", C)):
        np.testing.assert_array_equal(checkpoint.read(name), wanted)


def test_one_file_goes_before_the_index(sharded):
    save_file({"whole": A}, sharded / "model.safetensors")
    assert Checkpoint.open(sharded).names() == ["whole"]


def test_one_file_of_another_name(folder):
    save_file({"a": A}, folder / "weights.safetensors")
    assert Checkpoint.open(folder).names() == ["a"]


def test_configuration_without_weights(folder):
    checkpoint = Checkpoint.open(folder)
    assert not checkpoint.has_weights
    assert checkpoint.names() == [] and checkpoint.num_bytes == 0
    assert checkpoint.config == {"model_type": "gpt2"}
    assert checkpoint.generation_config == {}


# Files of torch.save


AS_WEIGHTS_ONLY = "a pickle, read as weights only: nothing in it is executed"


def check_pickles(folder, caplog, named=None):
    """Check that a, b, c are read from files of torch.save, and that it is logged once."""
    with caplog.at_level(logging.INFO), Checkpoint.open(folder) as checkpoint:
        assert sorted(checkpoint.names()) == ["a", "b", "c"]
        assert checkpoint.num_bytes == 3 * A.nbytes
        assert checkpoint.config == {"model_type": "gpt2"}
        assert checkpoint.dtype("a") == np.float32 and checkpoint.stored_dtype("a") == "float32"
        for name, wanted in (("a", A), ("b", B), ("c", C)):
            np.testing.assert_array_equal(checkpoint.read(name), wanted)
    notes = [message for message in caplog.messages if AS_WEIGHTS_ONLY in message]
    assert notes == [f"{named or folder}: {AS_WEIGHTS_ONLY}"]


def test_pickle_shards(sharded_pickles, caplog):
    check_pickles(sharded_pickles, caplog, sharded_pickles / "pytorch_model.bin.index.json")


def test_one_pickle(sharded_pickles, caplog):
    path = sharded_pickles / "pytorch_model.bin"
    save_pickle({"a": A, "b": B, "c": C}, path)
    check_pickles(sharded_pickles, caplog, path)  # before the index, and nothing beside it is looked at


@pytest.mark.parametrize("name", ["RWKV-4-Pile-169M-20220807-8023.pth", "model.pt", "weights.bin"])
def test_a_pickle_of_another_name(folder, caplog, name):
    save_pickle({"a": A, "b": B, "c": C}, folder / name)
    (folder / "optimizer.pt").write_bytes(b"not read")
    check_pickles(folder, caplog, folder / name)
    assert f"{folder}: no pytorch_model.bin, reading {name}" in caplog.messages
    caplog.clear()
    check_pickles(folder / name, caplog)  # the file itself as the model


def test_safetensors_go_before_pickles(sharded_pickles, caplog):
    save_file({"a": A}, sharded_pickles / "model.safetensors")
    with caplog.at_level(logging.INFO):
        assert Checkpoint.open(sharded_pickles).names() == ["a"]
    assert caplog.messages == [
        f"{sharded_pickles}: reading model.safetensors and not other.bin, pytorch_model-00001-of-00002.bin, "
        "pytorch_model-00002-of-00002.bin"
    ]


def test_whole_pickles_go_before_stray_safetensors(sharded_pickles, caplog):
    save_file({"a": A}, sharded_pickles / "adapter.safetensors")
    check_pickles(sharded_pickles, caplog, sharded_pickles / "pytorch_model.bin.index.json")
    assert f"{sharded_pickles}: reading pytorch_model.bin.index.json and not adapter.safetensors" in caplog.messages


def test_what_training_leaves_is_no_model(folder):
    for name in ("optimizer.pt", "optimizer_1.bin", "scheduler.pt", "training_args.bin", "rng_state_0.pth", "tokenizer.bin"):
        (folder / name).write_bytes(b"not read")
    assert not Checkpoint.open(folder).has_weights


def test_missing_pickle_shards(sharded_pickles):
    (sharded_pickles / "pytorch_model-00002-of-00002.bin").unlink()
    assert error(sharded_pickles) == (
        f"{sharded_pickles}: 1 of the 2 shards in pytorch_model.bin.index.json are missing: pytorch_model-00002-of-00002.bin; "
        "fetch them again"
    )


def test_pickle_shards_without_an_index(sharded_pickles):
    (sharded_pickles / "pytorch_model.bin.index.json").unlink()
    assert error(sharded_pickles) == (
        f"{sharded_pickles}: has other.bin, pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin, but neither "
        "pytorch_model.bin nor pytorch_model.bin.index.json, which says what belongs together; add the index, or give one file "
        "as the model"
    )


@pytest.mark.parametrize("is_pickle", [False, True])
def test_an_index_of_another_format(sharded_pickles, is_pickle):
    save_file({"c": C}, sharded_pickles / "model-00002-of-00002.safetensors")
    stem, suffix, suffixes = ("pytorch_model", "bin", "PyTorch files (named *.bin, *.pth, *.pt)")
    foreign = "model-00002-of-00002.safetensors"
    if not is_pickle:
        stem, suffix, suffixes = "model", "safetensors", "safetensors files (named *.safetensors)"
        foreign = "pytorch_model-00001-of-00002.bin"
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "c": "model-00002-of-00002.safetensors"}
    index = sharded_pickles / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert error(sharded_pickles) == (
        f"{index}: lists {foreign}, which should be {suffixes}; index and shards are not of one checkpoint"
    )


def test_a_truncated_shard_is_named(sharded_pickles):
    path = sharded_pickles / "pytorch_model-00002-of-00002.bin"
    path.write_bytes(path.read_bytes()[:-100])
    assert error(sharded_pickles) == f"{path}: truncated or damaged: its zip directory cannot be read; fetch it again"


def test_choices_between_formats():
    """What the hub's list of files and a folder's are chosen by."""
    safetensors, pytorch = (each for each in FORMATS if each.name in ("safetensors", "PyTorch"))
    for names, wanted in (
        ([], (None, [])),
        (["README.md", "training_args.bin", "config.json"], (None, [])),
        (["pytorch_model.bin", "model.safetensors.index.json"], (safetensors, ["model.safetensors.index.json"])),
        (["pytorch_model.bin.index.json", "x.safetensors"], (pytorch, ["pytorch_model.bin.index.json"])),
        (["pytorch_model.bin", "pytorch_model.bin.index.json"], (pytorch, ["pytorch_model.bin"])),
        (["b.pth", "a.pth", "optimizer.pt"], (pytorch, ["a.pth", "b.pth"])),
        (["b.pth", "x.safetensors"], (safetensors, ["x.safetensors"])),
    ):
        assert choose_weights(names) == wanted


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_left_alone(folder, name):
    (folder / name).write_bytes(b"not read")
    assert not Checkpoint.open(folder, weights=False).has_weights


# Errors


def error(folder, kind=UserError):
    with pytest.raises(kind) as caught:
        Checkpoint.open(folder)
    assert type(caught.value) is kind
    return str(caught.value)


def test_missing_shards_are_all_named(sharded):
    for path in sharded.glob("model-*"):
        path.unlink()
    assert error(sharded) == (
        f"{sharded}: 2 of the 2 shards in model.safetensors.index.json are missing: model-00001-of-00002.safetensors, "
        "model-00002-of-00002.safetensors; fetch them again"
    )


def test_index_that_names_weights_its_shards_lack(sharded):
    write_index(sharded, a=1, b=2, c=2, d=1)
    assert error(sharded) == (
        f"{sharded}/model.safetensors.index.json: 2 of 4 weights are not in the shard it gives: "
        "b (model-00002-of-00002.safetensors), d (model-00001-of-00002.safetensors); index and shards are not of one "
        "checkpoint"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "index.json: not valid JSON: Expecting"),
        ("[]", "index.json: a JSON object is wanted, this is a list"),
        ("{}", "index.json: has no weight_map; fetch it again"),
        ('{"weight_map": {}}', "index.json: has no weight_map; fetch it again"),
        (
            '{"weight_map": {"a": "../x.safetensors"}}',
            "index.json: a is said to be in '../x.safetensors', which is not",
        ),
        ('{"weight_map": {"a": 1}}', "index.json: a is said to be in 1, which is not a file name"),
        ('{"weight_map": {"a": ".."}}', "index.json: a is said to be in '..', which is not a file name"),
        ('{"weight_map": {"a": ""}}', "index.json: a is said to be in '', which is not a file name"),
        ('{"weight_map": {"a": "x\\u0000"}}', "x\\x00': is not a file name"),
        ('{"weight_map": {"a": "\\ud800"}}', "\\ud800': is not a file name"),
        (f'{{"weight_map": {{"a": "{"x" * 300}"}}}}', "xxx: cannot be read (File name too long)"),
        ("[" * 100_000, "index.json: not valid JSON: nested too deeply"),
    ],
)
def test_bad_index(sharded, content, message):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert message in error(sharded)


def test_shards_without_an_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert error(sharded) == (
        f"{sharded}: has adapter.safetensors, model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, but "
        "neither model.safetensors nor model.safetensors.index.json, which says what belongs together; add the index, "
        "or give one file as the model"
    )
    for name in ("adapter.safetensors", "model-00002-of-00002.safetensors"):
        (sharded / name).unlink()
    assert "has model-00001-of-00002.safetensors, but neither" in error(sharded)


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.onnx", "model.ckpt"])
def test_other_formats(folder, name):
    (folder / name).touch()
    message = error(folder, UnsupportedError)
    assert message.startswith(f"{folder}: has {name}, for which there is no reader; read are .safetensors, .bin, .pth, .pt")
    assert "fetch one of those" in message and "from_tf=True or from_flax=True" in message


def test_damaged_file_is_named(folder):
    shutil.copy(POCKET / "model.safetensors", folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1])
    wanted = f"{folder}/model.safetensors: truncated: its header describes {len(data)} bytes, the file has {len(data) - 1}"
    assert wanted in error(folder)


def test_empty_folder(tmp_path):
    assert error(tmp_path) == f"{tmp_path}: no checkpoint: it has neither config.json nor model.safetensors"


def test_configuration(folder):
    path = folder / "config.json"
    for content, message in (
        ("{'a'", "not valid JSON: Expecting property name"),
        ("3", "a JSON object is wanted, this is a int"),
        (b"\xff", "not valid JSON"),
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(UserError, match=re.escape(f"{path}: {message}")):
            Checkpoint.open(folder).config  # noqa: B018
    save_file({"a": A}, folder / "model.safetensors")
    path.unlink()
    with pytest.raises(UserError, match=re.escape(f"{path}: no such file; a checkpoint needs its config.json")):
        Checkpoint.open(folder).config  # noqa: B018
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config.json: not valid JSON"):
        Checkpoint.open(folder).generation_config  # noqa: B018


@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_a_byte_order_mark_is_skipped(folder, name):
    (folder / f"{name}.json").write_bytes(b'\xef\xbb\xbf{"model_type": "gpt2"}')
    assert getattr(Checkpoint(folder), name) == {"model_type": "gpt2"}


def test_unknown_weight(sharded):
    checkpoint = Checkpoint.open(POCKET)
    for ask in (checkpoint.read, checkpoint.shape, checkpoint.dtype):
        with pytest.raises(UserError, match="no weight 'transformer.wte'; did you mean 'transformer.wte.weight'?"):
            ask("transformer.wte")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "weights.safetensors"])
def test_links_and_folders_in_the_place_of_weights(folder, name):
    (folder / name).symlink_to("../blobs/0123")
    assert error(folder) == f"{folder}/{name}: is a link to ../blobs/0123, which is not there; fetch it again"
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    assert error(folder) == f"{folder}/{name}: cannot be read (Too many levels of symbolic links)"
    if name.startswith("model"):
        (folder / name).unlink()
        (folder / name).mkdir()
        assert error(folder) == f"{folder}/{name}: is a folder; a file is wanted"


def test_links_in_the_place_of_shards(sharded):
    for path in sharded.glob("model-*"):
        path.unlink()
        path.symlink_to("gone")
    assert "2 of the 2 shards in model.safetensors.index.json are missing: model-00001-of-00002" in error(sharded)


@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_links_and_folders_in_the_place_of_configurations(folder, name):
    path = folder / f"{name}.json"
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)
    with pytest.raises(UserError, match=re.escape(f"{path}: cannot be read (Too many levels of symbolic links)")):
        getattr(Checkpoint(folder), name)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=re.escape(f"{path}: is a folder; a file is wanted")):
        getattr(Checkpoint(folder), name)


def test_no_permission(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "iterdir", refuse)
        assert error(folder) == f"{folder}: cannot be read (Permission denied)"
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_text", refuse)
        with pytest.raises(UserError, match=r"config.json: cannot be read \(Permission denied\)"):
            Checkpoint(folder).config  # noqa: B018
    monkeypatch.setattr("os.stat", refuse)
    with pytest.raises(UserError, match=r"config.json: cannot be read \(Permission denied\)"):
        Checkpoint(folder).config  # noqa: B018
