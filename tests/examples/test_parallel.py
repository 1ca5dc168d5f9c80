"""examples/gpt2/inference.py over several devices as people run it: a process of its own, which makes its virtual devices."""

import os
import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

pytest.importorskip("hydra", reason="needs hydra-core: pip install -r requirements.txt")

PROMPTS = ["Once upon a time", "The old man opened the box and"]
# Command line -> what the report says of the devices, and how the plan's table begins.
COMMANDS = {
    ("--config-name=tp", "global_args.num_replicas=4", "model.topk=5"): (
        r"4 tensor-parallel ranks: 4 virtual devices on one ", ["embedding, 0-7, head"],
    ),
    ("--config-name=sharding", "session.devices=2", "model.layers_per_device=auto"): (
        r"2 stages: 2 virtual devices on one ", [r"embedding, 0-3", r"4-7, head"],
    ),
}  # fmt: skip


def run(*arguments):
    """Run the example on the CPU; gives (standard output, standard error)."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "examples/gpt2/inference.py", *arguments, "session.platform=cpu", "model.max_new_tokens=8"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def text():
    """What one device says: same prompts, same seed."""
    out, _ = run("--config-name=sharding", "model.topk=5")
    return out.partition("\ndevice ")[0]


@pytest.mark.parametrize("command", COMMANDS, ids=["tp", "sharding"])
def test_same_text_as_one_device(command, text):
    out, err = run(*command, "log_level=info")
    assert out.partition("\ndevice ")[0] == text and all(f"--- {prompt}\n" in out for prompt in PROMPTS)
    name, holds = COMMANDS[command]
    assert re.search(rf"^device +cpu, {name}", out, re.MULTILINE), out
    lines = out.strip().split("\n\n")[-1].splitlines()
    assert re.match(r"(stage|device) +layers +weights +KV cache ", lines[0])
    for index, (what, line) in enumerate(zip(holds, lines[1:], strict=True)):
        assert re.fullmatch(rf"{index} +{what} +[\d.]+ MB .* \d+ %", line), line
    assert err.index("the plan:\n") < err.index("loaded the weights")
