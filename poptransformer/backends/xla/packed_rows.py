"""Packed weights as plain XLA reads them: the codes of an output follow each other, in words of 32 bits.

The packed form of packing.py, 16 outputs side by side, suits the CPU's kernel. A compiler that sees loops over an output's
inputs wants these to lie one after the other, and few loads: a word has 4 codes of int8 or fp8, or 8 of int4.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from poptransformer.backends.xla.lowering import product
from poptransformer.float8 import FLOAT8
from poptransformer.graph import Spec
from poptransformer.packing import BLOCK_ROWS, UNIT, ZERO_CODES, Packing


class PackedRows(NamedTuple):
    """A packed matrix [O, I], rearranged.

    Attributes:
      words: [O, W] uint32. int8, fp8: word w has inputs 4 w .. 4 w + 3, from the low byte on. int4, in a unit of 32 inputs with
        words 0 .. 3: the low halves of word q's bytes are of inputs 4 q .. 4 q + 3, the high halves of those 16 further on.
      scales: [O, G] float16, fp8 float32.
      minimums: the same, int4 only; else None.
    """

    words: jax.Array
    scales: jax.Array
    minimums: jax.Array | None


def packed_specs(packing: Packing) -> PackedRows:
    """Shapes and dtypes of a rearranged matrix."""
    words = Spec((packing.out_features, packing.num_units * packing.bits), np.dtype(np.uint32))
    numbers = Spec((packing.out_features, packing.num_groups), packing.scale_dtype)
    return PackedRows(words, numbers, numbers if packing.has_minimums else None)


def rearrange(packed, packing: Packing) -> PackedRows:
    """From uint8 of packing.shape."""
    num_blocks = packed.shape[0]
    codes = packed[:, : packing.code_bytes].reshape(num_blocks, -1, BLOCK_ROWS, 4)
    words = _row_by_row(jax.lax.bitcast_convert_type(codes, jnp.uint32), packing)
    numbers = []
    dtype = packing.scale_dtype
    for part in range(2 if packing.has_minimums else 1):
        at = packing.code_bytes + part * packing.scale_bytes
        of_part = packed[:, at : at + packing.scale_bytes]
        of_part = of_part.reshape(num_blocks, packing.num_groups, BLOCK_ROWS, dtype.itemsize)
        numbers.append(_row_by_row(jax.lax.bitcast_convert_type(of_part, dtype), packing))
    return PackedRows(words, numbers[0], numbers[1] if len(numbers) > 1 else None)


def _row_by_row(blocks, packing):
    """[ceil(O / 16), n, 16] -> [O, n]."""
    return blocks.transpose(0, 2, 1).reshape(-1, blocks.shape[1])[: packing.out_features]


def one_row_product(x, rows: PackedRows, packing: Packing):
    """W x for x [I], without unpacking W: [O] float32. Codes are multiplied where they lie, the sums of words with scales."""
    inputs = inputs_of_words(x, packing)
    sums = inputs.sum(0)
    products = sum(part * inputs[place] for place, part in enumerate(_codes(rows.words, packing)))
    products -= ZERO_CODES[packing.kind] * sums
    y = (products * _of_words(rows.scales, packing)).sum(-1)
    if rows.minimums is not None:
        y += (_of_words(rows.minimums, packing) * sums).sum(-1)
    return y


def code_shifts(packing: Packing) -> list[int]:
    """How many bits up in a word each of its codes lies."""
    bytes_up = [0, 8, 16, 24]
    return bytes_up if packing.bits == 8 else bytes_up + [shift + 4 for shift in bytes_up]


def _codes(words, packing):
    """The codes of words [..., W], one float32 array for each place in a word."""
    codes = [words >> np.uint32(shift) & np.uint32(2**packing.bits - 1) for shift in code_shifts(packing)]
    if packing.kind == "fp8":
        codes = [jax.lax.bitcast_convert_type(part.astype(jnp.uint8), FLOAT8) for part in codes]
    return [part.astype(jnp.float32) for part in codes]


def inputs_of_words(x, packing: Packing):
    """Inputs [I] where the codes of words are: [codes of a word, W] float32."""
    x = jnp.pad(x.astype(jnp.float32), (0, packing.num_units * UNIT - packing.in_features))
    if packing.bits == 8:
        return x.reshape(-1, 4).T
    return x.reshape(-1, 2, 4, 4).transpose(1, 3, 0, 2).reshape(8, -1)


def _of_words(numbers, packing):
    """What groups have [O, G] for each of their words: [O, W] float32."""
    num_words = packing.units_per_group * packing.bits
    wide = jnp.broadcast_to(numbers[:, :, None], (*numbers.shape, num_words)).reshape(len(numbers), -1)
    return wide[:, : packing.num_units * packing.bits].astype(jnp.float32)


def unpack(rows: PackedRows, packing: Packing):
    """The matrix, or those rows of it that `rows` has: [n, I] float32."""
    values = jnp.stack(_codes(rows.words, packing), -1) - ZERO_CODES[packing.kind]
    values *= _of_words(rows.scales, packing)[:, :, None]
    if rows.minimums is not None:
        values += _of_words(rows.minimums, packing)[:, :, None]
    if packing.bits == 4:
        values = values.reshape(len(values), -1, 4, 2, 4).transpose(0, 1, 3, 2, 4)
    return values.reshape(len(values), -1)[:, : packing.in_features]


def many_rows_product(x, rows: PackedRows, packing: Packing):
    """x W^T for x [n, I] with a W that is unpacked first, to the dtype of x: [n, O] float32."""
    return product(x, unpack(rows, packing).astype(x.dtype), (((1,), (1,)), ((), ())))
