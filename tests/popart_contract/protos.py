"""Small hand-made models, and what a session is given with them."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
from onnx import helper, numpy_helper
from popart_contract.standin.binding import NAMESPACE
from popart_contract.standin.machine import MACHINE

FLOAT, FLOAT16, INT32, INT64, BOOL = (
    getattr(onnx.TensorProto, name) for name in ("FLOAT", "FLOAT16", "INT32", "INT64", "BOOL")
)
GRAPHCORE = "ai.graphcore"


def node(kind, inputs, outputs, domain="", **attributes):
    """A NodeProto. Names of inputs and outputs are given as one string with spaces, or as a list."""
    inputs, outputs = (names.split() if isinstance(names, str) else names for names in (inputs, outputs))
    made = helper.make_node(kind, inputs, outputs, domain=domain)
    for name, value in attributes.items():
        made.attribute.append(value if isinstance(value, onnx.AttributeProto) else helper.make_attribute(name, value))
    return made


def tensor(name, array):
    """A TensorProto with raw_data."""
    return numpy_helper.from_array(np.array(array, order="C"), name)


def constant(name, array):
    """A Constant node."""
    return node("Constant", "", name, value=tensor(name, np.asarray(array)))


def value(name, kind=FLOAT, shape=()):
    """A ValueInfoProto."""
    return helper.make_tensor_value_info(name, kind, shape)


def graph(nodes, inputs, outputs, weights=(), name="body"):
    """A GraphProto; outputs are given by name."""
    weights = [tensor(key, array) for key, array in dict(weights).items()]
    return helper.make_graph(list(nodes), name, list(inputs), [value(key) for key in outputs], weights)


def model(nodes, inputs=None, outputs=("y",), weights=(), metadata=(), opset=10, ir_version=4, more_opsets=()):
    """A ModelProto; by default with the input x FLOAT[2, 3]."""
    inputs = [value("x", FLOAT, (2, 3))] if inputs is None else inputs
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(GRAPHCORE, 1), *more_opsets]
    made = helper.make_model(graph(nodes, inputs, outputs, weights, "main"), opset_imports=opsets, ir_version=ir_version)
    helper.set_model_props(made, dict(metadata))
    return made


@dataclasses.dataclass
class Given:
    """A model and its session.

    Attributes:
      proto: the model, or its bytes, or a path.
      options: SessionOptions by name.
      device: kind and number of IPUs.
      anchors: names, or name -> return type ("EveryN" with its period in a tuple).
      sdk: the version of the SDK.
      shapes: InputShapeInfo as name -> (type, shape).
    """

    proto: object
    options: dict = dataclasses.field(default_factory=dict)
    device: tuple[str, int] = ("Ipu", 1)
    anchors: object = ("y",)
    batches: int = 1
    sdk: str = "3.4.0"
    shapes: dict = dataclasses.field(default_factory=dict)

    def session(self, name="inference"):
        """Make the session. Raises: what the stand-in raises."""
        MACHINE.sdk = self.sdk
        popart = NAMESPACE["popart"]
        options, shapes = popart.SessionOptions(), popart.InputShapeInfo()
        for key, option in self.options.items():
            setattr(options, key, popart.VirtualGraphMode[option] if key == "virtualGraphMode" else option)
        for key, (kind, shape) in self.shapes.items():
            shapes.add(key, popart.TensorInfo(kind, shape))
        anchors = self.anchors if isinstance(self.anchors, dict) else dict.fromkeys(self.anchors, "All")
        kinds = {key: (kind,) if isinstance(kind, str) else kind for key, kind in anchors.items()}
        flow = popart.DataFlow(self.batches, {key: popart.AnchorReturnType(*kind) for key, kind in kinds.items()})
        proto = self.proto.SerializeToString() if isinstance(self.proto, onnx.ModelProto) else self.proto
        return popart.InferenceSession(
            fnModel=proto, dataFlow=flow, deviceInfo=device(*self.device), inputShapeInfo=shapes, userOptions=options, name=name
        )

    def run(self, **inputs):
        """Make a session, run once, and give the anchors."""
        return run(self.session(), **inputs)


def device(kind="Ipu", num_ipus=1):
    """A device of one kind."""
    manager = NAMESPACE["DeviceManager"]()
    if kind == "Ipu":
        on_demand = NAMESPACE["DeviceConnectionType"].OnDemand
        return manager.acquireAvailableDevice(numIpus=num_ipus, connectionType=on_demand)
    if kind == "IpuModel":
        return manager.createIpuModelDevice({"numIPUs": num_ipus})
    return manager.createCpuDevice() if kind == "Cpu" else manager.createOfflineIPUDevice({"numIPUs": num_ipus})


def run(session, **inputs):
    """Prepare a session, run it on the arrays and give the anchors."""
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    session.run(NAMESPACE["PyStepIO"](inputs, anchors))
    return anchors


def loop(trips="trips", condition="go", inputs="x", outputs="y", body=None, **attributes):
    """A Loop node over one body."""
    return node("Loop", f"{trips} {condition} {inputs}", outputs, body=body, **attributes)


def body(nodes=None, inputs="step cond value", outputs="cond next", name="body", weights=()):
    """A Loop body; by default next = value + value."""
    nodes = [node("Add", "value value", "next")] if nodes is None else nodes
    return graph(nodes, [value(key) for key in inputs.split()], outputs.split(), weights, name)


def trip_constants(number=3, go=True):
    """Constant nodes `trips` and `go`."""
    return [constant("trips", np.int32(number)), constant("go", np.bool_(go))]
