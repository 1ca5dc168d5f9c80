"""gather: rows of an embedding table, copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.case import Case
from poptransformer.backends.xla.lowering import Context
from poptransformer.backends.xla.shape import gather

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
FORMATS = tuple(DTYPES)
SIZES = ("50257x768", "128256x2048")  # vocabulary and width


def case(library, size, kind, rows, working_set):
    """A Case of looking `rows` tokens up, again and again others; a row is read once and written once."""
    vocab_size, width = map(int, size.split("x"))
    table = jnp.ones((vocab_size, width), DTYPES[kind])
    num_bytes = rows * width * jnp.dtype(DTYPES[kind]).itemsize
    count = max(8, min(200, working_set // num_bytes))
    indices = np.random.default_rng(0).integers(0, vocab_size, (count, rows)).astype(np.int32)

    def program(ops):
        context = Context("cpu", frozenset(ops), library.isa)
        compiled = jax.jit(lambda table, indices: [gather(context, table, row) for row in indices])
        return lambda: jax.block_until_ready(compiled(table, list(indices)))

    return Case(f"gather {kind}, {vocab_size} x {width}, {rows} rows", program(["gather"]), program([]), count, num_bytes)
