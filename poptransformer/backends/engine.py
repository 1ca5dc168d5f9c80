"""What a backend is: an Engine that holds weights and states on a device and runs graphs by name.

    engine = XlaEngine(platform="cpu")
    engine.load(parameters)
    engine.compile("decode", graph)
    outputs = engine.run("decode", {"token": ...})

All graphs of an engine share its parameters and states. Calls are not thread-safe; Session queues them.
"""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from poptransformer.errors import UserError
from poptransformer.graph import Graph, Parameter, State


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """What a report says about where the graphs run.

    Attributes:
      platform: "cpu", "cuda", "tpu", ... or "numpy".
      name: the device in words.
      custom_ops: the kernels of this project that are in use, in words.
    """

    platform: str
    name: str
    custom_ops: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """How an op of a graph is computed.

    Attributes:
      op: its name.
      lowering: what was taken, in words: "kernel attention (avx512)", "plain XLA", "NumPy".
      reason: why no kernel of this project was taken; "" where one was.
    """

    op: str
    lowering: str
    reason: str = ""

    def __str__(self):
        return f"{self.lowering}: {self.reason}" if self.reason else self.lowering


class Engine(abc.ABC):
    """Base of the backends: bookkeeping that all share, and the four things that each does its own way."""

    def __init__(self):
        self.graphs: dict[str, Graph] = {}
        #: for each compiled graph how its ops are computed, one entry an op, those of loop bodies included
        self.choices: dict[str, list[Choice]] = {}
        self._state_specs: dict[str, State] = {}
        self._parameter_names: set[str] = set()

    @property
    @abc.abstractmethod
    def device_info(self) -> DeviceInfo:
        """Where the graphs run."""

    def memory_bandwidth_gb_per_s(self) -> float | None:
        """Measure how fast the device's memory is read, in GB/s; None where the backend cannot tell."""
        return None

    def load(self, parameters: Iterable[Parameter], progress=None, stages_of: Mapping[str, tuple] | None = None) -> None:
        """Put weights on the device, one at a time.

        Args:
          progress: if given, is called with each Parameter once it is there.
          stages_of: the stages that use each parameter, as Graph.stages_of gives them; None: all are on one stage.
        """
        self._check_process()
        for parameter in parameters:
            if parameter.name not in self._parameter_names:
                self._load_one(parameter, (stages_of or {}).get(parameter.name, (0,)))
                self._parameter_names.add(parameter.name)
            if progress:
                progress(parameter)

    def compile(self, name: str, graph: Graph) -> None:
        """Make a graph ready to run under a name. States it brings in start as zeros; those already there stay."""
        self._check_process()
        if name in self.graphs:
            raise UserError(f"a graph called {name!r} is already compiled")
        for state, _ in graph.states.values():
            known = self._state_specs.get(state.name)
            if known and known.spec != state.spec:
                raise UserError(f"state {state.name!r} is {known.spec} in one graph and {state.spec} in another")
        lacking = sorted(set(graph.parameters) - self._parameter_names)
        if lacking:
            raise UserError(f"graph {name!r} uses {len(lacking)} parameters that are not loaded: {', '.join(lacking[:5])}")
        fresh = [state for state, _ in graph.states.values() if state.name not in self._state_specs]
        self.choices[name] = self._compile_one(name, graph)
        self._create_states(fresh)
        self._state_specs.update((state.name, state) for state in fresh)
        self.graphs[name] = graph

    def run(self, name: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a graph: inputs by name, states updated in place, outputs as NumPy arrays.

        If the run is broken off (Ctrl-C, device error) the states are zeros again before the exception goes on.
        """
        self._check_process()
        if name not in self.graphs:
            raise UserError(f"no graph {name!r} is compiled; compiled: {', '.join(self.graphs) or 'none'}")
        arrays = {}
        declared = self.graphs[name].inputs
        if set(declared) != set(inputs):
            raise UserError(f"graph {name!r} takes inputs {sorted(declared)}, given are {sorted(inputs)}")
        for key, value in declared.items():
            array = np.asarray(inputs[key])
            if array.shape != value.shape or array.dtype != value.dtype:
                raise UserError(f"graph {name!r}: input {key!r} is {value.spec}, given is {array.dtype}{list(array.shape)}")
            arrays[key] = array
        try:
            return self._run_one(name, arrays)
        except BaseException:
            self.reset_states()
            raise

    def reset_states(self) -> None:
        """Fill all states with zeros."""
        self._create_states(self._state_specs.values())

    def close(self) -> None:
        """Free the device memory of weights and states, and forget all graphs."""
        self._free()
        self.graphs, self.choices, self._state_specs, self._parameter_names = {}, {}, {}, set()

    def _check_process(self) -> None:
        """Refuse work in a process where the backend would hang; nothing to refuse unless a backend says so."""
        return None

    @abc.abstractmethod
    def _free(self) -> None: ...

    @abc.abstractmethod
    def _load_one(self, parameter: Parameter, stages: tuple[int, ...]) -> None: ...

    @abc.abstractmethod
    def _compile_one(self, name: str, graph: Graph) -> list[Choice]:
        """Compile a graph; returns how each of its ops is computed."""

    @abc.abstractmethod
    def _create_states(self, states: Iterable[State]) -> None: ...

    @abc.abstractmethod
    def _run_one(self, name: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]: ...


def random_weight(parameter: Parameter, rank: int = 0) -> np.ndarray:
    """Draw a rank's part of a weight for runs without a checkpoint; the same name gives the same numbers.

    A cut weight is drawn whole and cut, unless it is packed: packed parts are drawn for each rank.
    """
    cut = parameter.cut
    seed = zlib.crc32(parameter.name.encode())
    if parameter.packing:
        return parameter.packing.draw(seed if cut is None else seed + rank)
    shape = parameter.logical_shape
    if parameter.init != "normal":
        whole = np.full(shape, 1 if parameter.init == "ones" else 0, parameter.dtype)
    else:
        whole = (np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)).astype(parameter.dtype)
    return whole if cut is None else cut.take(whole, rank)
