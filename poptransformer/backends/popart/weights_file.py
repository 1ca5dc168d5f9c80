"""Weights of a program: inside the model, or in a file beside it that the model refers to."""

from __future__ import annotations

import hashlib
import os
import pathlib

import numpy as np

from poptransformer.backends.popart.program import Program
from poptransformer.backends.popart.tensors import Weight

INSIDE_UP_TO = 1 << 30  # bytes; protobuf ends at 2 GiB
WEIGHTS_FILE = "weights.bin"


def stored_array(weight: Weight, num_replicas: int) -> np.ndarray:
    """A weight's initializer: one rank's array, or all ranks' arrays one after the other."""
    ranks = range(num_replicas) if weight.is_cut and num_replicas > 1 else (None,)
    parts = []
    for rank in ranks:
        part = np.asarray(weight.load(rank or 0))
        assert part.shape == weight.shape, f"{weight.name}: loaded {part.shape}, the graph has {weight.shape}"
        parts.append(part.astype(weight.dtype.newbyteorder("<"), copy=False))
    return np.asarray(parts[0] if ranks == (None,) else np.stack(parts), order="C")


def put_inside(program: Program, progress=None) -> str:
    """Read the weights into the model; gives the digest of their values."""
    digest = hashlib.sha256()
    for weight, proto in zip(program.weights, program.model.graph.initializer, strict=True):
        proto.raw_data = stored_array(weight, program.num_replicas).tobytes()
        digest.update(proto.raw_data)
        if progress:
            progress(weight)
    return digest.hexdigest()


def put_beside(program: Program, path: pathlib.Path, location: str, progress=None) -> str:
    """Write the weights to a file, one at a time, and let the model refer to it; gives the digest of their values.

    Args:
      path: the file.
      location: how the model names it. PopART opens that as it stands, from the working directory.
    """
    digest, offset = hashlib.sha256(), 0
    whole, path = path, path.with_name(path.name + ".part")
    with open(path, "wb") as file:
        for weight, proto in zip(program.weights, program.model.graph.initializer, strict=True):
            data = stored_array(weight, program.num_replicas).tobytes()
            file.write(data)
            digest.update(data)
            proto.ClearField("external_data")
            proto.data_location = proto.EXTERNAL
            for key, value in (("location", location), ("offset", offset), ("length", len(data))):
                proto.external_data.add(key=key, value=str(value))
            offset += len(data)
            if progress:
                progress(weight)
    os.replace(path, whole)
    return digest.hexdigest()
