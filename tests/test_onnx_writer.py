"""Graphs as ONNX: valid by onnx's checker, and the standard part gives the reference backend's numbers."""

import subprocess
import sys

import numpy as np
import pytest
from run_op import FLOATS, build_graph, normal, reference
from tolerance import assert_close

from poptransformer import Session, UserError, ops
from poptransformer.graph import Graph, Parameter, State
from poptransformer.onnx_writer import DOMAIN, to_onnx

onnx = pytest.importorskip("onnx", reason="pip install onnx")
onnx_reference = pytest.importorskip("onnx.reference")

f32, i32 = np.float32, np.int32
POCKET = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 64}
ELEMENT_TYPES = {"float32": onnx.TensorProto.FLOAT, "bfloat16": onnx.TensorProto.BFLOAT16, "float16": onnx.TensorProto.FLOAT16}
OWN = {
    "packed_linear", "packed_gather", "attention", "rope", "sample", "repetition_penalty", "mark_tokens", "token_log_prob",
    "token_shift", "wkv", "all_reduce", "all_gather", "rank_index",
}  # fmt: skip


def session(precision="fp32", **options):
    return Session(
        POCKET, backend="reference", precision=precision, random_weights=True, batch_size=2, max_length=32, **options
    )


def all_nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["prefill_8", "decode", "logits_8", "score_8", "generate_8"])
def test_gpt2_passes_the_checker(name, precision, tmp_path):
    graph = session(precision).graph(name)
    path = tmp_path / "graph.onnx"
    graph.save_onnx(path)
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    assert path.stat().st_size < 200_000, "weights are not written"
    inputs = {value.name: value for value in model.graph.input}
    assert {*graph.inputs, *graph.parameters, *graph.states} == set(inputs)
    for key, (parameter, _) in graph.parameters.items():
        tensor = inputs[key].type.tensor_type
        assert tuple(size.dim_value for size in tensor.shape.dim) == parameter.shape
        assert tensor.elem_type == ELEMENT_TYPES[parameter.dtype.name]
    assert {value.name for value in model.graph.output} == {*graph.outputs, *(f"{key}.next" for key in graph.state_updates)}
    nodes = list(all_nodes(model.graph))
    assert len({node.name for node in nodes}) == len(nodes)
    assert {node.op_type for node in nodes if node.domain == DOMAIN} <= OWN
    assert all(node.domain in ("", DOMAIN) for node in nodes)


def test_nodes_carry_their_layer_and_attributes():
    model = to_onnx(session().graph("decode"))
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    body = loop.attribute[0].g
    attention = [node for node in body.node if node.op_type == "attention"]
    assert [node.name for node in attention] == ["transformer.h.0.attn/attention", "transformer.h.1.attn/attention"]
    (scale,) = attention[0].attribute
    assert scale.name == "scale" and scale.f == pytest.approx(0.5)
    linears = {node.input[1]: node for node in body.node if node.op_type == "MatMul"}
    turned = {node.output[0]: node.input[0] for node in body.node if node.op_type == "Transpose"}
    weights = {turned[name] for name in linears}
    assert {"transformer.h.0.attn.c_attn.weight", "transformer.h.1.mlp.c_proj.weight", "transformer.wte.weight"} <= weights
    gelu = [node for node in body.node if node.op_type == "Gelu"]
    assert [node.attribute[0].s for node in gelu] == [b"tanh"] * 2


def test_options_of_attention():
    """An option is an attribute or an input, and none where it was left out."""
    graph = Graph("test")
    x, cache = graph.input("x", (1, 2, 4, 3), f32), graph.input("cache", (1, 4, 8, 3), f32)
    length, slopes = graph.input("length", (1,), i32), graph.constant(np.ones(4, f32))
    required = (x, x, x, cache, cache, length, length, 0.5)
    graph.output("slopes and window", ops.attention(*required, window=7, alibi_slopes=slopes)[0])
    graph.output("context", ops.attention(*required, context_len=length)[0])
    model = to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    both, context = model.graph.node[:2]
    assert {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in both.attribute} == {
        "scale": 0.5, "window": 7,
    }  # fmt: skip
    assert list(both.input[7:]) == ["", slopes.name]
    assert [attribute.name for attribute in context.attribute] == ["scale"] and list(context.input[7:]) == ["length"]


def run_by_onnx(graph, inputs):
    """Outputs of onnx's own evaluator in float32."""
    model = to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    results = onnx_reference.ReferenceEvaluator(model).run(None, inputs)
    return dict(zip((value.name for value in model.graph.output), results, strict=True))


def everything(x, y, weight, bias, ids, start, flag):
    """Each op that is written as standard ONNX."""
    results = {name: getattr(ops, name)(x) for name in ("neg", "exp", "tanh", "sigmoid", "relu", "silu", "gelu", "gelu_tanh")}
    positive = ops.exp(x)
    results |= {name: getattr(ops, name)(positive) for name in ("log", "sqrt")}
    pairs = ("add", "sub", "mul", "div", "minimum", "maximum", "equal", "less", "less_equal", "greater", "greater_equal")
    results |= {name: getattr(ops, name)(x, y) for name in pairs}
    left, right = ops.split(x, (1, 3))
    return results | {
        "logic": ops.logical_or(ops.logical_and(x < y, flag), ops.logical_not(flag)),
        "select": ops.select(flag, x, y),
        "cast": ops.cast(x, i32),
        "reshape": ops.reshape(x, (2, -1)),
        "transpose": ops.transpose(x, (2, 0, 1)),
        "broadcast_to": ops.broadcast_to(y, (5, *x.shape)),
        "concat": ops.concat([right, left]),
        "slice": ops.slice_axis(x, 1, 3),
        "dynamic_update": ops.dynamic_update(x, ops.slice_axis(x, 0, 2, axis=1), start, axis=1),
        "gather": ops.gather(x, ids),
        "reduce_sum": ops.reduce_sum(x, axis=1),
        "reduce_max": ops.reduce_max(x),
        "reduce_any": ops.reduce_any(x < y, axis=0),
        "argmax": ops.argmax(x, axis=1),
        "argmax of bool": ops.argmax(x < y),
        "matmul": ops.matmul(x, ops.transpose(y, (0, 2, 1))),
        "linear": ops.linear(x, weight, bias),
        "linear without bias": ops.linear(x, weight, out_dtype=f32),
        "softmax": ops.softmax(x),
        "layer_norm": ops.layer_norm(x, ops.slice_axis(bias, 0, 4), ops.slice_axis(bias, 1, 5), 1e-3),
        "rms_norm": ops.rms_norm(x, ops.slice_axis(bias, 0, 4), 1e-3),
    }


def arrays(dtype):
    shapes = {"x": (2, 3, 4), "y": (2, 3, 4), "weight": (5, 4), "bias": (5,)}
    floats = {name: normal(shape, dtype, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return floats | {"ids": np.array([[1, 0, 1]], i32), "start": i32(2), "flag": np.array([[True], [False], [True]])}


def test_standard_ops_equal_the_reference():
    inputs = arrays(f32)
    graph = build_graph(everything, **inputs)
    used = {node.op for node in graph.walk()}
    assert used == set(ops.OPS) - OWN - {"loop"}
    engine = reference()
    engine.compile("all", graph)
    wanted, actual = engine.run("all", inputs), run_by_onnx(graph, {key: np.asarray(array) for key, array in inputs.items()})
    for key, value in wanted.items():
        assert_close(actual[key], value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_standard_ops_in_16_bits_pass_the_checker(dtype):
    onnx.checker.check_model(to_onnx(build_graph(everything, **arrays(FLOATS[dtype]))), full_check=True)


def test_float16_products_are_summed_in_float32():
    x, weight, bias = np.ones((1, 4096), np.float16), np.ones((2, 4096), np.float16), np.array([0.5, 1], np.float32)

    def build(x, weight, bias):
        return {
            "linear": ops.linear(x, weight, bias, out_dtype=f32),
            "narrow": ops.linear(x, weight),
            "sum": ops.reduce_sum(x),
            "silu": ops.silu(x),
            "softmax": ops.softmax(x),
            "matmul": ops.matmul(x, ops.transpose(weight, (1, 0)), out_dtype=f32),
            "layer_norm": ops.layer_norm(ops.slice_axis(x, 0, 2), bias, bias, 1e-5),
            "rms_norm": ops.rms_norm(x * 300, ops.reshape(x, (-1,)), 1e-5),
        }

    inputs = {"x": x, "weight": weight, "bias": bias}
    graph, engine = build_graph(build, **inputs), reference()
    engine.compile("products", graph)
    wanted, actual = engine.run("products", inputs), run_by_onnx(graph, inputs)
    assert actual["linear"].tolist() == [[4096.5, 4097]]
    for key, value in wanted.items():
        assert_close(actual[key], value)


def test_loops_states_parameters_and_constants():
    """A loop in a loop, an input that is an output, one value under two names, a state that is only read."""
    graph = Graph("counting")
    x, go = graph.input("x", (2,), f32), graph.input("go", (), bool)
    weight = graph.parameter(Parameter("layer.weight", (2,), np.dtype(f32), load=lambda rank: np.array([1, 10], f32)))
    total, kept = State("total", (2,), np.dtype(f32)), State("kept", (2,), np.dtype(f32))
    with graph.scope("layer"):

        def outer(step, y, n):
            (y,) = ops.loop(2, go, [y], lambda i, y: (i < 9, y + weight * ops.cast(i + step, f32)))
            return step < 2, y, n

        y, n = ops.loop(5, go, [x, graph.constant(7)], outer)
    after = graph.state(total) + y
    graph.update_state(total, after)
    graph.output("y", y)
    graph.output("x again", x)
    graph.output("n", n)
    graph.output("first", after)
    graph.output("second", after)
    graph.output("kept", graph.state(kept) + 1)
    engine = reference()
    engine.load([graph.parameters["layer.weight"][0]])
    engine.compile("counting", graph)
    given = {"x": np.array([1, 2], f32), "go": np.True_}
    wanted = engine.run("counting", given)
    more = {"layer.weight": np.array([1, 10], f32), "total": np.zeros(2, f32), "kept": np.zeros(2, f32)}
    actual = run_by_onnx(graph, {key: np.asarray(array) for key, array in (given | more).items()})
    assert {"total.next", "y", "x again", "first", "second"} <= set(actual)
    for key, value in wanted.items():
        # the output called as the state is gets another name
        assert_close(np.asarray(actual["kept:1" if key == "kept" else key]), value)
    assert_close(actual["total.next"], wanted["first"])


def test_a_graph_without_nodes_and_one_of_own_ops():
    def build(x, ids):
        return {"same": x, "logprob": ops.token_log_prob(x, ids)}

    model = to_onnx(build_graph(build, x=np.zeros((2, 3), f32), ids=np.zeros(2, i32)))
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["token_log_prob", "Identity"]


def test_without_onnx(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match="pip install onnx"):
        build_graph(ops.neg, x=np.zeros(2, f32)).save_onnx(tmp_path / "graph.onnx")
    assert not list(tmp_path.iterdir())


def test_the_writer_is_imported_only_when_a_graph_is_saved():
    code = "import sys, poptransformer, poptransformer.ops, poptransformer.models; print('onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
