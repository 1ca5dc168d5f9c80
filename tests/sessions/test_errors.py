"""Every error that Session gives."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY
from session_cases import DICT

from poptransformer import Session, UnsupportedError, UserError

NUMBERS = "wanted a whole number of at least 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp7"}, "precision='fp7' is not supported; this version has fp32, bf16, fp16"),
        ({"precision": ""}, "precision='' is not supported"),
        ({"precision": ["fp32"]}, "precision=['fp32'] is not supported"),
        ({"kv_cache": "int3"}, "kv_cache='int3' is not supported; this version has fp32, bf16, fp16, fp8, int8"),
        *[({"batch_size": value}, f"batch_size={value!r}: {NUMBERS}") for value in (0, -1, 2.0, "two", True, None)],
        *[({"max_length": value}, f"max_length={value!r}: {NUMBERS}") for value in (0, -1, 2.0, "two", True)],
        ({"max_length": 62}, "max_length=62 is more than the model's 61 positions; set at most 61"),
        ({"num_replicas": 0}, f"num_replicas=0: {NUMBERS}"),
        ({"layers_per_device": [1, 1]}, "layers_per_device=[1, 1] adds up to 2; the model has 3 layers"),
        ({"layers_per_device": []}, "layers_per_device=[]: wanted auto, or a list of layer counts"),
        ({"layers_per_device": [4, -1]}, "layers_per_device=[4, -1]: wanted auto, or a list of layer counts"),
        ({"layers_per_device": 3}, "layers_per_device=3: wanted auto, or a list of layer counts"),
        ({"layers_per_device": "all"}, "layers_per_device='all': wanted auto, or a list of layer counts"),
        ({"backend": "tf"}, "backend='tf' is not supported; this version has xla, reference"),
        ({"backend": None}, "backend=None is not supported"),
        ({"platform": "gameboy"}, "platform='gameboy' is unknown; choose one of auto, cpu, cuda, tpu"),
        ({"custom_ops": "maybe"}, "custom_ops='maybe': wanted true, false or auto"),
        ({"random_weights": "maybe"}, "random_weights='maybe': wanted true or false"),
        ({"execution_cache_dir": 5}, "execution_cache_dir=5: wanted a folder"),
    ],
)
def test_arguments_that_cannot_be_used(tiny, arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Session(tiny, **arguments)


@pytest.mark.parametrize("arguments", [{"precision": "int3"}, {"backend": "popart"}])
def test_what_is_not_built_yet(tiny, arguments):
    with pytest.raises(UnsupportedError):
        Session(tiny, **arguments)


@pytest.mark.parametrize("layers", [None, "auto", [3], (3,)])
def test_one_stage(tiny, layers):
    with Session(
        tiny, backend="reference", layers_per_device=layers, batch_size=np.int64(2), max_length=np.int32(20)
    ) as session:
        assert (session.batch_size, session.max_length) == (2, 20) and type(session.max_length) is int


def test_a_platform_that_is_not_there(tiny):
    import jax

    there = {device.platform for device in jax.local_devices()}
    for platform, name in (("cuda", "gpu"), ("tpu", "tpu")):
        if name not in there:
            wanted = f"platform='{platform}': JAX sees no such device here, only {', '.join(sorted(there))}"
            with pytest.raises(UserError, match=re.escape(wanted)):
                Session(tiny, platform=platform)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "model=None: wanted a folder, a file of weights, a hub name or a dict"),
        (5, "model=5: wanted a folder"),
        ("", "model is an empty string"),
        ("./nowhere", "./nowhere: no such file or folder"),
        (pathlib.Path("nowhere"), "nowhere: no such file or folder"),
        ({}, "config.json: model_type=None is not supported"),
        (DICT, "a model given as a dict: there are no weights; set random_weights: true"),
    ],
)
def test_models_that_cannot_be_opened(model, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Session(model)


def test_damaged_folders(tiny, tmp_path):
    with pytest.raises(UserError, match="no checkpoint: it has neither config.json nor model.safetensors"):
        Session(tmp_path)
    shutil.copy(tiny / "config.json", tmp_path)
    with pytest.raises(UserError, match="there are no weights; set random_weights: true to run without a checkpoint"):
        Session(tmp_path)
    weights = (tiny / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-1000])
    with pytest.raises(
        UserError, match=r"model\.safetensors: truncated: its header describes 203864 bytes, the file has 202864"
    ):
        Session(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        Session(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        Session(tmp_path)


def test_a_missing_shard(tiny, tmp_path):
    shutil.copy(tiny / "config.json", tmp_path)
    weight_map = {"transformer.wte.weight": "model-00001-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"1 of the 1 shards .* are missing: model-00001-of-00002\.safetensors"):
        Session(tmp_path)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "no prompts; give a string, a list of token ids, or a list of those"),
        (None, {}, "no prompts"),
        ((x for x in ([1], [2])), {}, "is no prompt; give a string"),
        ([257], {}, "prompt 0: token id 257 is outside the vocabulary of 257"),
        ([-1], {}, "prompt 0: token id -1 is outside the vocabulary of 257"),
        ([[1], [1.5]], {}, "prompt 1: wanted a string or whole numbers, not [1.5]"),
        (
            [[1] * 62, [2], [3] * 70],
            {},
            "prompt 0 has 62 tokens; prompt 2 has 70 tokens; max_length is 61: shorten the prompt or raise",
        ),
        ([1] * 61, {}, "prompt 0: 61 tokens fill max_length=61, which leaves no room for a new one"),
        ([1], {"temperature": float("nan")}, "temperature=nan: wanted a number of at least 0"),
        ([1], {"temperature": -0.5}, "temperature=-0.5: wanted a number of at least 0"),
        ([1], {"top_p": float("nan")}, "top_p=nan: wanted a number in (0, 1]"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0: wanted a whole number of at least 1"),
        ([1], {"topk": 5}, "unknown generation setting 'topk'; did you mean 'top_k'?"),
        ([[1], [2]], {"seed": [1, 2, 3]}, "seed: 3 values for 2 prompts; give one value, or one for each prompt"),
        ([[1], [2]], {"top_k": [1, -2]}, "prompt 1: top_k=-2: wanted a whole number of at least 0"),
        ([1], {"stop_token_ids": [257]}, "stop_token_ids: 257 is outside the vocabulary of 257"),
        ([1], {"stop_token_ids": range(70)}, "stop_token_ids: 71 with the model's own; at most 64 are supported"),
        ([1], {"stop": 5.5}, "stop=(5.5,): wanted strings that are not empty"),
    ],
)
def test_calls_that_cannot_be_used(tiny, monkeypatch, prompts, settings, message):
    """Refused before any device work."""
    with Session(tiny, backend="reference") as session:
        monkeypatch.setattr(session._engine, "load", lambda *_: pytest.fail("began to work"))
        with pytest.raises(UserError, match=re.escape(message)):
            session.generate(prompts, **settings)
        assert not session._engine.graphs


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_logits_that_are_not_finite(backend, tiny, monkeypatch):
    """They would come out as token 0 with log-probability NaN."""
    with Session(tiny, backend=backend, batch_size=2) as session:
        session.load()
        norm = next(parameter for parameter in session.model.parameters() if parameter.name.endswith("ln_f.weight"))
        places = session._engine._parameters[norm.name]  # by rank, or by stage
        places[0] = places[0] * np.nan
        with pytest.raises(UserError, match="prompt 0, 1: the model's logits are not finite"):
            session.generate([[1], [2]], max_new_tokens=3)


def test_a_forked_process_is_refused():
    """Without the check it would wait for ever; spawn works."""
    script = """
import multiprocessing, sys
from poptransformer import Session, UserError

config = dict(model_type="gpt2", vocab_size=50, n_embd=12, n_head=2, n_layer=2, n_positions=40)
session = Session(config, random_weights=True)
session.generate([1], max_new_tokens=2)

def child(queue):
    for call in (lambda: session.generate([1], max_new_tokens=2), lambda: Session(config, random_weights=True)):
        try:
            call()
        except UserError as error:
            queue.put(str(error))

context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=child, args=(queue,))
process.start()
print(queue.get(timeout=60), queue.get(timeout=60), sep="\\n")
process.join()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    message = "this process was forked after JAX was started and cannot run; use multiprocessing's spawn instead\n"
    assert done.stdout == message * 2, done.stderr


def test_a_cache_folder_that_cannot_be_written(tiny, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="execution_cache_dir=.*file.* cannot be written"):
        Session(tiny, execution_cache_dir=tmp_path / "file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with Session(tiny) as session:
        assert "compiled programs are not kept" in caplog.text
        assert session.generate([1], max_new_tokens=1)
