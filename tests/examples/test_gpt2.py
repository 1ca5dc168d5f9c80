"""examples/gpt2/inference.py as people run it: a process of its own, from two folders."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPOSITORY

pytest.importorskip("hydra", reason="needs hydra-core: pip install -r requirements.txt")

FOLDER = REPOSITORY / "examples" / "gpt2"
FEW = "model.max_new_tokens=8"


def run(*overrides, cwd=REPOSITORY, status=0):
    """Run the example; gives (standard output, standard error)."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, os.path.relpath(FOLDER / "inference.py", cwd), *overrides],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("cwd", [REPOSITORY, FOLDER], ids=["root", "folder"])
def test_overrides(cwd):
    before = set(cwd.iterdir())
    out, err = run("--config-name=sharding", "log_level=info", "model.topk=5", "model.seed=1", FEW, cwd=cwd)
    assert out.startswith("--- Once upon a time\n") and "\n--- The old man opened the box and\n" in out
    assert re.search(r"^decode +[\d.]+ ms/token over 1[0-6] tokens in 8 steps$", out, re.MULTILINE)
    for name in ("device", "custom ops", "precision", "batch size", "weights", "open", "load", "compile", "prefill", "read"):
        assert re.search(rf"^{name} +\S", out, re.MULTILINE), name
    assert re.search(r"^INFO poptransformer.sessions: compiled decode in [\d.]+ s$", err, re.MULTILINE)
    assert "Traceback" not in err
    assert set(cwd.iterdir()) - before <= {cwd / "__pycache__"}  # hydra leaves no folders behind


def test_more_overrides():
    out, _ = run(
        'inputs.prompts=["The old man opened the box and"]', "global_args.precision=bf16", "global_args.batch_size=4",
        "model.max_length=256", "model.temperature=0", "session.platform=cpu", FEW,
    )  # fmt: skip
    assert out.startswith("--- The old man opened the box and\n saw a")
    assert re.search(r"^precision +bf16, KV cache bfloat16$", out, re.MULTILINE)
    assert re.search(r"^batch size +4, up to 256 tokens a row$", out, re.MULTILINE)
    assert re.search(r"^device +cpu", out, re.MULTILINE)


def test_prompts_as_ids_or_alone():
    out, _ = run("inputs.prompts=[[709,259,500],[12]]", FEW)
    assert "--- [709, 259, 500]\n" in out and "--- [12]\n" in out
    out, _ = run("inputs.prompts=Once upon a time", FEW)
    assert out.startswith("--- Once upon a time\n, there was a")


def test_the_same_seed_gives_the_same_text():
    texts = [run("model.topk=5", "model.seed=7", FEW)[0].partition("\ndevice")[0] for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def truncated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truncated") / "model"
    shutil.copytree(FOLDER / "gpt2-pocket", folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1_000_000)
    return folder


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.topkk=5", "unknown config key 'model.topkk'; did you mean 'topk'?"),
        ("model.hf_model_name=examples/gpt2/gpt2-pockt", "gpt2-pockt: no such file or folder"),
        ("model.max_length=5", "prompt 1 has 7 tokens; max_length is 5: shorten the prompt or raise max_length"),
        ("log_level=nonsense", "log_level='nonsense': choose one of debug, info, warning, error"),
        ("global_args.precision=fp7", "precision='fp7' is not supported; this version has fp32, bf16, fp16"),
        ("global_args.precision=[fp32]", "precision=['fp32'] is not supported"),
        ("global_args.batch_size=two", "batch_size='two': wanted a whole number of at least 1"),
        ("model.temperature=warm", "temperature='warm': wanted a number of at least 0"),
        ("model.random_weights=maybe", "random_weights='maybe': wanted true or false"),
        ("inputs.prompts=5", "5 is no prompt; give a string"),
        ("inputs.prompts=[]", "no prompts; give a string"),
        ("global_args.num_replicas=two", "num_replicas='two': wanted a whole number of at least 1"),
        ("model.layers_per_device=[3,4]", "layers_per_device=[3, 4] adds up to 7; the model has 8 layers"),
        ("session.custom_ops=maybe", "custom_ops='maybe': wanted true, false or auto"),
    ],
)
def test_errors_are_one_line(override, message):
    out, err = run(override, status=1)
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert message in err


def test_truncated_weights_are_one_line(truncated):
    out, err = run(f"model.hf_model_name={truncated}", status=1)
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"error: {truncated}/model.safetensors: truncated: its header describes 15006272 bytes, the file has")
