"""linear and packed_linear: y = x W^T for a few rows of x (bound by reading W) or many (bound by products).

As the engine runs them: a graph that is a chain of products, which up to 8 rows is one step program.
"""

from __future__ import annotations

import numpy as np

from benchmarks.ops.case import Case
from poptransformer import ops
from poptransformer.backends.xla.engine import XlaEngine
from poptransformer.graph import Graph, Parameter, bfloat16
from poptransformer.packing import BITS, Packing
from poptransformer.precision import precision

DTYPES = {"fp32": np.dtype(np.float32), "bf16": bfloat16, "fp16": np.dtype(np.float16)}
FORMATS = (*DTYPES, *BITS)
SIZES = ("4096x4096", "4096x11008", "576x1536")
PEAKS = {"int8": ("fp32", "int8", "bf16 tiles"), "int4": ("fp32", "int8", "bf16 tiles"), "bf16": ("fp32", "bf16", "bf16 tiles")}


def case(library, size, kind, rows, working_set):
    """A Case of one matrix size "INxOUT", and back: every second weight is OUTxIN, so that products wait for the one before."""
    size_in, size_out = map(int, size.split("x"))
    dtype = DTYPES.get(kind, np.dtype(np.float32))
    shapes = [(size_out, size_in), (size_in, size_out)]
    packings = [Packing(*precision(kind).packing, *shape) if kind in BITS else None for shape in shapes]
    pair_bytes = sum(int(np.prod(packing.shape)) if packing else size_in * size_out * dtype.itemsize for packing in packings)
    num_bytes, count = pair_bytes // 2, 2 * max(1, -(-working_set // pair_bytes))

    graph = Graph("chain")
    x = graph.input("x", (rows, size_in), dtype)
    for i in range(count):
        x = _product(graph, x, f"weight_{i}", shapes[i % 2], packings[i % 2], dtype, i)
    graph.output("y", x)
    op = "packed_linear" if kind in BITS else "linear"
    return Case(
        f"{op} {kind}, {size_in} to {size_out}, {rows} rows", _runner(graph, True), _runner(graph, False), count, num_bytes,
        2 * rows * size_in * size_out, PEAKS.get(kind, ("fp32",)),
    )  # fmt: skip


def _product(graph, x, name, shape, packing, dtype, seed):
    if packing:
        parameter = Parameter(name, packing.shape, np.dtype(np.uint8), packing=packing)
        parameter.load = lambda rank=0: packing.draw(seed)
        return ops.packed_linear(x, graph.parameter(parameter), packing)
    parameter = Parameter(name, shape, dtype)
    deviation = np.float32(shape[1] ** -0.5)  # so that numbers neither grow nor vanish along the chain
    parameter.load = lambda rank=0: (np.random.default_rng(seed).standard_normal(shape, np.float32) * deviation).astype(dtype)
    return ops.linear(x, graph.parameter(parameter))


def _runner(graph, custom_ops):
    """Runs the graph and waits; its engine is made, and its weights are drawn, at the first call."""
    engines = []
    x = np.random.default_rng(0).standard_normal(next(iter(graph.inputs.values())).shape)

    def run():
        if not engines:
            engine = XlaEngine("cpu", custom_ops, "", 1, 1)
            engine.load([parameter for parameter, _ in graph.parameters.values()])
            engine.compile("chain", graph)
            engines.append(engine)
        engines[0].run("chain", {"x": x.astype(graph.inputs["x"].dtype)})

    return run
