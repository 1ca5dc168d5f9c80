"""Writing one safetensors file: the header first, then tensors one at a time, so that only one of them is held.

The data begins at a multiple of 64 bytes, and tensors whose size is one come first: each of those can be used where it lies in
a mapping of the file (see TensorFile.map). Layout of the format: safetensors_file.py.
"""

import json
import math

import numpy as np

from poptransformer.checkpoint.safetensors_file import DTYPES
from poptransformer.checkpoint.tensor_file import ALIGNMENT_BYTES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_safetensors(path, tensors, metadata):
    """Write a file.

    Args:
      path: where; overwritten if it is there.
      tensors: name -> (shape, NumPy dtype, function without arguments that returns the array).
      metadata: dict of strings.
    Raises: OSError as writing does.
    """
    sizes = {name: math.prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype, _) in tensors.items()}
    order = sorted(tensors, key=lambda name: sizes[name] % ALIGNMENT_BYTES != 0)
    header, end = {"__metadata__": metadata}, 0
    for name in order:
        shape, dtype, _ = tensors[name]
        header[name] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT_BYTES)  # the format allows spaces at the end
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            shape, dtype, read = tensors[name]
            array = read()
            assert array.shape == tuple(shape) and array.dtype == dtype, f"{name}: {array.dtype}{array.shape}"
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
