"""From a model's name to its files: local paths, the hub's local cache, and a hub that runs inside the test."""

import http.server
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from poptransformer.checkpoint import Checkpoint, resolve_source
from poptransformer.checkpoint import source as source_module
from poptransformer.errors import UnsupportedError, UserError

ROOT = pathlib.Path(__file__).parents[2]
POCKET = ROOT / "examples" / "gpt2" / "gpt2-pocket"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

constants = pytest.importorskip("huggingface_hub.constants")


def put_in_cache(cache, name, **contents):
    """Lay out a snapshot as the hub's client does."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file, content in contents.items():
        (snapshot / file.replace("__", ".")).write_bytes(content)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder that the hub's client uses, offline."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def no_hub(monkeypatch):
    """Fail the test if the hub is asked at all."""
    monkeypatch.setattr(source_module, "_from_hub", lambda *_: pytest.fail("the hub was asked"))


# Local paths


def test_folder_and_file(no_hub, tmp_path, monkeypatch):
    assert resolve_source(str(POCKET)) == POCKET
    assert resolve_source(POCKET) == POCKET
    assert resolve_source(str(POCKET / "model.safetensors")) == POCKET / "model.safetensors"
    monkeypatch.chdir(POCKET.parent)
    assert resolve_source("gpt2-pocket") == pathlib.Path("gpt2-pocket")  # a folder comes before the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve_source("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("examples/gpt2/gpt2-poket", "examples/gpt2/gpt2-poket: no such file or folder; did you mean 'gpt2-pocket'?"),
        (
            "examples/gtp2/gpt2-pocket",
            "examples/gtp2/gpt2-pocket: no such file or folder (examples/gtp2 is not there); did you mean 'gpt2'?",
        ),
        ("examples/qqqq", "examples/qqqq: no such file or folder"),  # its first part exists
        ("./nothing", "./nothing: no such file or folder"),
        ("~/nothing-here", "~/nothing-here: no such file or folder"),
        ("/nothing/at/all", "/nothing/at/all: no such file or folder (/nothing is not there)"),
        ("a/b/c", "a/b/c: no such file or folder (a is not there)"),
        ("model.safetensors", "model.safetensors: no such file or folder"),
        ("rwkv.pth", "rwkv.pth: no such file or folder"),
        ("org/pytorch_model.bin", "org/pytorch_model.bin: no such file or folder (org is not there)"),
    ],
)
def test_missing_paths_are_not_asked_of_the_hub(no_hub, monkeypatch, text, message):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(message) + "($|; did you)"):
        resolve_source(text)


def test_a_missing_path_object_is_a_path(no_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="gpt2: no such file or folder"):
        resolve_source(pathlib.Path("gpt2"))


def test_files_of_other_kinds(no_hub, tmp_path):
    for name in ("tf_model.h5", "model.onnx"):
        (tmp_path / name).touch()
        with pytest.raises(UnsupportedError, match=rf"{name}: there is no reader for \.\w+ files; read are \.safetensors, "):
            resolve_source(tmp_path / name)
    for name in ("pytorch_model.bin", "rwkv.pth", "model.pt", "x.safetensors"):
        (tmp_path / name).touch()
        assert resolve_source(tmp_path / name) == tmp_path / name
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        UserError, match=r"notes.txt is a file but not a checkpoint; give its folder, or a \.safetensors, .* or \.\w+ file"
    ):
        resolve_source(tmp_path / "notes.txt")


@pytest.mark.parametrize("text", ["what is this", "org/näme", "-x", "org/", "a:b"])
def test_no_name_at_all(no_hub, text):
    with pytest.raises(UserError, match="is neither a local path nor a hub name"):
        resolve_source(text)


def test_empty(no_hub):
    with pytest.raises(UserError, match="model is an empty string; give a folder"):
        resolve_source("")


def test_paths_that_cannot_be_looked_up(no_hub, tmp_path, monkeypatch):
    for text in ("x" * 256, "./" + "x" * 1000, "org/" + "x" * 5000):
        with pytest.raises(UserError, match=r"^\S{256,400}.*: cannot be looked up \(File name too long\)$"):
            resolve_source(text)
    with pytest.raises(UserError, match="~nosuchuser/x: ~nosuchuser has no home folder here; give the path in full"):
        resolve_source("~nosuchuser/x")
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(UserError, match="model.safetensors: is a link to gone, which is not there"):
        resolve_source(tmp_path / "model.safetensors")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "is_dir", refuse)
    with pytest.raises(UserError, match=r"parent/model: cannot be looked up \(Permission denied\)"):
        resolve_source("parent/model")


# The local cache, without network


@pytest.mark.parametrize("name", ["gpt2-xl", "org/gpt2.small_1"])
def test_offline_from_the_cache(cache, name):
    snapshot = put_in_cache(cache, name, config__json=b"{}", model__safetensors=b"")
    assert resolve_source(name) == snapshot


def test_offline_in_a_new_process(tmp_path):
    snapshot = put_in_cache(
        tmp_path / "hub",
        "org/pocket",
        config__json=(POCKET / "config.json").read_bytes(),
        model__safetensors=(POCKET / "model.safetensors").read_bytes(),
    )
    code = (
        "from poptransformer.checkpoint import Checkpoint; c = Checkpoint.open('org/pocket');"
        f"assert str(c.path) == {str(snapshot)!r} and c.has_weights and c.config['n_layer'] == 8"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)


def test_offline_and_not_in_the_cache(cache):
    with pytest.raises(
        UserError,
        match="gpt2-xl: no local folder of that name, nothing in the local hub cache, and HF_HUB_OFFLINE is set; unset",
    ):
        resolve_source("gpt2-xl")


def test_offline_with_configuration_only(cache):
    snapshot = put_in_cache(cache, "gpt2-xl", config__json=b"{}")
    with pytest.raises(UserError, match="gpt2-xl: the local hub cache has its configuration but no weights to read, and HF"):
        resolve_source("gpt2-xl")
    assert resolve_source("gpt2-xl", weights=False) == snapshot
    (snapshot / "training_args.bin").touch()
    with pytest.raises(UserError, match="has its configuration but no weights to read"):
        resolve_source("gpt2-xl")
    (snapshot / "pytorch_model.bin").touch()
    assert resolve_source("gpt2-xl") == snapshot


# A hub on this machine


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what the hub's client asks for a model: its files, and each file."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, _, _ = self.path.partition("?")
        files = self.server.files
        self.server.asked.append(path)
        if path.startswith("/api/models/org/model/revision") or path == "/api/models/org/model":
            return self.answer_json({"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        if path.startswith("/api/models/org/model/tree"):
            return self.answer_json(
                [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
            )
        name = path.rpartition(f"/resolve/{COMMIT}/")[2].replace("%2E", ".")
        if path.startswith("/org/model/resolve/") and name in files:
            return self.answer(files[name], ETag=f'"{name}"', **{"X-Repo-Commit": COMMIT})
        return self.answer(b"{}", code=404, **{"X-Error-Code": "RepoNotFound"})

    def answer_json(self, value):
        self.answer(json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def answer(self, body, code=200, **headers):
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub without files; its cache folder is empty too."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.files, server.asked = {}, []
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        use_hub(monkeypatch, tmp_path / "hub", server.server_port)
        yield server
        server.shutdown()


def use_hub(monkeypatch, cache, port):
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def fetched(hub):
    return {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}


def test_fetches_what_the_model_needs(hub):
    weights = (POCKET / "model.safetensors").read_bytes()
    small = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    hub.files = {name: (POCKET / name).read_bytes() for name in small}
    useless = ("pytorch_model.bin", "tf_model.h5", "README.md", "model.onnx", "fp16.safetensors", "onnx/config.json")
    hub.files |= {"model.safetensors": weights, **dict.fromkeys(useless, b"x")}
    assert set(os.listdir(resolve_source("org/model", weights=False))) == set(small)
    checkpoint = Checkpoint.open("org/model")
    assert checkpoint.has_weights and checkpoint.config["n_layer"] == 8
    assert fetched(hub) == {*small, "model.safetensors"}


def test_fetches_the_shards_that_the_index_lists(hub):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    hub.files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    hub.files |= dict.fromkeys({*index["weight_map"].values(), "consolidated.safetensors"}, b"x")
    folder = resolve_source("org/model")
    assert set(os.listdir(folder)) == set(hub.files) - {"consolidated.safetensors"}


def test_broken_index_of_the_hub(hub):
    hub.files = {"config.json": b"{}", "model.safetensors.index.json": b"[]", "model-1.safetensors": b"x"}
    with pytest.raises(UserError, match="model.safetensors.index.json: a JSON object is wanted, this is a list"):
        Checkpoint.open("org/model")


def test_hub_with_other_formats_only(hub):
    hub.files = {"config.json": b"{}", "tf_model.h5": b"x", "training_args.bin": b"x"}
    with pytest.raises(UnsupportedError, match=r"org/model: the hub has its weights only as \.h5; read are \.safetensors, "):
        resolve_source("org/model")
    assert not fetched(hub)


def test_fetches_a_pickle_where_there_are_no_safetensors(hub):
    useless = ("tf_model.h5", "training_args.bin", "optimizer.pt", "rng_state.pth", "other.bin", "onnx/model.bin")
    hub.files = {name: b"x" for name in ("pytorch_model.bin", "ice_text.model", "tokenizer.model", "config.json", *useless)}
    assert set(os.listdir(resolve_source("org/model"))) == set(hub.files) - {*useless}


def test_fetches_the_pickle_shards_that_the_index_lists(hub):
    index = {"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}}
    hub.files = {"config.json": b"{}", "pytorch_model.bin.index.json": b"\xef\xbb\xbf" + json.dumps(index).encode()}
    hub.files |= dict.fromkeys({*index["weight_map"].values(), "training_args.bin", "other.bin"}, b"x")
    folder = resolve_source("org/model")
    assert set(os.listdir(folder)) == set(hub.files) - {"training_args.bin", "other.bin"}


def test_hub_with_one_pickle_of_another_name(hub):
    hub.files = {"config.json": b"{}", "RWKV-4-Pile-169M.pth": b"x", "README.md": b"x"}
    assert set(os.listdir(resolve_source("org/model"))) == {"config.json", "RWKV-4-Pile-169M.pth"}


def test_hub_with_several_pickles(hub):
    hub.files = {"config.json": b"{}", "ctx1024.pth": b"x", "ctx4096.pth": b"x"}
    with pytest.raises(
        UserError,
        match=r"org/model: the hub has ctx1024.pth, ctx4096.pth, and nothing that says which of them belong together; fetch "
        "the one to run, put its config.json beside it, and give the file as the model",
    ):
        resolve_source("org/model")
    assert not fetched(hub)


def test_hub_without_a_model(hub):
    hub.files = {"README.md": b"x"}
    with pytest.raises(UserError, match="org/model: the hub has no config.json and no weights to read under that name"):
        resolve_source("org/model")


def test_hub_does_not_know_the_name(hub):
    with pytest.raises(UserError, match="org/other: no local folder of that name.* the hub has no public model of that"):
        resolve_source("org/other")


def test_a_fetch_that_stops(hub, monkeypatch):
    hub.files = {"config.json": b"{}"}

    def stop(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("huggingface_hub.snapshot_download", stop)
    with pytest.raises(UserError, match=r"org/model: fetching it from the hub stopped \(.*disk full\)"):
        resolve_source("org/model")


def test_hub_refuses_connections(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    use_hub(monkeypatch, tmp_path / "hub", port)
    with pytest.raises(
        UserError,
        match=r"gpt2-xl: no local folder of that name, nothing in the local hub cache, and the hub cannot be reached "
        r"\(.+\); check the network, or give a local folder",
    ):
        resolve_source("gpt2-xl")
    snapshot = put_in_cache(tmp_path / "hub", "gpt2-xl", config__json=b"{}", model__safetensors=b"")
    assert resolve_source("gpt2-xl") == snapshot


def test_hub_that_never_answers_is_given_up_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "HUB_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_hub(monkeypatch, tmp_path / "hub", silent.getsockname()[1])
        start = time.monotonic()
        with pytest.raises(UserError, match="the hub cannot be reached"):
            resolve_source("gpt2-xl")
        assert time.monotonic() - start < 3


def test_an_address_lookup_that_hangs_is_given_up_soon(cache, monkeypatch):
    monkeypatch.setattr(source_module, "HUB_TIMEOUT_S", 0.1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    done = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: done.wait())
    with pytest.raises(UserError, match=r"the hub cannot be reached \(TimeoutError: no answer in 0.1 s\)"):
        resolve_source("gpt2-xl")
    done.set()
