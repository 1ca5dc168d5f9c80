"""The PopART backend: graphs as ONNX programs that PopART compiles for IPUs.

A program keeps nothing between two runs: what a Session generates comes out of one run of a `generate` graph, whose caches live
in its loop.
"""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile

from poptransformer.backends.engine import Choice, DeviceInfo
from poptransformer.backends.popart.host import LocalHost, WorkerHost
from poptransformer.backends.popart.writer import ProgramWriter
from poptransformer.errors import UserError

logger = logging.getLogger(__name__)


class PopartEngine(ProgramWriter):
    """Runs graphs on IPUs.

    Args:
      options: PopartOptions, or a dict of their keys.
      execution_cache_dir: folder in which popart.execution_cache_name is; None for the user's cache folder.
      num_replicas: tensor-parallel ranks.
      num_stages: IPUs of one replica that layers are spread over.
    Raises: UserError where the Poplar SDK is missing, with what to do.
    """

    def __init__(self, options=None, execution_cache_dir=None, num_replicas=1, num_stages=1):
        super().__init__(options, num_replicas)
        self.options.check_placement(num_stages, num_replicas)
        self.num_stages = num_stages
        self._cache_folder = self._find_cache_folder(execution_cache_dir)
        # Before anything imports onnx: PopART does not come after it.
        self._host = WorkerHost(self.options.python) if self.options.python else LocalHost()
        self._folder = tempfile.TemporaryDirectory(prefix="poptransformer-popart-")
        self._inputs: dict[str, set[str]] = {}  # of each program: those that some node reads

    @property
    def device_info(self):
        ipus = self.num_stages * self.num_replicas
        name = f"{ipus} IPU{'s' * (ipus > 1)} ({self.options.device}), PopART {self._host.version}"
        return DeviceInfo(f"popart {self.options.device}", name, "none (PopART's own ops)")

    def _find_cache_folder(self, execution_cache_dir):
        if not self.options.execution_cache_name:
            return None
        if execution_cache_dir == "":
            raise UserError("popart.execution_cache_name needs a cache folder; leave execution_cache_dir out, or name one")
        root = execution_cache_dir or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "poptransformer"
        )
        return pathlib.Path(root).resolve() / "popart" / self.options.execution_cache_name

    def _compile_one(self, name, graph):
        folder = pathlib.Path(self._folder.name) / name
        program = self.write(graph, folder, cache_folder=self._cache_folder)
        seconds = self._host.open(name, folder)
        logger.info("PopART compiled %s in %.1f s", name, seconds)
        self._inputs[name] = set(program.inputs)
        reason = "codelets of this project are not there"
        return [Choice(node.op, "PopART's operators", reason) for node in graph.walk() if node.op != "loop"]

    def _run_one(self, name, inputs):
        batches = self.batches_per_run
        feeds = {key: array for key, array in inputs.items() if key in self._inputs[name]}
        if batches == 1:
            return self._host.run(name, feeds)
        feeds = {key: array.reshape(batches, -1, *array.shape[1:]) for key, array in feeds.items()}
        return {key: array.reshape(-1, *array.shape[2:]) for key, array in self._host.run(name, feeds).items()}

    def _free(self):
        super()._free()
        self._host.close()
        self._folder.cleanup()
        self._inputs = {}
