"""The reference backend: NumPy, node by node. Slow and obvious; it is what the other backends are compared with."""

from __future__ import annotations

import numpy as np

from poptransformer.backends.engine import Choice, DeviceInfo, Engine, random_weight
from poptransformer.graph import bfloat16
from poptransformer.ops import OPS


class ReferenceEngine(Engine):
    """Runs graphs with the ops' NumPy references.

    Args:
      float_dtype: np.float32 or np.float64 to compute every floating value in, whatever the graph says; None keeps the
        graph's dtypes, which shows where 16-bit rounding happens.
    """

    def __init__(self, float_dtype=None):
        super().__init__()
        self.float_dtype = None if float_dtype is None else np.dtype(float_dtype)
        self._parameters, self._states = {}, {}

    @property
    def device_info(self):
        return DeviceInfo("numpy", "NumPy reference", "none (reference backend)")

    def _free(self):
        self._parameters, self._states = {}, {}

    def _load_one(self, parameter):
        array = parameter.load() if parameter.load else random_weight(parameter)
        self._parameters[parameter.name] = array.astype(self._dtype(array.dtype))

    def _compile_one(self, name, graph):
        return [
            Choice(node.op, "NumPy") for node in graph.walk() if node.op != "loop"
        ]  # nothing to prepare: run walks the nodes

    def _create_states(self, states):
        for state in states:
            self._states[state.name] = np.zeros(state.shape, self._dtype(state.dtype))

    def _run_one(self, name, inputs):
        graph = self.graphs[name]
        values = {value: array.astype(self._dtype(array.dtype)) for value, array in graph.constants.items()}
        values |= {value: self._parameters[key] for key, (_, value) in graph.parameters.items()}
        values |= {value: self._states[key] for key, (_, value) in graph.states.items()}
        outputs = self._evaluate(graph, values, inputs)
        self._states |= {key: values[value] for key, value in graph.state_updates.items()}
        return {key: np.array(array) for key, array in outputs.items()}  # the caller's own: one may be a state as well

    def _evaluate(self, graph, values, inputs):
        for key, value in graph.inputs.items():
            values[value] = np.asarray(inputs[key]).astype(self._dtype(value.dtype))
        for node in graph.nodes:
            arrays = [None if value is None else values[value] for value in node.inputs]
            if node.op == "loop":
                results = self._loop(values, *arrays, **node.attributes)
            else:
                results = OPS[node.op].reference(*arrays, **self._attributes(node))
            for value, array in zip(node.outputs, results, strict=True):
                array = np.asarray(array)
                assert array.shape == value.shape, f"{node.scope}: {node.op} gave {array.shape}, not {value.shape}"
                values[value] = array.astype(self._dtype(value.dtype))
        return {key: values[value] for key, value in graph.outputs.items()}

    def _loop(self, values, keep_going, *carried, max_steps, body):
        for step in range(max_steps):
            if not keep_going:
                break
            arguments = {"step": np.int32(step)} | {f"carried_{i}": array for i, array in enumerate(carried)}
            keep_going, *carried = self._evaluate(body, values, arguments).values()
        return carried

    def _attributes(self, node):
        changed = {key: self._dtype(value) for key, value in node.attributes.items() if isinstance(value, np.dtype)}
        return node.attributes | changed

    def _dtype(self, dtype):
        dtype = np.dtype(dtype)
        is_float = dtype == bfloat16 or np.issubdtype(dtype, np.floating)
        return self.float_dtype if is_float and self.float_dtype is not None else dtype
