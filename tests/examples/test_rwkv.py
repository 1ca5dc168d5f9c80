"""examples/rwkv/inference.py as people run it: a process of its own."""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

pytest.importorskip("hydra", reason="needs hydra-core: pip install -r requirements.txt")


def run(*overrides, status=0):
    """Run the example; gives (standard output, standard error)."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "examples/rwkv/inference.py", "--config-name=sharding", *overrides],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_text_of_random_weights():
    """The tiny checkpoint takes bytes for tokens; what it has to say makes no sense."""
    out, err = run("model.hf_model_name=tests/golden/rwkv", "model.max_new_tokens=5", "model.max_length=100")
    assert out.startswith("--- Once upon a time\n") and "\n--- The old man opened the box and\n" in out
    assert re.search(r"^precision +fp32, recurrent state float32$", out, re.MULTILINE)
    assert re.search(r"^batch size +2, up to 100 tokens a row$", out, re.MULTILINE)
    assert "Traceback" not in err


def test_a_model_is_wanted():
    out, err = run(status=1)
    assert out == "" and err == "error: config key 'model.hf_model_name' has no value; set model.hf_model_name=...\n"
