"""linear and packed_linear: y = x W^T for a few rows of x (bound by reading W) or many (bound by products)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.case import Case
from poptransformer.backends.xla import linear as plain_linear
from poptransformer.backends.xla import packed_linear as plain_packed
from poptransformer.backends.xla.huge_pages import HugePages
from poptransformer.backends.xla.lowering import Context
from poptransformer.packing import BITS, Packing
from poptransformer.precision import precision

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
FORMATS = (*DTYPES, *BITS)
SIZES = ("4096x4096", "4096x11008", "576x1536")
PEAKS = {"int8": ("fp32", "int8", "bf16 tiles"), "int4": ("fp32", "int8", "bf16 tiles"), "bf16": ("fp32", "bf16", "bf16 tiles")}


def case(library, size, kind, rows, working_set):
    """A Case of one matrix size "INxOUT".

    Every product waits for the one before, as in a model: x of the next is x plus nothing much of this one's result.
    """
    size_in, size_out = map(int, size.split("x"))
    if kind in BITS:
        packing = Packing(*precision(kind).packing, size_out, size_in)
        num_bytes, dtype = int(np.prod(packing.shape)), jnp.float32
    else:
        packing, dtype = None, DTYPES[kind]
        num_bytes = size_in * size_out * jnp.dtype(dtype).itemsize
    count = max(2, -(-working_set // num_bytes))
    x = jax.random.normal(jax.random.key(0), (rows, size_in), dtype)
    if packing:
        weights = (packing.draw(i) for i in range(count))
    else:
        weights = (jax.random.normal(jax.random.key(i), (size_out, size_in), dtype) * 0.02 for i in range(count))
    huge_pages, device = HugePages(), jax.local_devices()[0]  # where the engine has weights
    weights = [huge_pages.place(weight, device) for weight in weights]

    def program(ops):
        context = Context("cpu", frozenset(ops), library.isa)

        def run(x, weights):
            for weight in weights:
                if packing:
                    y = plain_packed.packed_linear(context, x, weight, None, packing, x.dtype)
                else:
                    y = plain_linear.linear(context, x, weight, None, x.dtype)
                x = x + y[:, :1] * jnp.asarray(1e-30, x.dtype)
            return x

        compiled = jax.jit(run)
        return lambda: compiled(x, weights).block_until_ready()

    op = "packed_linear" if packing else "linear"
    return Case(
        f"{op} {kind}, {size_in} to {size_out}, {rows} rows", program([op]), program([]), count, num_bytes,
        2 * rows * size_in * size_out, PEAKS.get(kind, ("fp32",)),
    )  # fmt: skip
