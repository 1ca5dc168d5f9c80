"""examples/llama/inference.py as people run it: a process of its own."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from chat_cases import write_folder
from conftest import REPOSITORY

from poptransformer.checkpoint import fetch

pytest.importorskip("hydra", reason="needs hydra-core: pip install -r requirements.txt")

TINY = "model.hf_model_name=tests/golden/llama"
BARE = "model.hf_model_name=tests/golden/gpt2"  # has no tokenizer
SMOLLM2 = fetch.find("smollm2")  # while tests are collected: later on they have a cache folder of their own


def run(*overrides, status=0):
    """Run the example; gives (standard output, standard error)."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "examples/llama/inference.py", *overrides],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_token_ids(tmp_path):
    """A checkpoint without a tokenizer; the numbers are those of tests/golden/llama.json."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(REPOSITORY / "tests" / "golden" / "llama" / name, tmp_path)
    out, err = run(
        "--config-name=sharding",
        f"model.hf_model_name={tmp_path}",
        "inputs.prompts=[[7],[262,0,260]]",
        "model.max_new_tokens=5",
    )
    assert re.match(r"--- \[7\]\n\[1, 60, 132, 14, 148\]\n\n--- \[262, 0, 260\]\n\[193, 219, 145, 250, 246\]\n", out), out
    assert re.search(r"^batch size +2, up to 67 tokens a row$", out, re.MULTILINE)
    assert "Traceback" not in err


def test_a_chat(tmp_path):
    write_folder("byte_level", tmp_path)
    config = json.loads((REPOSITORY / "tests" / "golden" / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 280}))
    chat = "inputs.chat=[{role: user, content: Hi},{role: assistant, content: Ho},{role: user, content: Why?}]"
    options = [f"model.hf_model_name={tmp_path}", "model.random_weights=true", "session.backend=reference", "model.seed=1"]
    out, _ = run(*options, chat, "model.max_new_tokens=3", "model.ignore_eos=true")
    assert re.match(r"--- Why\?\n(.*\n)+?\ndevice +numpy", out), out
    assert re.search(r"^decode +[\d.]+ ms/token over 3 tokens in 3 steps$", out, re.MULTILINE)
    _, err = run(*options, "inputs.chat=[{role: usr, content: Hi}]", status=1)
    assert err == "error: message 0: unknown role 'usr'; did you mean 'user'?; roles: system, user, assistant\n"


@pytest.mark.skipif(SMOLLM2 is None, reason=f"smollm2 is not fetched: {fetch.how_to_fetch('smollm2')}")
def test_smollm2():
    """The config's own question to the chat model, the beginning of the answer."""
    settings = "model.max_length=64", "model.max_new_tokens=12"
    out, err = run("--config-name=smollm2", f"model.hf_model_name={SMOLLM2}", *settings)
    assert out.startswith("--- Why is the sky blue?\nThe answer to this question lies in the intricate dance of light\n"), out
    assert "weights     538.1 MB read per token" in out and "Traceback" not in err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--config-name=smollm2"], "smollm2: is not fetched yet; run `python -m poptransformer.checkpoint.fetch smollm2`"),
        ([], "config key 'model.hf_model_name' has no value; set model.hf_model_name=..."),
        ([TINY, "inputs.prompts=[[7]]", "model.max_length=68"], "max_length=68 is more than the model's 67 positions; set at"),
        ([BARE], "the checkpoint has no tokenizer"),
        ([TINY, "inputs.chat=Hello"], "tests/golden/llama: the model has no chat template; put chat_template into its"),
        ([BARE, "inputs.chat=Hello"], "chat needs a tokenizer and the checkpoint has none; put its tokenizer.json or"),
    ],
)
def test_errors_are_one_line(overrides, message):
    out, err = run(*overrides, status=1)
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert message in err
