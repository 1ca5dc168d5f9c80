"""One engine in a process of its own that stays up: what its side and the benchmark's side of the pipe share.

An engine's module has a class with `generate(prompts, num_new)` and ends with `serve(Class)`; `python -m benchmarks.peers.NAME`
then answers requests, one JSON line each, until its input ends:

    {"model": path, "precision": ..., "threads": ..., "batch_size": ..., "max_length": ..., "options": {...}}     the first one
    {"prompts": [[id, ...], ...], "num_new": n}  ->  {"seconds": s, "tokens": [[id, ...], ...], "peak_mb": ...}

Needs the standard library alone, since it runs in the environments of others.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import traceback


def serve(engine_class):
    """Answer requests with an engine until the input ends. Whatever the engine itself prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            begin = time.perf_counter()
            if engine is None:
                engine, tokens = engine_class(**request), []
            else:
                tokens = engine.generate(request["prompts"], request["num_new"])
            seconds = time.perf_counter() - begin
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            answer = {"seconds": seconds, "tokens": tokens, "peak_mb": peak_mb}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


class EngineError(Exception):
    """An engine that cannot be had, or failed; in words."""


class RemoteEngine:
    """An engine in another process.

    Args:
      python: interpreter of the environment that has it.
      name: its module in benchmarks.peers.
      root: the checkout.
      arguments: of the engine's class.
    Raises: EngineError if it does not start.
    """

    def __init__(self, python, name, root, **arguments):
        environment = os.environ | {
            "PYTHONPATH": str(root),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(arguments["threads"]),
        }
        command = [str(python), "-m", f"benchmarks.peers.{name}"]
        self.log = open(os.devnull, "w") if not os.environ.get("PEERS_LOG") else open(os.environ["PEERS_LOG"], "a")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment, cwd=root
        )
        self.load_s = self._ask(arguments)["seconds"]
        self.peak_mb = 0.0

    def seconds(self, prompts, num_new):
        """Time of generating num_new tokens after each prompt, greedily.

        Raises: EngineError if it fails, or gives another number of tokens.
        """
        answer = self._ask({"prompts": prompts, "num_new": num_new})
        counts = [len(tokens) for tokens in answer["tokens"]]
        if counts != [num_new] * len(prompts):
            raise EngineError(f"gave {counts} tokens, not {num_new} each")
        self.peak_mb = answer["peak_mb"]
        return answer["seconds"]

    def close(self):
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.log.close()

    def _ask(self, request):
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            raise EngineError(f"its process is gone: {error}") from None
        if not line:
            raise EngineError(f"its process ended with status {self._process.wait(20)}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer
