"""attention over a KV cache: decode (one new position a row, bound by reading the caches) and prefill (bound by products)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.case import Case
from poptransformer.backends.xla import custom_ops
from poptransformer.backends.xla.attention import plain_attention
from poptransformer.kv_cache import row_width
from poptransformer.precision import CACHE_DTYPES

FORMATS = tuple(CACHE_DTYPES)  # of the caches; those of bytes as beside packed weights, with float32 activations
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of one call: heads as models have them, positions in the cache before it, and new ones."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    capacity: int
    num_new: int = 1
    window: int | None = None
    use_slopes: bool = False
    is_prefix: bool = False  # whether all new tokens see each other


SHAPES = {
    "gpt2": Shape(12, 12, 64, 1000, 1024),
    "smollm2": Shape(9, 3, 64, 1000, 2048),
    "llama-1b": Shape(32, 8, 64, 8000, 8192),
    "llama-7b": Shape(32, 32, 128, 4000, 4096),
    "mqa": Shape(32, 2, 128, 8000, 8192),
    "window": Shape(32, 8, 128, 8000, 8192, window=1024),
    "slopes": Shape(16, 16, 64, 1000, 1024, use_slopes=True),
    "prefill-gpt2": Shape(12, 12, 64, 0, 1024, num_new=512),
    "prefill-gqa": Shape(32, 8, 128, 0, 1024, num_new=512),
    "prefill-long": Shape(32, 8, 128, 3968, 4096, num_new=128),
    "prefill-window": Shape(32, 8, 128, 3968, 4096, num_new=128, window=1024),
    "prefill-slopes": Shape(16, 16, 64, 0, 1024, num_new=512, use_slopes=True),
    "prefill-prefix": Shape(32, 32, 128, 0, 1024, num_new=512, is_prefix=True),
}
SIZES = tuple(SHAPES)


def case(library, size, kind, rows, working_set):
    """A Case of one of SHAPES for `rows` rows; caches are carried through a loop and donated, as in decoding."""
    shape = SHAPES[size]
    dtype = DTYPES.get(kind, jnp.float32)
    cache_dtype = CACHE_DTYPES[kind]
    cache_shape = (rows, shape.num_kv_heads, shape.capacity, row_width(shape.head_dim, cache_dtype))
    ends = shape.context + np.arange(1, shape.num_new + 1)
    seen = np.minimum(ends, shape.window or shape.capacity)
    if shape.is_prefix:
        seen = np.full(shape.num_new, ends[-1])
    read = min(int(ends[-1]), shape.num_new - 1 + (shape.window or shape.capacity))
    num_bytes = 2 * rows * read * shape.num_kv_heads * cache_shape[-1] * np.dtype(cache_dtype).itemsize
    is_decode = shape.num_new == 1
    layers = max(2, min(64, -(-working_set // num_bytes))) if is_decode else 2
    generator = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(generator.standard_normal((rows, shape.num_new, heads, shape.head_dim)), dtype)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    lengths, counts = jnp.full(rows, shape.context, jnp.int32), jnp.full(rows, shape.num_new, jnp.int32)
    slopes = np.exp2(-8 * np.arange(1, shape.num_heads + 1) / shape.num_heads).astype(np.float32)
    options = {
        "window": shape.window,
        "context_len": np.full(rows, shape.context + shape.num_new, np.int32) if shape.is_prefix else None,
        "alibi_slopes": slopes if shape.use_slopes else None,
    }

    allow_bfloat16 = kind not in DTYPES
    has_tiles = not is_decode and (allow_bfloat16 or dtype == jnp.bfloat16)

    def kernel(*inputs, **options):
        return custom_ops.attention(*inputs, **options, allow_bfloat16=allow_bfloat16)

    def program(attention):
        state = [[tuple(jnp.zeros(cache_shape, cache_dtype) for _ in range(2)) for _ in range(layers)]]

        def run(query, caches):
            def step(_, carry):
                query, caches = carry
                updated = []
                for k_cache, v_cache in caches:
                    inputs = (query, key, value, k_cache, v_cache, lengths, counts, shape.head_dim**-0.5)
                    query, *new = attention(*inputs, **options)
                    updated.append(tuple(new))
                return query, updated

            return jax.lax.fori_loop(0, 1, step, (query, caches))

        compiled = jax.jit(run, donate_argnums=1)

        def call():
            out, state[0] = compiled(query, state[0])
            out.block_until_ready()

        return call

    flops = 4 * rows * int(seen.sum()) * shape.num_heads * shape.head_dim
    name = f"attention {kind}, {size}: {shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} for keys, "
    name += f"{rows} rows, {shape.num_new} new after {shape.context}"
    peaks = ("fp32", "bf16 tiles") if has_tiles else ("fp32",)
    return Case(name, program(kernel), program(plain_attention), layers, num_bytes, flops, peaks)
