"""What goes in and out: DataFlow, AnchorReturnType, PyStepIO, TensorInfo, InputShapeInfo."""

from __future__ import annotations

import numpy as np
from popart_contract.standin.binding import NAMESPACE, bound
from popart_contract.standin.dtypes import NAMES, NUMPY
from popart_contract.standin.errors import popart_exception


@bound("AnchorReturnType")
class AnchorReturnType:
    """When an anchor comes back: "All", "EveryN" with a period, "Final" or "Sum", in any letter case."""

    def __init__(self, anchorReturnTypeString, tileSet, exchangeStrategy, returnPeriod=None):
        kinds = {member.name.lower(): member for member in NAMESPACE["AnchorReturnTypeId"]}
        kind = kinds.get(anchorReturnTypeString.lower())
        if kind is None:
            raise popart_exception(f"unknown anchor return type {anchorReturnTypeString!r}")
        if (kind.name == "EveryN") != (returnPeriod is not None):
            raise popart_exception("EveryN, and no other anchor return type, needs a return period")
        self._id, self._period, self._tile_set, self._strategy = kind, returnPeriod or 1, tileSet, exchangeStrategy

    def id(self):
        """The member of AnchorReturnTypeId."""
        return self._id

    def rp(self):
        """The return period."""
        return self._period

    def tileSet(self):
        """Compute or IO."""
        return self._tile_set

    def exchangeStrategy(self):
        """When the host reads it."""
        return self._strategy


@bound("DataFlow")
class DataFlow:
    """Batches of one run, and the tensors that come back."""

    def __init__(self, batchesPerStep, anchorTensors=None, anchorIds=(), anchorReturnType=None):
        self._batches = batchesPerStep
        self._anchors = dict(anchorTensors) if anchorTensors is not None else dict.fromkeys(anchorIds, anchorReturnType)
        if batchesPerStep < 1:
            raise popart_exception("batchesPerStep must be at least 1")

    def batchesPerStep(self):
        """Batches of one run."""
        return self._batches

    def setBatchesPerStep(self, arg0):
        """Change them."""
        self._batches = arg0

    def anchors(self):
        """Names, sorted: FACTS (i)."""
        return sorted(self._anchors)

    def nAnchors(self):
        """How many there are."""
        return len(self._anchors)

    def isAnchored(self, arg0):
        """Whether a tensor comes back."""
        return arg0 in self._anchors

    def art(self, arg0):
        """Its AnchorReturnType."""
        return self._anchors[arg0]


@bound("PyStepIO")
class PyStepIO:
    """The arrays of one run."""

    def __init__(self, inputs, outputs):
        self._inputs, self._outputs = inputs, outputs

    def enableRuntimeAsserts(self, arg0):
        """The stand-in always checks."""


@bound("PyWeightsIO")
class PyWeightsIO:
    """Arrays that weights are read into."""

    def __init__(self, weights):
        self._weights = weights


@bound("TensorInfo")
class TensorInfo:
    """Type and shape; the type is one of PopART's names or a NumPy dtype."""

    def __init__(self, dtype=None, shape=None, ndarray=None):
        if ndarray is not None:
            if not isinstance(ndarray, np.ndarray):
                raise TypeError(f"popart.TensorInfo takes an ndarray, given {type(ndarray).__name__}")
            dtype, shape = ndarray.dtype, list(ndarray.shape)
        name = dtype if isinstance(dtype, str) else NAMES.get(np.dtype(dtype))
        if name not in NAMESPACE["DataType"].__members__ or name not in NUMPY:
            raise popart_exception(f"TensorInfo: unknown data type {dtype!r}")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise TypeError(f"popart.TensorInfo: a shape is a list of int, given {shape!r}")
        self._name, self._shape = name, tuple(shape)

    def data_type(self):
        """PopART's name of the type."""
        return self._name

    def data_type_lcase(self):
        """The same in small letters."""
        return self._name.lower()

    def shape(self):
        """The sizes."""
        return list(self._shape)

    def rank(self):
        """How many sizes there are."""
        return len(self._shape)

    def nelms(self):
        """How many elements there are."""
        return int(np.prod(self._shape, dtype=np.int64))

    def nbytes(self):
        """Bytes on the host."""
        return self.nelms() * NUMPY[self._name].itemsize

    def dim(self, i):
        """One size."""
        return self._shape[i]


@bound("InputShapeInfo")
class InputShapeInfo:
    """Types and shapes of graph inputs that the model leaves open."""

    def __init__(self):
        self._infos = {}

    def add(self, arg0, arg1):
        """Declare one."""
        self._infos[arg0] = arg1

    def get(self, arg0):
        """What was declared."""
        if arg0 not in self._infos:
            raise popart_exception(f"InputShapeInfo has no {arg0!r}")
        return self._infos[arg0]

    def has(self, arg0):
        """Whether it was declared."""
        return arg0 in self._infos


@bound("InputSettings")
class InputSettings:
    """Only the Builder takes these; the keyword is spelt as PopART spells it."""

    def __init__(self, tileSet=None, exchangeStrategy=None, relicatedStreamMode=None):
        self._values = tileSet, exchangeStrategy, relicatedStreamMode

    def tileSet(self):
        """Compute or IO."""
        return self._values[0]

    def exchangeStrategy(self):
        """When the device reads it."""
        return self._values[1]

    def replicatedStreamMode(self):
        """Replicate or Broadcast."""
        return self._values[2]


@bound("CommGroup")
class CommGroup:
    """Which replicas belong together. Settings reach a model through its metadata; this class only stores."""

    def __init__(self, type=None, replicaGroupSize=0, grouping=None):
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "replicaGroupSize", replicaGroupSize)


@bound("VariableSettings")
class VariableSettings:
    """Stores; a model carries these as metadata."""

    def __init__(self, sharedVariableDomain_=None, retrievalMode_=None, stride=None, groupSize=None, mode=None):
        self._group, self._mode = sharedVariableDomain_, retrievalMode_ or mode

    def getSharedVariableDomain(self):
        """The CommGroup."""
        return self._group

    def getRetrievalMode(self):
        """Which replicas give the value back."""
        return self._mode


def describe(dtype, shape) -> str:
    """A tensor in words: FLOAT[2, 3]."""
    return f"{dtype}{list(shape)}"
