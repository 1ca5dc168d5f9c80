"""Every family's examples/<family>/inference.py with a tiny checkpoint: the scripts as they are, all in this process."""

import json
import logging
import os
import re
import runpy
import sys

import pytest
from conftest import REPOSITORY

from poptransformer import Session
from poptransformer.report import transcript

pytest.importorskip("hydra", reason="needs hydra-core: pip install -r requirements.txt")

GOLDEN = REPOSITORY / "tests" / "golden"
# Family -> its tiny checkpoint in tests/golden. GLM-4 has none there, see test_glm.
CHECKPOINTS = {
    "bloom": "bloom",
    "chatglm": "chatglm6b",
    "chatglm2": "chatglm2",
    "chatglm3": "chatglm3",
    "gemma": "gemma",
    "gpt_neox": "gpt_neox",
    "llama": "llama",
    "mistral": "mistral",
    "opt": "opt",
    "phi": "phi",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "rwkv": "rwkv",
}
WITH_MODEL = {"gpt2"}  # runs without any argument: tests/examples/test_gpt2.py
PROMPTS = ["Once upon a time", "The old man opened the box and"]
NUM_NEW = 5
SHORT = ["session.backend=reference", f"model.max_new_tokens={NUM_NEW}", "model.max_length=60", "model.ignore_eos=true"]


@pytest.fixture(autouse=True)
def settings_of_the_process(monkeypatch):
    """Put back what a script that runs as a program changes: arguments, logging."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    root, own = logging.getLogger(), logging.getLogger("poptransformer")
    handlers, levels = root.handlers[:], (root.level, own.level)
    root.handlers[:] = []  # the script closes those that it finds
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def run(family, *overrides, config="sharding"):
    """Run the example as `python examples/<family>/inference.py --config-name=sharding ...` does."""
    path = REPOSITORY / "examples" / family / "inference.py"
    sys.argv = [os.path.relpath(path), f"--config-name={config}", *overrides]
    runpy.run_path(sys.argv[0], run_name="__main__")


def folders(name):
    return {path.name for path in (REPOSITORY / name).iterdir() if path.is_dir()}


def test_no_family_is_left_out():
    assert folders("examples") == folders("configs") == {*CHECKPOINTS, "glm"} | WITH_MODEL


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_text(family, monkeypatch, capsys):
    """The prompts of the family's config, from the repository's root and from the example's folder."""
    checkpoint = GOLDEN / CHECKPOINTS[family]
    with Session(checkpoint, backend="reference", batch_size=2, max_length=60) as session:
        generations = session.generate(PROMPTS, max_new_tokens=NUM_NEW, ignore_eos=True)
        assert [len(each.token_ids) for each in generations] == [NUM_NEW] * 2
    for cwd in (REPOSITORY, REPOSITORY / "examples" / family):
        monkeypatch.chdir(cwd)
        run(family, f"model.hf_model_name={os.path.relpath(checkpoint)}", *SHORT)
        out, err = capsys.readouterr()
        assert out.startswith(transcript(PROMPTS, generations)), out
        assert re.search(r"^batch size +2, up to 60 tokens a row$", out, re.MULTILINE)
        assert re.search(rf"^decode +[\d.]+ ms/token over {2 * NUM_NEW} tokens in {NUM_NEW} steps$", out, re.MULTILINE)
        assert err == ""


@pytest.mark.parametrize("family", CHECKPOINTS)  # GPT-2's: tests/examples/test_parallel.py
def test_tensor_parallel(family, capsys):
    """Its tp.yaml runs on two ranks, which say what one device says."""
    texts = []
    for config in ("sharding", "tp"):
        model = f"model.hf_model_name={GOLDEN / CHECKPOINTS[family]}"
        run(family, model, *SHORT, "model.max_new_tokens=3", config=config)
        out, err = capsys.readouterr()
        texts.append(out.partition("\ndevice ")[0])
        assert ("on each of 2 ranks" in out) == (config == "tp") and err == ""
    assert texts[0] == texts[1] and texts[0].count("---") == 2


def test_glm(tmp_path, capsys):
    """GLM-4 with random weights and without a tokenizer."""
    config = {
        "model_type": "glm", "vocab_size": 131, "hidden_size": 30, "intermediate_size": 43, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 61,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    run("glm", f"model.hf_model_name={tmp_path}", "model.random_weights=true", "inputs.prompts=[[7],[3,1,4]]", *SHORT)
    out, err = capsys.readouterr()
    assert re.match(r"--- \[7\]\n\[\d+(, \d+){4}\]\n\n--- \[3, 1, 4\]\n\[\d+(, \d+){4}\]\n\ndevice ", out), out
    assert err == ""


@pytest.mark.parametrize("family", sorted(folders("examples") - WITH_MODEL))
def test_a_model_is_wanted(family, capsys):
    with pytest.raises(SystemExit) as end:
        run(family)
    assert end.value.code == 1
    out, err = capsys.readouterr()
    assert out == "" and err == "error: config key 'model.hf_model_name' has no value; set model.hf_model_name=...\n"


@pytest.mark.parametrize("family", sorted(folders("examples")))
def test_its_docstring_names_it(family):
    """The command in a script's first line is its own, and the family's model is the one that its config speaks of."""
    script = (REPOSITORY / "examples" / family / "inference.py").read_text()
    config = (REPOSITORY / "configs" / family / "sharding.yaml").read_text()
    command = re.match(rf'""".*: python examples/{family}/inference\.py (.+)"""\n', script)
    assert command, script
    if family not in WITH_MODEL:
        hub_name = command[1].removeprefix("model.hf_model_name=")
        assert config.count(f"hub: {hub_name}\n") == 1
