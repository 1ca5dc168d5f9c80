"""Quantised matrices of a GGUF file as codes, scales and minimums, for formats that take them without quantising anew."""

import numpy as np

# Type -> (kind of packing.Packing, bytes of a block of 32 values: float16 scale, float16 minimum if it has one, codes).
CODE_TYPES = {"Q8_0": ("int8", 34), "Q4_0": ("int4", 18), "Q4_1": ("int4", 20)}
GROUP_SIZE = 32  # of all these types


def split_blocks(data, kind):
    """Take rows of bytes apart.

    Args:
      data: [rows, bytes of a row] uint8, whole blocks of a type in CODE_TYPES.
    Returns: codes [rows, values] uint8, scales [rows, groups] float16, and minimums, the same, or None: as
      `Packing.assemble` takes them.
    """
    blocks = data.reshape(len(data), -1, CODE_TYPES[kind][1])
    scales = _numbers(blocks[:, :, :2])
    if kind == "Q8_0":
        return (blocks[:, :, 2:] ^ 0x80).reshape(len(data), -1), scales, None  # two's complement to an offset of 128
    if kind == "Q4_0":
        minimums, packed = scales * np.float16(-8), blocks[:, :, 2:]  # a power of two: exact
    else:
        minimums, packed = _numbers(blocks[:, :, 2:4]), blocks[:, :, 4:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=2)
    return codes.reshape(len(data), -1), scales, minimums


def _numbers(pairs):
    return np.ascontiguousarray(pairs).view(np.float16)[:, :, 0]
