"""Files of torch.save where torch cannot be imported: a process of its own reads them and generates from them."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY
from tolerance import assert_close

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "gpt2.json").read_text(encoding="utf-8"))

PROGRAM = """
import json, sys
sys.modules["torch"] = None  # importing it now raises ImportError
from poptransformer import Session
request = json.load(sys.stdin)
with Session(request["folder"]) as session:
    logits = [session.logits(prompt).tolist() for prompt in request["prompts"]]
    ids = [out.token_ids for out in session.generate(request["prompts"], **request["settings"])]
json.dump({"logits": logits, "ids": ids, "torch": [name for name in sys.modules if name.startswith("torch.")]}, sys.stdout)
"""


@pytest.fixture
def folder(tiny, tmp_path):
    """The tiny GPT-2 in two files of torch.save, one of each layout, as models saved long ago have it."""
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    tensors = load_file(tiny / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]  # tied: one storage, two names
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 61, 61, dtype=torch.bool).tril()  # a mask
    name = "transformer.h.1.mlp.c_fc.weight"
    tensors[name] = tensors[name].T.contiguous().T  # a view in another order
    parts = {"pytorch_model-00001-of-00002.bin": {}, "pytorch_model-00002-of-00002.bin": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        list(parts.values())[i % 2][name] = tensor
    for is_zip, (file, part) in enumerate(parts.items()):
        torch.save(part, tmp_path / file, _use_new_zipfile_serialization=bool(is_zip))
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shutil.copy(tiny / "config.json", tmp_path)
    return tmp_path


def test_a_session_without_torch(folder):
    cases = GOLDEN["gpt2-tiny"]["cases"]
    length = min(len(case["greedy"]) for case in cases)
    settings = {"max_new_tokens": length, "top_k": 1, "ignore_eos": True}
    request = {"folder": str(folder), "prompts": [case["prompt"] for case in cases], "settings": settings}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(request), capture_output=True, text=True, cwd=REPOSITORY
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["torch"] == []
    assert answer["ids"] == [case["greedy"][:length] for case in cases]
    for case, logits in zip(cases, answer["logits"], strict=True):
        got = np.float32(logits)[case["positions"]][:, case["tokens"]]
        assert_close(got, np.float32(case["logits"]), rtol=1e-5, atol=3e-5)  # as for the safetensors, see test_gpt2
