"""wkv: RWKV-4's recurrence. Few bytes; each number costs two e^x and a division."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.ops.case import Case
from poptransformer.backends.xla.lowering import Context
from poptransformer.backends.xla.wkv import wkv

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
FORMATS = tuple(DTYPES)
SIZES = ("768x1", "768x512", "2560x1")  # width and new tokens of a row


def case(library, size, kind, rows, working_set):
    """A Case of `rows` rows, each with so many new tokens."""
    width, num_new = map(int, size.split("x"))
    num_bytes = rows * width * (2 * num_new * jnp.dtype(DTYPES[kind]).itemsize + 3 * 4)
    count = max(4, min(100, working_set // num_bytes))
    keys = jax.random.split(jax.random.key(0), 5)
    key, value = (jax.random.normal(keys[i], (rows, num_new, width), DTYPES[kind]) for i in range(2))
    decay, first = (jax.random.normal(keys[i], (width,)) for i in (2, 3))
    states = [jnp.abs(jax.random.normal(keys[4], (rows, 3, width))) + 1 for _ in range(count)]
    lengths, counts = jnp.full(rows, 5, jnp.int32), jnp.full(rows, num_new, jnp.int32)

    def program(ops):
        context = Context("cpu", frozenset(ops), library.isa)

        def run(value, states):
            for state in states:
                value, _ = wkv(context, key, value, decay, first, state, lengths, counts)
            return value

        compiled = jax.jit(run)
        return lambda: compiled(value, states).block_until_ready()

    return Case(f"wkv {kind}, width {width}, {rows} rows of {num_new}", program(["wkv"]), program([]), count, num_bytes)
