"""The reference backend: NumPy, node by node. Slow and obvious; it is what the other backends are compared with."""

from __future__ import annotations

import numpy as np

from poptransformer.backends.engine import Choice, DeviceInfo, Engine, random_weight
from poptransformer.graph import bfloat16
from poptransformer.ops import OPS
from poptransformer.ops.collective import COLLECTIVES


class ReferenceEngine(Engine):
    """Runs graphs with the ops' NumPy references.

    Args:
      float_dtype: np.float32 or np.float64 to compute every floating value in, whatever the graph says; None keeps the
        graph's dtypes, which shows where 16-bit rounding happens.
      world_size: tensor-parallel ranks; they take each node in lock step.
    """

    def __init__(self, float_dtype=None, world_size=1):
        super().__init__()
        self.float_dtype = None if float_dtype is None else np.dtype(float_dtype)
        self.world_size = world_size
        self._parameters, self._states = {}, {}  # name -> one array for each rank

    @property
    def device_info(self):
        return DeviceInfo("numpy", "NumPy reference", "none (reference backend)")

    def _free(self):
        self._parameters, self._states = {}, {}

    def _load_one(self, parameter, stages):
        def load(rank):
            array = parameter.load(rank) if parameter.load else random_weight(parameter, rank)
            return array.astype(self._dtype(array.dtype))

        whole = None if parameter.cut else load(0)
        self._parameters[parameter.name] = [load(rank) if whole is None else whole for rank in range(self.world_size)]

    def _compile_one(self, name, graph):
        return [
            Choice(node.op, "NumPy") for node in graph.walk() if node.op != "loop"
        ]  # nothing to prepare: run walks the nodes

    def _create_states(self, states):
        for state in states:
            self._states[state.name] = self._same(np.zeros(state.shape, self._dtype(state.dtype)))

    def _run_one(self, name, inputs):
        graph = self.graphs[name]
        values = {value: self._same(array.astype(self._dtype(array.dtype))) for value, array in graph.constants.items()}
        values |= {value: self._parameters[key] for key, (_, value) in graph.parameters.items()}
        values |= {value: self._states[key] for key, (_, value) in graph.states.items()}
        outputs = self._evaluate(graph, values, {key: self._same(array) for key, array in inputs.items()})
        self._states |= {key: values[value] for key, value in graph.state_updates.items()}
        return {key: np.array(ranks[0]) for key, ranks in outputs.items()}  # the caller's own: one may be a state as well

    def _same(self, array):
        return [array] * self.world_size

    def _evaluate(self, graph, values, inputs):
        """Values and inputs are lists of one array for each rank."""
        for key, value in graph.inputs.items():
            values[value] = [np.asarray(array).astype(self._dtype(value.dtype)) for array in inputs[key]]
        for node in graph.nodes:
            operands = [self._same(None) if value is None else values[value] for value in node.inputs]
            if node.op == "loop":
                results = self._loop(values, *operands, **node.attributes)
            elif node.op in COLLECTIVES:
                reference = OPS[node.op].reference
                results = [list(array) for array in reference(*map(np.stack, operands), **node.attributes)]
            else:
                reference, attributes = OPS[node.op].reference, self._attributes(node)
                ranks = range(self.world_size)
                results = zip(*(reference(*(ranks[r] for ranks in operands), **attributes) for r in ranks), strict=True)
            for value, arrays in zip(node.outputs, results, strict=True):
                arrays = [np.asarray(array) for array in arrays]
                wrong = {array.shape for array in arrays} - {value.shape}
                assert not wrong, f"{node.scope}: {node.op} gave {wrong}, not {value.shape}"
                values[value] = [array.astype(self._dtype(value.dtype)) for array in arrays]
        return {key: values[value] for key, value in graph.outputs.items()}

    def _loop(self, values, keep_going, *carried, max_steps, body):
        for step in range(max_steps):
            if not keep_going[0]:
                break
            arguments = {"step": self._same(np.int32(step))} | {f"carried_{i}": ranks for i, ranks in enumerate(carried)}
            keep_going, *carried = self._evaluate(body, values, arguments).values()
        return carried

    def _attributes(self, node):
        changed = {key: self._dtype(value) for key, value in node.attributes.items() if isinstance(value, np.dtype)}
        return node.attributes | changed

    def _dtype(self, dtype):
        dtype = np.dtype(dtype)
        is_float = dtype == bfloat16 or np.issubdtype(dtype, np.floating)
        return self.float_dtype if is_float and self.float_dtype is not None else dtype
