"""GGUF files that tests write, with the gguf package's own writer."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install -r requirements.txt")

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def write(path, architecture="llama", metadata=None, tensors=None):
    """Write a file and return its path.

    Args:
      architecture: general.architecture; None leaves it out.
      metadata: key -> value; whole numbers become uint32, and a numpy scalar or (value, gguf.GGUFValueType) what it says.
      tensors: name -> array of floats, stored as they are, or (array of bytes, name of its type).
    """
    writer = gguf.GGUFWriter(path, architecture or "none")
    if architecture is None:
        del writer.kv_data[0]["general.architecture"]
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, *_typed(value))
    for name, tensor in (tensors or {}).items():
        array, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, array, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _typed(value):
    kinds = gguf.GGUFValueType
    if isinstance(value, tuple):
        return value
    if isinstance(value, bool):
        return value, kinds.BOOL
    if isinstance(value, int):
        return value, kinds.UINT32
    if isinstance(value, float):
        return value, kinds.FLOAT32
    if isinstance(value, list):
        return value, kinds.ARRAY
    return value, kinds.STRING


def random_blocks(kind, rows, columns, seed=0):
    """Bytes of a quantised matrix: anything, but scales of about 1/100."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8)
    at = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for begin in at:
        scales = rng.normal(0.01, 0.003, len(blocks)).astype(np.float16)
        blocks[:, begin : begin + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(kind, data):
    """Dequantise bytes value by value, as ggml's dequantize_row functions do; returns float32, flat.

    Written from the layouts in ggml-common.h, independently of the gguf package's NumPy code.
    """
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.ascontiguousarray(data).reshape(-1, block_bytes)
    return np.float32([value for block in blocks for value in _BLOCKS[kind](block)])


def _f16(block, at):
    return np.float32(block[at : at + 2].view(np.float16)[0])


def _nibbles(block, at, count):
    low_then_high = [block[at : at + count] & 15, block[at : at + count] >> 4]
    return np.concatenate(low_then_high).astype(np.float32)


def _fifth_bits(block, at):
    word = int.from_bytes(block[at : at + 4].tobytes(), "little")
    return np.float32([(word >> i & 1) << 4 for i in range(32)])


def _six_bit_scales(packed):
    """(scale, minimum) of each of 8 sub-blocks out of 12 bytes."""
    low = [(int(packed[j]) & 63, int(packed[j + 4]) & 63) for j in range(4)]
    high = [
        (int(packed[j + 8]) & 15 | int(packed[j]) >> 6 << 4, int(packed[j + 8]) >> 4 | int(packed[j + 4]) >> 6 << 4)
        for j in range(4)
    ]
    return low + high


def _q4_k(block, bits=None):
    scale, minimum = _f16(block, 0), _f16(block, 2)
    nibbles = block[-128:]
    for j, (times, less) in enumerate(_six_bit_scales(block[4:16])):
        part = nibbles[32 * (j // 2) : 32 * (j // 2) + 32]
        for i in range(32):
            number = int(part[i]) >> 4 if j % 2 else int(part[i]) & 15
            if bits is not None:
                number += (int(bits[i]) >> j & 1) << 4
            yield scale * np.float32(times) * np.float32(number) - minimum * np.float32(less)


def _q6_k(block):
    low, high, scales, scale = block[:128], block[128:192], block[192:208].view(np.int8), _f16(block, 208)
    for i in range(256):
        half, place = divmod(i, 128)
        quarter, lane = divmod(place, 32)
        four = int(low[64 * half + 32 * (quarter % 2) + lane]) >> (4 if quarter > 1 else 0) & 15
        two = int(high[32 * half + lane]) >> 2 * quarter & 3
        yield scale * np.float32(scales[i // 16]) * np.float32((four | two << 4) - 32)


_BLOCKS = {
    "Q4_0": lambda block: _f16(block, 0) * (_nibbles(block, 2, 16) - 8),
    "Q4_1": lambda block: _f16(block, 0) * _nibbles(block, 4, 16) + _f16(block, 2),
    "Q5_0": lambda block: _f16(block, 0) * (_nibbles(block, 6, 16) + _fifth_bits(block, 2) - 16),
    "Q5_1": lambda block: _f16(block, 0) * (_nibbles(block, 8, 16) + _fifth_bits(block, 4)) + _f16(block, 2),
    "Q8_0": lambda block: _f16(block, 0) * block[2:].view(np.int8).astype(np.float32),
    "Q4_K": _q4_k,
    "Q5_K": lambda block: _q4_k(block, block[16:48]),
    "Q6_K": _q6_k,
}
