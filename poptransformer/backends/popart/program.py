"""Program: one graph as the ONNX model that PopART compiles, with its weights still to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from poptransformer.backends.popart.emitter import GRAPHCORE, Emitter, live_nodes, value_info
from poptransformer.backends.popart.lowering import Walk, load_families
from poptransformer.backends.popart.proto import load_onnx
from poptransformer.backends.popart.tensors import ONNX_TYPES, Tensor, Weight
from poptransformer.errors import UnsupportedError
from poptransformer.graph import Graph, Parameter, Spec

OPSET = 10  # of ai.onnx; in 11 pads and limits would be inputs that must be float32
GRAPHCORE_OPSET = 1
IR_VERSION = 4  # what PopART's own Builder writes; initializers need not be inputs from here on

# Metadata of a tensor whose replicas differ: communication groups of the kind Consecutive, each of one replica, read back once
# for each group. See VariableSettings in PopART.
EACH_REPLICA_ITS_OWN = {"__comm_group_type": 1, "__comm_group_size": 1, "__variable_settings": 0}
BROADCAST = 0  # replicated stream mode: the host gives one array for all replicas


@dataclasses.dataclass
class Program:
    """A model and what goes in and out.

    Attributes:
      name: of the graph.
      model: onnx.ModelProto whose initializers have names, shapes and types, but no bytes yet.
      weights: the initializers in their order.
      inputs, outputs: specs by name, for one batch on one replica. Inputs that no node reads are left out.
      num_stages, num_replicas: IPUs within a replica that nodes are placed on, and replicas.
    """

    name: str
    model: object
    weights: list[Weight]
    inputs: dict[str, Spec]
    outputs: dict[str, Spec]
    num_stages: int
    num_replicas: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all initializers, all replicas' parts together."""
        return sum(weight.num_bytes(self.num_replicas) for weight in self.weights)


def build_program(
    graph: Graph, load: Callable[[Parameter, int], np.ndarray], num_replicas: int = 1, use_pipeline: bool = False
) -> Program:
    """Write a graph as a PopART model.

    States begin as zeros in each run and are forgotten after it.

    Args:
      load: parameter, rank -> array; called when the weights are written.
      num_replicas: ranks that run the program.
      use_pipeline: whether nodes get a pipeline stage, that of their IPU.
    Raises: UnsupportedError for a dtype or an op that PopART does not have, with the layer's name.
    """
    load_families()
    _check_dtypes(graph)
    num_stages = max((node.stage for node in graph.walk()), default=0) + 1
    emitter = Emitter(num_replicas, use_pipeline=use_pipeline)
    declared = {name: Tensor(emitter.unique(name), value.spec) for name, value in graph.inputs.items()}
    names = {name: emitter.unique(name) for name in graph.outputs}
    assert all(name == unique for name, unique in names.items()), f"graph {graph.name!r}: an input and an output share a name"
    emitter._counts.update(dict.fromkeys(names, 0))  # taken again when the outputs are written
    fed = declared
    if num_stages > 1:  # a stream of the host feeds one IPU, the others get copies from there
        fed = {name: emitter.node("Identity", [tensor], [tensor.spec])[0] for name, tensor in declared.items()}
    emitter.fed_integers = next((tensor for tensor in fed.values() if tensor.dtype == np.int32 and 0 not in tensor.shape), None)
    results = Walk(graph, load, fed).write(emitter)
    with emitter.at("", num_stages - 1):
        emitter.nodes = live_nodes(emitter.nodes, emitter.finish(results, list(names)))
    return _assemble(graph, emitter, declared, num_stages)


def _assemble(graph, emitter, declared, num_stages):
    onnx = load_onnx()
    read = {name for node in _all_nodes(emitter.nodes) for name in node.input}
    inputs = {name: tensor.spec for name, tensor in declared.items() if tensor.name in read}
    outputs = {name: value.spec for name, value in graph.outputs.items()}
    proto = onnx.GraphProto(name=graph.name, node=emitter.nodes)
    proto.input.extend(value_info(name, spec) for name, spec in inputs.items())
    proto.output.extend(value_info(name, spec) for name, spec in outputs.items())
    weights = [weight for weight in emitter.weights.values() if weight.name in read]
    replicas = emitter.num_replicas
    for weight in weights:
        kind = ONNX_TYPES[weight.dtype.name]
        proto.initializer.add(name=weight.name, data_type=kind, dims=weight.stored_shape(replicas))
    model = onnx.ModelProto(ir_version=IR_VERSION, producer_name="poptransformer", graph=proto)
    model.opset_import.add(domain="", version=OPSET)
    model.opset_import.add(domain=GRAPHCORE, version=GRAPHCORE_OPSET)
    if replicas > 1:
        for name in inputs:
            model.metadata_props.add(key=f"__replicated_stream_mode/{name}", value=str(BROADCAST))
        for weight in weights:
            if weight.is_cut:
                for key, value in EACH_REPLICA_ITS_OWN.items():
                    model.metadata_props.add(key=f"{key}/{weight.name}", value=str(value))
    return Program(graph.name, model, weights, inputs, outputs, num_stages, replicas)


def _all_nodes(nodes):
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                yield from _all_nodes(attribute.g.node)


def _check_dtypes(graph):
    """Refuse dtypes that PopART does not lower, all of them in one message."""
    values = [*graph.inputs.values(), *graph.constants, *(value for _, value in graph.parameters.values())]
    values += [value for _, value in graph.states.values()]
    values += [value for node in graph.walk() for value in node.outputs]
    wrong = sorted({value.dtype.name for value in values} - (set(ONNX_TYPES) - {"int64"}))
    if wrong:
        raise UnsupportedError(
            f"graph {graph.name!r}: backend popart has no {', '.join(wrong)} (has float32, float16, 8, 16 and 32 bit integers, "
            "bool); set precision (and kv_cache) to fp16 or fp32"
        )
