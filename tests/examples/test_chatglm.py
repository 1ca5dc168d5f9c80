"""The examples of the ChatGLM families as people run them: processes of their own, over tiny checkpoints with tokenizers."""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

pytest.importorskip("hydra", reason="needs hydra-core: pip install -r requirements.txt")
pytest.importorskip("sentencepiece", reason="needs sentencepiece: pip install -r requirements.txt")


def run(family, *overrides, status=0):
    """Run an example; gives (standard output, standard error)."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, f"examples/{family}/inference.py", "--config-name=sharding", *overrides],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("family", "checkpoint", "max_length"),
    [
        ("chatglm", "chatglm6b", 251),
        ("chatglm", "chatglm6b_bin", 251),
        ("chatglm2", "chatglm2", 257),
        ("chatglm3", "chatglm3", 263),
    ],
)
def test_text_of_random_weights(family, checkpoint, max_length):
    """What they have to say makes no sense."""
    model = f"model.hf_model_name=tests/golden/{checkpoint}"
    out, err = run(family, model, "model.max_new_tokens=5", "session.backend=reference")
    assert out.startswith("--- Once upon a time\n") and "\n--- The old man opened the box and\n" in out
    assert re.search(rf"^batch size +2, up to {max_length} tokens a row$", out, re.MULTILINE)
    assert "Traceback" not in err


def test_glm_wants_a_model():
    out, err = run("glm", status=1)
    assert out == "" and err == "error: config key 'model.hf_model_name' has no value; set model.hf_model_name=...\n"
