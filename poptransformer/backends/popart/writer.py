"""ProgramWriter: an Engine that writes programs and runs none. PopartEngine adds PopART to it; the export is this alone."""

from __future__ import annotations

import pathlib

import numpy as np

from poptransformer.backends.engine import DeviceInfo, Engine, random_weight
from poptransformer.backends.popart.folder import write_folder
from poptransformer.backends.popart.memory import check_fits
from poptransformer.backends.popart.options import PopartOptions
from poptransformer.backends.popart.program import Program, build_program
from poptransformer.errors import UnsupportedError


class ProgramWriter(Engine):
    """Turns graphs into programs' folders.

    Args:
      options: PopartOptions, or a dict of their keys.
      num_replicas: tensor-parallel ranks.
    """

    keeps_states = False

    def __init__(self, options=None, num_replicas=1):
        super().__init__()
        self.options = options if isinstance(options, PopartOptions) else PopartOptions.of(options)
        self.num_replicas = self.world_size = num_replicas
        self._last = None, None  # what was read last: a packed weight is asked for once for each of its parts

    @property
    def batches_per_run(self):
        return self.options.batch_per_step

    @property
    def is_stepwise(self):
        return self.options.prefill == "stepwise"

    @property
    def device_info(self):
        return DeviceInfo("popart", "none: programs are written only", "none (PopART's own ops)")

    def check_dtypes(self, *dtypes):
        lacking = dict.fromkeys(np.dtype(dtype).name for dtype in dtypes if dtype not in (np.float32, np.float16))
        if lacking:
            raise UnsupportedError(
                f"backend popart has no {', '.join(lacking)} for activations and caches (has float32, float16); set precision "
                "and kv_cache to fp16 or fp32, or precision to int8, int4 or fp8 for the weights"
            )

    def check_fits(self, model, layers_per_device, num_prefill):
        if self.options.check_memory and self.options.device in ("ipu", "offline"):
            is_stepwise = self.is_stepwise and not model.needs_whole_prompt
            check_fits(model, layers_per_device, num_prefill, is_stepwise, self.options.ipu_version)

    def write(self, graph, folder, **how) -> Program:
        """Write a graph's program into a folder; `how` as for write_folder. Raises: UserError."""
        program = build_program(graph, self._read, self.num_replicas, self.options.enable_pipeline)
        self.options.check_placement(program.num_stages, self.num_replicas)
        is_packed = any(parameter.packing for parameter, _ in graph.parameters.values())
        write_folder(program, self.options, pathlib.Path(folder), has_packed_weights=is_packed, **how)
        return program

    def _read(self, parameter, rank):
        if self._last[0] != (parameter.name, rank):
            array = parameter.load(rank) if parameter.load else random_weight(parameter, rank)
            self._last = (parameter.name, rank), array
        return self._last[1]

    def _load_one(self, parameter, stages):
        pass  # read when a program is written: PopART takes weights with the model

    def _create_states(self, states):
        pass  # a program begins with zeros each time

    def _compile_one(self, name, graph):
        raise UnsupportedError(f"graph {name!r}: this engine writes programs, it does not run them")

    def _run_one(self, name, inputs):
        raise AssertionError("no graph is ever compiled here")

    def _free(self):
        self._last = None, None
