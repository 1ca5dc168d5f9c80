"""Checks an exported folder without the Poplar SDK: onnx's own checker, then what PopART wants beyond it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import numpy as np

from poptransformer.backends.popart import runner
from poptransformer.backends.popart.folder import OPTIONS_FILE
from poptransformer.backends.popart.operators import ANNOTATIONS, INT64_PLACES, RESERVED, TABLE
from poptransformer.backends.popart.program import GRAPHCORE_OPSET, IR_VERSION, OPSET
from poptransformer.backends.popart.proto import load_onnx
from poptransformer.errors import UserError

_KEYS = (
    "name",
    "model",
    "weights",
    "device",
    "num_replicas",
    "batches_per_step",
    "session_options",
    "anchors",
    "inputs",
    "outputs",
)
_MOST_SHOWN = 20


def check_folder(folder) -> str:
    """Check a folder that write_folder has written; gives a line about what is in it.

    Raises: UserError with every problem.
    """
    folder = pathlib.Path(folder)
    options = _read_options(folder)
    onnx = load_onnx()
    path = folder / options["model"]
    if not path.is_file():
        raise UserError(f"{folder}: there is no {options['model']}")
    try:
        model = onnx.load_model(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError, wherever it lives in this version
        raise UserError(f"{path}: this is no ONNX model: {error}") from None
    problems = list(_files(folder, options))
    if not problems:
        problems = list(check_model(model, options))
    if not problems:
        try:
            onnx.checker.check_model(str(path))  # by path: it then looks into the external data as well
            onnx.shape_inference.infer_shapes(_of_one_replica(model), check_type=True, strict_mode=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            problems = [f"onnx.checker: {str(error).splitlines()[0]}"]
    if problems:
        more = [f"and {len(problems) - _MOST_SHOWN} more"] if len(problems) > _MOST_SHOWN else []
        raise UserError(f"{folder}: " + "; ".join(problems[:_MOST_SHOWN] + more))
    device = options["device"]
    count = sum(1 for _ in _nodes(model.graph))
    size = sum(options["weights"].values()) / 1e6
    ipus = f"{device['num_ipus']} IPU{'s' * (device['num_ipus'] > 1)}"
    return f"{folder}: {options['name']}, {count} nodes, {size:.1f} MB of weights, for {ipus}: ok"


def check_model(model, options) -> Iterator[str]:
    """What PopART would refuse, or read wrongly, in a model; `options` as in options.json."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    if versions != {"": OPSET, "ai.graphcore": GRAPHCORE_OPSET}:
        yield f"opsets {versions}, wanted ai.onnx {OPSET} and ai.graphcore {GRAPHCORE_OPSET}"
    if model.ir_version != IR_VERSION:
        yield f"IR version {model.ir_version}, wanted {IR_VERSION}"
    replicas = options["num_replicas"]
    ipus = options["device"]["num_ipus"] // replicas
    yield from _interface(model.graph, options)
    for node in _nodes(model.graph):
        yield from _node(node, ipus)
    yield from _int64(model.graph)
    for tensor in (*model.graph.initializer, *_constants(model.graph)):
        yield from _tensor(tensor)
    yield from _replicas(model, replicas)


def _read_options(folder):
    path = folder / OPTIONS_FILE
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: this is no JSON: {error}") from None
    lacking = [key for key in _KEYS if not isinstance(options, dict) or key not in options]
    if lacking:
        raise UserError(f"{path}: lacks {', '.join(lacking)}")
    if options.get("format") != runner.FORMAT:
        raise UserError(f"{path}: format {options.get('format')!r}; this version reads {runner.FORMAT}")
    return options


def _files(folder, options):
    for name, size in options["weights"].items():
        path = folder / name
        if not path.is_file():
            yield f"there is no {name}"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes, wanted {size}: was it copied whole?"


def _interface(graph, options):
    named = {value.name for value in (*graph.input, *graph.output)}
    for name in sorted(named):
        for prefix in RESERVED:
            if prefix in name:
                yield f"{name}: {prefix} is reserved by PopART"
    for kind, values in (("inputs", graph.input), ("outputs", graph.output)):
        found = {}
        for value in values:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
            if len(shape) != len(value.type.tensor_type.shape.dim):
                yield f"{value.name}: its shape is not static"
            found[value.name] = shape
        declared = {name: spec["shape"] for name, spec in options[kind].items()}
        if found != declared:
            yield f"{kind} of the model {found} are not those of {OPTIONS_FILE} {declared}"
    lacking = sorted(set(options["anchors"]) - {value.name for value in graph.output})
    if lacking or not options["anchors"]:
        yield f"anchors {options['anchors']}: " + (f"the model has no output {lacking}" if lacking else "there must be one")


def _node(node, ipus):
    where = f"{node.name or node.op_type}"
    known = TABLE.get(node.domain, {}).get(node.op_type)
    if known is None:
        yield f"{where}: {node.domain or 'ai.onnx'}.{node.op_type} is not an operator that programs use"
        return
    types = load_onnx().AttributeProto.AttributeType
    for attribute in node.attribute:
        wanted = (known | ANNOTATIONS).get(attribute.name)
        if wanted is None or types.Name(attribute.type) != wanted:
            kind = types.Name(attribute.type)
            yield f"{where}: attribute {attribute.name} of type {kind}, wanted {wanted or 'none of that name'}"
    if "" in node.input:
        yield f"{where}: an empty input name; PopART looks for a tensor of that name"
    if node.op_type != "Constant":
        stages = [attribute.i for attribute in node.attribute if attribute.name == "__ipu_number"]
        if len(stages) != 1 or not 0 <= stages[0] < ipus:
            yield f"{where}: __ipu_number {stages}, wanted one of 0 .. {ipus - 1}"
    if node.op_type == "Loop":
        yield from _loop(where, node)


def _loop(where, node):
    body = node.attribute[0].g
    if len(body.input) != len(node.input) or len(body.output) != len(node.input) - 1:
        yield (
            f"{where}: {len(node.input)} inputs, a body of {len(body.input)} inputs and {len(body.output)} outputs: wanted as "
            "many inputs, and one output less"
        )
    if body.initializer:
        yield f"{where}: its body has initializers, which PopART does not read"
    if not body.name:
        yield f"{where}: its body has no name"


def _int64(graph):
    """int64 stands for shapes and counts; arithmetic with it meets int32 and is refused."""
    wide = {node.output[0] for node in graph.node if node.op_type == "Constant" and node.attribute[0].t.data_type == 7}
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in wide and (node.op_type, place) not in INT64_PLACES:
                yield f"{node.name}: int64 {name} is computed with"
            if (node.op_type, place) in INT64_PLACES and name not in wide:
                yield f"{node.name}: input {place} must be an int64 Constant of the same graph"
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _int64(attribute.g)


def _tensor(tensor):
    size = int(np.prod(tensor.dims, dtype=np.int64))
    onnx = load_onnx()
    if tensor.data_type == onnx.TensorProto.BOOL and size > 1:
        yield f"{tensor.name or 'a Constant'}: {size} bool elements, which PopART's folding reads as four bytes each"
    width = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 12: 4}.get(tensor.data_type)
    if width is None:
        yield f"{tensor.name or 'a Constant'}: data type {tensor.data_type} does not reach an IPU"
        return
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        data = {entry.key: entry.value for entry in tensor.external_data}
        if int(data.get("length", 0)) != size * width:
            yield f"{tensor.name}: {data.get('length')} bytes of external data, wanted {size * width}"
    elif len(tensor.raw_data) != size * width:
        yield f"{tensor.name or 'a Constant'}: {len(tensor.raw_data)} bytes of raw_data, wanted {size * width}"


def _replicas(model, replicas):
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    for entry in model.metadata_props:
        kind, _, name = entry.key.partition("/")
        shape = shapes.get(name)
        if kind == "__comm_group_type" and entry.value == "1" and (not shape or shape[0] != replicas):
            yield f"{name}: a part for each of {replicas} replicas wants a leading dimension of {replicas}, has {shape}"


def _of_one_replica(model):
    """The model with weights as the graph sees them: what each replica has of its own lies along a first dimension."""
    cut = {entry.key.partition("/")[2] for entry in model.metadata_props if entry.key.startswith("__comm_group_type/")}
    for tensor in model.graph.initializer:
        if tensor.name in cut:
            del tensor.dims[0]
    return model


def _nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _constants(graph):
    return (attribute.t for node in _nodes(graph) for attribute in node.attribute if attribute.HasField("t"))
