"""Several processes on this machine, each with devices of its own, joined by JAX: the same tokens as one process."""

import json
import os
import socket
import subprocess
import sys

import pytest

from poptransformer import Session
from poptransformer.backends.xla.cluster import Command, check_distributed
from poptransformer.errors import UserError
from tests.conftest import REPOSITORY

PROGRAM = """
import json, sys
from poptransformer import Session
from poptransformer.errors import UserError

distributed, arguments, prompts, settings = map(json.loads, sys.argv[1:])
try:
    with Session(platform="cpu", execution_cache_dir="", distributed=distributed, **arguments) as session:
        if session.leads:
            results = session.generate(prompts, **settings)
            print(json.dumps([result.token_ids for result in results]))
            pieces = [piece.token_ids for piece in session.stream(prompts[0], **settings)]
            print(json.dumps([sum(pieces, [])]))
        else:
            try:
                session.generate(prompts)
            except UserError as error:
                print(error)
            session.follow()
            print("followed")
except UserError as error:
    sys.exit(f"error: {error}")
"""
PROMPTS = [[5, 6, 7, 8], [9, 10]]
SETTINGS = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.8, "top_k": 5, "seed": 3}


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def run_processes(*arguments):
    """Run PROGRAM in a process for each dict of Session arguments; returns (exit status, stdout, stderr) of each."""
    port = free_port()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY), "POPTRANSFORMER_NUM_THREADS": "1"}
    processes = []
    for i, session in enumerate(arguments):
        distributed = {"coordinator": f"localhost:{port}", "num_processes": len(arguments), "process_id": i, "timeout_s": 60}
        words = map(json.dumps, (distributed, session, PROMPTS, SETTINGS))
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words],
                env=environment,
                cwd=REPOSITORY,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )  # fmt: skip
        )
    outputs = [process.communicate(timeout=180) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def one_process(tiny):
    with Session(tiny, platform="cpu", batch_size=2, execution_cache_dir="") as session:
        return [result.token_ids for result in session.generate(PROMPTS, **SETTINGS)]


@pytest.mark.parametrize("more", [{"num_replicas": 2}, {"num_replicas": 2, "devices": 4, "layers_per_device": "auto"}])
def test_two_processes(tiny, one_process, more):
    """Ranks in two processes; the second time each has a rank of both stages."""
    arguments = {"model": str(tiny), "batch_size": 2} | more
    (status, lead, lead_errors), (follow_status, follow, follow_errors) = run_processes(arguments, arguments)
    assert status == follow_status == 0, lead_errors + follow_errors
    lines = [json.loads(line) for line in lead.splitlines() if line.startswith("[[")]
    assert lines == [one_process, one_process[:1]]
    said = [line for line in follow.splitlines() if not line.startswith("[Gloo]")]  # what XLA's collectives print
    assert said == ["process 0 leads this Session; here only follow() can be called", "followed"]


def test_a_failure_ends_all_with_its_error(tiny, tmp_path):
    """The second process has a damaged file."""
    for path in tiny.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[:-100] if path.suffix == ".safetensors" else data)
    good, bad = ({"model": str(path), "num_replicas": 2, "batch_size": 2} for path in (tiny, tmp_path))
    (status, _, errors), (other_status, _, other_errors) = run_processes(good, bad)
    assert status == other_status == 1
    assert f"error: process 1 of 2: {tmp_path}/model.safetensors: truncated" in errors
    assert f"error: {tmp_path}/model.safetensors: truncated" in other_errors


def test_too_few_ranks(tiny):
    arguments = {"model": str(tiny), "num_replicas": 3}
    for status, _, errors in run_processes(arguments, arguments):
        assert status == 1 and "num_replicas=3 cannot be spread over 2 processes; set a multiple of 2" in errors


def test_a_session_that_leads_does_not_follow(tiny):
    with Session(tiny, backend="reference") as session:
        assert session.leads
        with pytest.raises(UserError, match="this process leads"):
            session.follow()


def test_commands_come_back_as_they_were():
    import numpy as np

    command = Command("run", "prefill_16", {"ids": np.arange(6, dtype=np.int32).reshape(2, 3), "fresh": np.array([True])})
    back = Command.from_bytes(command.to_bytes())
    assert (back.word, back.name, list(back.inputs)) == ("run", "prefill_16", ["ids", "fresh"])
    assert all(np.array_equal(back.inputs[key], array) and back.inputs[key].dtype == array.dtype
               for key, array in command.inputs.items())  # fmt: skip


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("automatic", "distributed='automatic': wanted auto, or a dict of coordinator, num_processes, process_id, timeout_s"),
        ({"coordinator": "host:1"}, "num_processes, process_id missing beside coordinator"),
        ({"coordinator": "host", "num_processes": 2, "process_id": 0}, "coordinator='host': wanted host:port"),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 2}, "process_id=2 is not below num_processes=2"),
        ({"coordinator": "h:1", "num_processes": 0, "process_id": -1}, "num_processes=0: wanted a whole number of at least 1; "
         "process_id=-1: wanted a whole number of at least 0"),
        ({"rank": 1}, "unknown key 'rank'"),
    ],
)  # fmt: skip
def test_bad_values(value, message):
    with pytest.raises(UserError) as caught:
        check_distributed(value)
    assert message in str(caught.value)


def test_only_xla(tiny):
    with pytest.raises(UserError, match="distributed goes with backend xla, not with 'reference'"):
        Session(tiny, backend="reference", distributed="auto")
