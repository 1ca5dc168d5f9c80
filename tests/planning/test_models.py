"""From a name, a file or a dict to a model without weights."""

import json
import shutil

import numpy as np
import pytest
from conftest import REPOSITORY

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.planning.models import find_sizes, read_config

GOLDEN = REPOSITORY / "tests" / "golden"


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """The hub's client without a network and with nothing in its cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_folder_a_config_file_and_a_dict_are_the_same(tiny):
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    assert read_config(str(tiny)) == read_config(tiny) == read_config(tiny / "config.json") == read_config(config) == config


def test_a_folder_with_a_config_and_no_weights(tmp_path):
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    assert find_sizes(tmp_path, "bf16").num_parameters == find_sizes(GOLDEN / "llama", "bf16").num_parameters


def test_a_file_of_weights(tiny):
    assert read_config(tiny / "model.safetensors") == read_config(tiny)


def test_a_gguf_file_holds_its_config(tmp_path):
    from gguf_cases import write

    sizes = {
        "context_length": 40,
        "embedding_length": 12,
        "block_count": 2,
        "feed_forward_length": 48,
        "attention.head_count": 2,
    }
    metadata = {f"gpt2.{key}": value for key, value in sizes.items()}
    write(tmp_path / "tiny.gguf", "gpt2", metadata, {"token_embd.weight": np.zeros((50, 12), np.float32)})
    for model in (tmp_path / "tiny.gguf", tmp_path):
        assert find_sizes(model, "fp16").num_parameters == 50 * 12 + 40 * 12 + 2 * (12 * 12 * 12 + 13 * 12) + 2 * 12


def test_rwkvs_own_files_tell_their_sizes(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    weights = load_file(GOLDEN / "rwkv" / "model.safetensors")
    names = {"feed_forward": "ffn", "attention": "att", "embeddings": "emb", "pre_ln": "ln0"}
    names |= {f"time_mix_{name}": f"time_mix_{name[0]}" for name in ("key", "value", "receptance")}
    originals = {
        ".".join(names.get(part, part) for part in key.removeprefix("rwkv.").split(".")): value
        for key, value in weights.items()
    }
    torch.save(originals, tmp_path / "RWKV-4.pth")
    assert find_sizes(tmp_path / "RWKV-4.pth").num_parameters == find_sizes(GOLDEN / "rwkv").num_parameters
    assert find_sizes(tmp_path).name == str(tmp_path)


def test_a_folder_of_that_name_comes_before_the_table(tmp_path, monkeypatch, tiny):
    shutil.copytree(tiny, tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert read_config("gpt2")["vocab_size"] == 257
    assert read_config("gpt2-xl")["vocab_size"] == 50257


def test_an_unknown_name_is_refused_with_those_that_are_known(no_hub):
    names = "shapes known without files are gpt2, gpt2-medium, .*; did you mean 'gpt2-xl'"
    with pytest.raises(UserError, match=f"gtp2-xl: no local folder .*; {names}"):
        read_config("gtp2-xl")
    with pytest.raises(UserError, match=r"no_such/folder/here: no such file or folder .*; shapes known without files are gpt2"):
        read_config("no_such/folder/here")


def test_what_is_no_model():
    with pytest.raises(UserError, match="model=7: wanted a folder, a file, a name or a dict"):
        read_config(7)
    with pytest.raises(UnsupportedError, match="model_type='bert' is not supported"):
        find_sizes({"model_type": "bert"})


def test_settings_are_checked_as_session_checks_them():
    with pytest.raises(UserError, match="max_length=2000 is more than the model's 1024 positions"):
        find_sizes("gpt2", max_length=2000)
    with pytest.raises(UserError, match="batch_size=0: wanted a whole number of at least 1"):
        find_sizes("gpt2", batch_size=0)
    with pytest.raises(UnsupportedError, match="precision='fp12' is not supported"):
        find_sizes("gpt2", "fp12")
    with pytest.raises(UnsupportedError, match="kv_cache='bf16' is not supported: this model has no KV cache"):
        find_sizes("rwkv-4-169m", "fp16", kv_cache="bf16")
