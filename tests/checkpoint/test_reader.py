"""Checkpoints as folders: one file, shards, and everything that can be missing."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from poptransformer.checkpoint import Checkpoint
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


def write_index(folder, **shard_of):
    weight_map = {name: f"model-{shard:05}-of-00002.safetensors" for name, shard in shard_of.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


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


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.onnx", "pytorch_model-00001-of-00002.bin"])
def test_other_formats(folder, name):
    (folder / name).touch()
    message = error(folder, UnsupportedError)
    assert message.startswith(f"{folder}: has {name}, for which there is no reader; safetensors is the format read now;")
    assert "save_pretrained" in message


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
