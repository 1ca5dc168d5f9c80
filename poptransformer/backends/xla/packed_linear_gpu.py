"""The product of a few rows with packed weights on NVIDIA GPUs: a kernel in JAX's Pallas, which XLA compiles with Triton.

As the CPU's kernel, it rounds x to 8 bits, each unit of 32 inputs with a step of its own; sums of a unit's products are exact
integers, the rest is float32. An instruction multiplies four codes (dp4a); in float32, whether as plain XLA or in such a
kernel, instructions bound the product and not reading the weights: 2.9 and 3.1 of 4.3 TB/s for int8 on a H200, 3.4 so; int4
1.8, 2.2 and 3.0.

A block of threads has some outputs, and a chunk of their words at a time, four words for each thread: what it prepares of x
serves all outputs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from poptransformer.backends.xla.packed_rows import PackedRows, inputs_of_words
from poptransformer.packing import Packing

CHUNK = 512
NUM_WARPS = 4
MOST_UNROLLED = 2  # chunks of an output whose loads all start at once; more take too many registers
LARGEST = 127  # code of x
ROUNDING = 1.5 * 2.0**23  # added to a small float32, it leaves the nearest integer in the low bits


def few_rows_product(x, rows: PackedRows, packing: Packing, interpret=False):
    """x W^T for x [B, I] with few rows B: [B, O] float32.

    Args:
      interpret: run the kernel as plain XLA instead, on any device, for tests.
    """
    num_rows, num_words = x.shape[0], rows.words.shape[1]
    width = -(-num_words // CHUNK) * CHUNK
    inputs = jnp.concatenate([inputs_of_words(row, packing) for row in x])
    inputs = jnp.pad(inputs, ((0, 0), (0, width - num_words)))
    block = _outputs_of_block(packing, num_rows, width // CHUNK)
    return pl.pallas_call(
        functools.partial(_kernel, packing=packing, num_words=num_words, block=block, interpret=interpret),
        out_shape=jax.ShapeDtypeStruct((num_rows, packing.out_features), jnp.float32),
        grid=(-(-packing.out_features // block),),
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="packed_linear",
    )(inputs, *(part for part in rows if part is not None))


def _outputs_of_block(packing, num_rows, num_chunks):
    """Outputs that a block of threads computes. More share what is prepared of x, but take more registers.

    On a H200, us with 8 and with 4: int8 [11008, 4096] 13.9 and 14.5, [4096, 11008] 20.7 and 16.5; int4 9.3 and 10.7, 9.7 and
    14.0.
    """
    most = 4 if packing.bits == 8 and num_chunks > MOST_UNROLLED else 8
    return most // (1 if num_rows == 1 else 2 if num_rows <= 4 else 4)


def _kernel(inputs, words, scales, *minimums_and_result, packing, num_words, block, interpret):
    """Outputs of one block.

    inputs [B * codes of a word, W filled up] float32, words [O, W] uint32, scales and minimums [O, G] float16, result [B, O].
    """
    *minimums, result = minimums_and_result
    num_rows = result.shape[0]
    begin = pl.program_id(0) * block
    outputs = pl.ds(begin, block)
    is_output = begin + jnp.arange(block) < packing.out_features
    has_groups = packing.num_groups > 1
    units = CHUNK // packing.bits  # of a chunk; a unit has as many words as a code has bits
    groups = units // packing.units_per_group if has_groups else 1

    def load(array, n, size):
        """Columns n * size ... of the block's outputs; zeros past the array's end."""
        is_here = is_output[:, None] & (n * size + jnp.arange(size) < array.shape[1])[None]
        is_whole = array.shape[0] % block == array.shape[1] % size == 0
        mask = {} if is_whole else {"mask": is_here, "other": 0}
        return triton.load(array.at[outputs, pl.ds(n * size, size)], **mask)

    def sum_units(x):
        """Over a unit's words: [outputs, CHUNK] -> [outputs, units]."""
        return x.reshape(len(x), units, packing.bits).sum(-1)

    def of_groups(x):
        """Over the units of a group: [outputs, units] -> [outputs, groups]; whole rows stay in units."""
        return x.reshape(len(x), groups, -1).sum(-1) if has_groups and packing.units_per_group > 1 else x

    def add_chunk(n, sums):
        n += begin * 0  # no constant: Pallas refuses those past an array's end before it looks at the mask
        chunk = load(words, n, CHUNK)
        if packing.bits == 8:
            codes = [chunk]
        else:
            codes = [chunk & np.uint32(0x0F0F0F0F), chunk >> np.uint32(4) & np.uint32(0x0F0F0F0F)]
        scale = load(scales, n, groups).astype(jnp.float32) if has_groups else 1.0
        minimum = load(minimums[0], n, groups).astype(jnp.float32) if minimums and has_groups else 1.0
        added = []
        for row, (total, rest) in enumerate(sums):
            x_codes, step = _round(inputs, row, n, packing)
            products = sum_units(sum(_dot4(code, x, interpret) for code, x in zip(codes, x_codes, strict=True)))
            ones = np.uint32(0x01010101)
            x_sums = sum_units(sum(_dot4(jnp.full(x.shape, ones), x, interpret) for x in x_codes))
            if packing.bits == 8:
                products -= 128 * x_sums
            total += of_groups(products.astype(jnp.float32) * step) * scale
            if minimums:
                rest += of_groups(x_sums.astype(jnp.float32) * step) * minimum
            added.append((total, rest))
        return tuple(added)

    zeros = jnp.zeros((block, groups if has_groups else units), jnp.float32)
    sums = tuple((zeros, zeros if minimums else None) for _ in range(num_rows))
    num_chunks = -(-num_words // CHUNK)
    if num_chunks <= MOST_UNROLLED:
        for n in range(num_chunks):
            sums = add_chunk(n, sums)
    else:
        sums = lax.fori_loop(0, num_chunks, add_chunk, sums)

    def of_rows(numbers):
        """Of a row that is one group: [block]; 1 where groups are many and have been multiplied already."""
        return 1.0 if has_groups else load(numbers, 0, 1).astype(jnp.float32).sum(-1)

    for row, (total, rest) in enumerate(sums):
        y = total.sum(-1) * of_rows(scales)
        if minimums:
            y += rest.sum(-1) * of_rows(minimums[0])
        triton.store(result.at[pl.ds(row, 1), outputs], y[None], mask=is_output[None])


def _round(inputs, row, n, packing):
    """A chunk of a row of x in 8 bits: words of codes [1, CHUNK] uint32, as many as `codes` has, and steps [1, units]."""
    places = 32 // packing.bits
    x = [triton.load(inputs.at[pl.ds(row * places + place, 1), pl.ds(n * CHUNK, CHUNK)]) for place in range(places)]
    shape = (1, CHUNK // packing.bits, packing.bits)
    largest = functools.reduce(jnp.maximum, map(jnp.abs, x)).reshape(shape).max(-1)
    # Whatever is not finite makes the step NaN, and with it the result; a maximum may pass over NaN.
    step = largest / LARGEST + (sum(x[1:], x[0]) * 0.0).reshape(shape).sum(-1)
    inverse = jnp.where(largest > 0, LARGEST / largest, 0.0)
    inverse = jnp.broadcast_to(inverse[:, :, None], shape).reshape(1, CHUNK)
    rounded = [lax.bitcast_convert_type(part * inverse + ROUNDING, jnp.uint32) & np.uint32(255) for part in x]
    return [a | b << 8 | c << 16 | d << 24 for a, b, c, d in zip(*(rounded[place::4] for place in range(4)), strict=True)], step


def _dot4(codes, x, interpret):
    """Sums over the four bytes of words: unsigned codes [n, CHUNK] times signed x [1, CHUNK] -> [n, CHUNK] int32."""
    x = jnp.broadcast_to(x, codes.shape)
    if interpret:
        low_byte = np.uint32(255)
        return sum(
            (codes >> np.uint32(8 * byte) & low_byte).astype(jnp.int32)
            * ((x >> np.uint32(8 * byte) & low_byte).astype(jnp.int32) << 24 >> 24)
            for byte in range(4)
        )
    result = jax.ShapeDtypeStruct(codes.shape, jnp.int32)
    (dots,) = triton.elementwise_inline_asm(
        "dp4a.u32.s32 $0, $1, $2, 0;", args=[codes, x], constraints="=r,r,r", pack=1, result_shape_dtypes=[result]
    )
    return dots
