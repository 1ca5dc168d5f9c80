"""One safetensors file: a JSON header, checked when opened, then tensors read one at a time.

Layout: 8 bytes little-endian length of the header, the header (name -> dtype, shape, data_offsets), then the data.
"""

import json
import math
import os

import ml_dtypes
import numpy as np

from poptransformer.checkpoint.tensor_file import TensorEntry, TensorFile
from poptransformer.errors import UserError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class SafetensorsFile(TensorFile):
    """A safetensors file. ``metadata`` is what its header says about the file, a dict of strings."""

    readable = tuple(DTYPES)

    def _read_entries(self):
        entries, self.metadata = _read_header(self.path, self._fd, self._size)
        return entries


def _read_header(path, fd, size):
    """Return (name -> TensorEntry, metadata) of a file, all of it checked."""
    head = os.pread(fd, 8, 0)
    if len(head) < 8:
        raise UserError(f"{path}: truncated: {size} bytes, but a safetensors file starts with 8 bytes of header length")
    header_bytes = int.from_bytes(head, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise UserError(f"{path}: not a safetensors file: its first 8 bytes give a header of {header_bytes} bytes")
    if 8 + header_bytes > size:
        raise UserError(f"{path}: truncated: the header needs {8 + header_bytes} bytes, the file has {size}")
    try:
        header = json.loads(os.pread(fd, header_bytes, 8), object_pairs_hook=_no_twins)
        if not isinstance(header, dict):
            raise ValueError("not a JSON object")
        metadata = header.pop("__metadata__", None) or {}
        entries = {name: _entry(name, fields, 8 + header_bytes) for name, fields in header.items()}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: bad safetensors header: {error}") from error

    start = 8 + header_bytes
    end, previous = start, None
    in_order = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes))
    for name, entry in in_order:
        if entry.begin < end:
            raise UserError(f"{path}: bad safetensors header: {name} overlaps {previous}, which ends at byte {end - start}")
        if entry.begin > end:
            raise UserError(
                f"{path}: bad safetensors header: bytes {end - start} to {entry.begin - start}, before {name}, are no tensor's"
            )
        end, previous = entry.begin + entry.num_bytes, name
    if end > size:
        raise UserError(f"{path}: truncated: its header describes {end} bytes, the file has {size}; fetch it again")
    if end < size:
        raise UserError(f"{path}: its header describes {end} bytes, but the file has {size}; fetch it again")
    return entries, metadata


def _no_twins(pairs):
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return fields


def _entry(name, fields, data_start):
    if not isinstance(fields, dict):
        raise ValueError(f"{name} is not described by an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} lacks a valid dtype, shape or data_offsets")
    begin, end = offsets
    if dtype in DTYPES:
        wanted = math.prod(shape) * DTYPES[dtype].itemsize
    else:
        wanted = end - begin  # its size is not ours to know; reading it is refused
    if end < begin or end - begin != wanted:
        raise ValueError(f"{name} takes bytes {begin} to {end}, but {dtype} of shape {tuple(shape)} needs {wanted}")
    held = DTYPES.get(dtype)
    return TensorEntry(tuple(shape), held, str(held or dtype), data_start + begin, wanted)


def _are_counts(values):
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
