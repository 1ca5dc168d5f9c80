"""Several processes, on one host or many, as one cluster of devices.

Process 0 leads: it alone tokenises and answers callers. What its engine does is told to the others through the key-value store
of JAX's coordination service, and they do the same on their devices, command by command. Collectives between the devices then
meet. Nothing is sent that Python would execute: a command is a word, a graph's name and arrays.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import io
import json
import logging
import os
import sys
import threading
import time

import jax
import numpy as np

from poptransformer.backends.xla.roll_call import roll_call
from poptransformer.errors import UserError

logger = logging.getLogger(__name__)

KEYS = ("coordinator", "num_processes", "process_id", "timeout_s")
DEFAULT_TIMEOUT_S = 120
HEARTBEAT_S = 20  # a process that is silent for so long counts as dead, and ends the others
POLL_S = 5  # of a follower that waits for a command
WATCH_S = 1  # between two looks for a failure of another process
KEPT_COMMANDS = 64  # commands that stay in the store; followers are never so far behind
PREFIX = "poptransformer"

_cluster = None
_num_channels = 0
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Command:
    """What the leader's engine does: a word, the graph's name where there is one, and its inputs."""

    word: str
    name: str = ""
    inputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        np.savez(file, **self.inputs)
        head = json.dumps([self.word, self.name]).encode()
        return len(head).to_bytes(4, "little") + head + file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Command:
        size = int.from_bytes(data[:4], "little")
        word, name = json.loads(data[4 : 4 + size])
        with np.load(io.BytesIO(data[4 + size :]), allow_pickle=False) as arrays:
            return cls(word, name, {key: arrays[key] for key in arrays})


class Cluster:
    """The processes that JAX has joined; one a process.

    Attributes:
      index, size: this process's number, and how many there are.
    """

    def __init__(self, client, index, size):
        self.client, self.index, self.size = client, index, size
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="poptransformer-cluster", daemon=True)
        self._watcher.start()
        atexit.register(self._stop_watching)

    @property
    def leads(self) -> bool:
        return self.index == 0

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process cannot go on; they end with the message."""
        text = f"process {self.index} of {self.size}: {str(error) or type(error).__name__}"
        self.client.key_value_set(f"{PREFIX}/failed", text, allow_overwrite=True)
        atexit.register(self._leave)  # before what JAX has registered, which would wait for the others, and abort

    def _leave(self):
        if self.leads:
            time.sleep(2 * WATCH_S)  # the store is here: the others have to read it first
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    @contextlib.contextmanager
    def failure_told(self):
        """A `with` block whose errors the other processes are told of before they go on."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def channel(self) -> Channel:
        """The commands of the next Session that is made."""
        return Channel(self)

    def _watch(self):
        """End this process when another one fails: it may be waiting for that one inside a collective, where nothing else can
        reach it.
        """
        while not self._is_over.wait(WATCH_S):
            try:
                text = self.client.key_value_try_get(f"{PREFIX}/failed")
            except jax.errors.JaxRuntimeError as error:
                if "NOT_FOUND" not in str(error):
                    return  # the service has ended, and this process is about to
                continue
            if not text.startswith(f"process {self.index} "):
                sys.stderr.write(f"error: {text}\n")
                sys.stderr.flush()
                time.sleep(2 * WATCH_S)  # were the service gone before the others have looked, JAX would abort them
                os._exit(1)

    def _stop_watching(self):
        self._is_over.set()
        self._watcher.join()


class Channel:
    """The commands of one Session's engine. Every process makes its Sessions in the same order."""

    def __init__(self, cluster: Cluster):
        global _num_channels
        with _lock:
            self._name = f"{PREFIX}/session{_num_channels}"
            _num_channels += 1
        self.cluster, self._count = cluster, 0

    def announce(self, word: str, name: str = "", inputs=None) -> None:
        """Leader: tell the others what comes next."""
        client = self.cluster.client
        client.key_value_set_bytes(f"{self._name}/{self._count}", Command(word, name, inputs or {}).to_bytes())
        if self._count >= KEPT_COMMANDS:
            client.key_value_delete(f"{self._name}/{self._count - KEPT_COMMANDS}")
        self._count += 1

    def next_command(self) -> Command:
        """Follower: wait for the leader's next command, however long it takes."""
        key = f"{self._name}/{self._count}"
        self._count += 1
        while True:
            try:
                return Command.from_bytes(self.cluster.client.blocking_key_value_get_bytes(key, int(POLL_S * 1000)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise UserError(f"process 0 is gone: {_first_line(error)}") from None


def join_cluster(distributed) -> Cluster:
    """Join this process with the others; a second call gives the same cluster.

    Args:
      distributed: "auto" where Slurm, Open MPI or Kubernetes started the processes (JAX finds out by itself), or a dict of
        coordinator ("host:port" of process 0), num_processes, process_id, and timeout_s (how long to wait for all of them).
    Raises: UserError for a value that is not one of those, or when the others do not come in time.
    """
    global _cluster
    with _lock:
        if _cluster is None:
            _cluster = _join(distributed)
        return _cluster


def check_distributed(distributed) -> dict:
    """The value of session.distributed as keyword arguments for JAX, with timeout_s. Raises: UserError if it is not one."""
    if distributed == "auto":
        return {"timeout_s": DEFAULT_TIMEOUT_S}
    if not isinstance(distributed, dict):
        raise UserError(f"distributed={distributed!r}: wanted auto, or a dict of {', '.join(KEYS)}")
    settings = {"timeout_s": DEFAULT_TIMEOUT_S} | {key: value for key, value in distributed.items() if value is not None}
    problems = [f"unknown key {key!r}" for key in settings if key not in KEYS]
    numbers = {key: settings[key] for key in ("num_processes", "process_id", "timeout_s") if key in settings}
    problems += [
        f"{key}={value!r}: wanted a whole number of at least {int(key != 'process_id')}"
        for key, value in numbers.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < (key != "process_id")
    ]
    given = [key for key in KEYS[:3] if key in settings]
    if 0 < len(given) < 3:
        problems.append(f"{', '.join(key for key in KEYS[:3] if key not in given)} missing beside {', '.join(given)}")
    coordinator = settings.get("coordinator", "host:1")
    if not isinstance(coordinator, str) or not coordinator.rpartition(":")[0] or not coordinator.rpartition(":")[2].isdecimal():
        problems.append(f"coordinator={coordinator!r}: wanted host:port")
    if not problems and len(given) == 3 and settings["process_id"] >= settings["num_processes"]:
        problems.append(f"process_id={settings['process_id']} is not below num_processes={settings['num_processes']}")
    if problems:
        raise UserError(f"distributed: {'; '.join(problems)}; keys: {', '.join(KEYS)}")
    return settings


def _join(distributed):
    coordinator, num_processes, process_id, local_devices, timeout_s = _find(distributed)
    roll_call(coordinator, num_processes, process_id, timeout_s)
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, local_devices,
            initialization_timeout=max(int(timeout_s), 1), heartbeat_timeout_seconds=HEARTBEAT_S,
        )  # fmt: skip
    except RuntimeError as error:
        raise UserError(f"distributed: {_first_line(error)}; open the distributed Session before anything else") from None
    cluster = Cluster(_jax_state().client, process_id, num_processes)
    logger.info("process %d of %d joined", cluster.index, cluster.size)
    return cluster


def _find(distributed):
    """coordinator, num_processes, process_id, this process's devices (None: all) and timeout_s."""
    settings = check_distributed(distributed)
    given = [settings.get(key) for key in KEYS[:3]]
    if given[0] is not None:
        return *given, None, settings["timeout_s"]
    from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize asks; the roll call has to know first

    found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, settings["timeout_s"])
    if None in found[:3]:
        raise UserError(
            f"distributed={distributed!r}: no Slurm, Open MPI or Kubernetes started this process; give {', '.join(KEYS[:3])}"
        )
    return *found, settings["timeout_s"]


def _jax_state():
    from jax._src import distributed  # the store has no public name

    return distributed.global_state


def _first_line(error):
    return str(error).strip().splitlines()[0]
