"""From fnModel to a typed program: parse, rules, weights of each replica, types."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from popart_contract.standin import dtypes
from popart_contract.standin.errors import Refusal, popart_exception, refuse
from popart_contract.standin.machine import MACHINE
from popart_contract.standin.model import ModelView, tensor_array
from popart_contract.standin.rules import MODEL_RULES
from popart_contract.standin.typing import Tensor, TypedGraph, type_graph

PATH_LIMIT = 10000  # characters; longer strings are never paths: FACTS (h)


@dataclasses.dataclass(eq=False)
class Program:
    """A model that every rule accepts.

    Attributes:
      view: the model.
      graph: the main graph, typed.
      weights: name -> one array for each replica, as the graph sees it; only initializers that some node takes.
      streams: name -> Tensor, what the host feeds.
    """

    view: ModelView
    graph: TypedGraph
    weights: dict[str, list[np.ndarray]]
    streams: dict[str, Tensor]


def read_proto(fn_model) -> onnx.ModelProto:
    """Bytes of a ModelProto, or a path to one."""
    if isinstance(fn_model, str):
        if len(fn_model) > PATH_LIMIT or not os.path.isfile(fn_model):
            refuse("fact_h_model_is_bytes_or_a_path", f"no file {fn_model[:80]!r}")
        with open(fn_model, "rb") as file:
            fn_model = file.read()
    if not isinstance(fn_model, bytes):
        refuse("fact_h_model_is_bytes_or_a_path", f"fnModel is {type(fn_model).__name__}")
    if len(fn_model) > MACHINE.proto_limit:
        refuse("fact_h_protos_fit_protobuf", f"{len(fn_model)} bytes, protobuf reads {MACHINE.proto_limit}")
    try:
        return onnx.ModelProto.FromString(fn_model)
    except DecodeError:
        refuse("fact_h_model_is_bytes_or_a_path", "the bytes are no ModelProto")


def load(proto, options, device, data_flow, shapes) -> Program:
    """Apply every rule and type the graph.

    Raises: Refusal with all problems. Model rules come first; types are looked at when those have nothing to say.
    """
    view = ModelView(proto, options, device.numIpus, device.type.name, data_flow, shapes, MACHINE.is_3_2)
    problems = [(name, text) for name, rule in MODEL_RULES.items() for text in rule(view)]
    if problems:
        raise Refusal(problems)
    streams = {name: _stream(view, name) for name in view.streams}
    weights, given = {}, dict(streams)
    for name in [name for name in view.initializers if name in view.used]:
        weights[name] = _per_replica(view, name)
        array = weights[name][0]
        is_constant = options.constantWeights and view.group(name).count == 1
        given[name] = Tensor(dtypes.name_of(array.dtype), array.shape, array if is_constant else None)
        given[name] = given[name] if is_constant else dataclasses.replace(given[name], array=None)
    graph = type_graph(view, view.main, given, lambda rule, text: problems.append((rule, text)), tensor_array)
    if problems:
        raise Refusal(problems)
    for name, tensor in graph.types.items():
        if tensor.dtype not in dtypes.LOWERED | dtypes.NARROWED:
            raise popart_exception(f"{name} is {tensor}, which is not lowered")
    return Program(view, graph, weights, streams)


def _stream(view, name):
    if view.shapes.has(name):
        info = view.shapes.get(name)
        return Tensor(info.data_type(), tuple(info.shape()))
    kind = view.streams[name].type.tensor_type
    return Tensor(dtypes.ONNX_NAMES[kind.elem_type], tuple(dimension.dim_value for dimension in kind.shape.dim))


def _per_replica(view, name):
    """The value of an initializer on each replica: FACTS (b)."""
    array, group = tensor_array(view.initializers[name], _read_external), view.group(name)
    if group.count == 1:
        return [array] * max(view.replicas, 1)
    parts = list(array)
    return [parts[group.group_of(replica)] for replica in range(view.replicas)]


def _read_external(tensor):
    where = {entry.key: entry.value for entry in tensor.external_data}
    with open(where["location"], "rb") as file:
        file.seek(int(where["offset"]))
        return file.read(int(where["length"]))
