"""What the stand-in computes: loops, replicas, batches, and where PopART's operators differ from ONNX's."""

import math

import numpy as np
import pytest
from onnx import TensorProto
from popart_contract.protos import (
    BOOL,
    FLOAT,
    FLOAT16,
    GRAPHCORE,
    INT32,
    Given,
    body,
    constant,
    graph,
    loop,
    model,
    node,
    run,
    trip_constants,
    value,
)
from popart_contract.standin.errors import popart_runtime_error
from tolerance import assert_close

pytestmark = pytest.mark.usefixtures("machine")

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def replicated(count, **more):
    """Given's arguments for a number of replicas."""
    return {"options": {"enableReplicatedGraphs": True, "replicatedGraphCount": count}, "device": ("Ipu", count)} | more


def one(kind, arrays, domain=GRAPHCORE, outputs="y", constants=(), **attributes):
    """Run one operator on arrays x0, x1, ...; gives the output y."""
    kinds = {np.dtype(np.float32): FLOAT, np.dtype(np.float16): FLOAT16, np.dtype(np.int32): INT32, np.dtype(bool): BOOL}
    inputs = [value(f"x{i}", kinds[array.dtype], array.shape) for i, array in enumerate(arrays)]
    names = [*(f"x{i}" for i in range(len(arrays))), *(f"c{i}" for i in range(len(constants)))]
    nodes = [*(constant(f"c{i}", array) for i, array in enumerate(constants)), node(kind, names, outputs, domain, **attributes)]
    return Given(model(nodes, inputs)).run(**{f"x{i}": array for i, array in enumerate(arrays)})["y"]


# ---- loops


def test_a_loop_ends_early_and_stacks_what_it_is_told_to():
    """value doubles while it is below 20; a scan output has a row for each of the M steps."""
    inner = [
        constant("limit", np.float32(20)),
        node("Add", "value value", "next"),
        node("ReduceMax", "next", "most", keepdims=0, axes=[0, 1]),
        node("Less", "most limit", "again"),
        node("Identity", "step", "number"),
    ]
    looped = body(inner, outputs="again next number")
    results = Given(model([*trip_constants(5), loop(body=looped, outputs="y steps")]), anchors=("y", "steps")).run(x=X)
    assert_close(results["y"], X * 4)  # the largest is 5, 10, then 20
    assert results["steps"].tolist() == [0, 1, 0, 0, 0]


def test_a_loop_that_is_told_to_stop_does_not_begin():
    assert_close(Given(model([*trip_constants(go=False), loop(body=body())])).run(x=X)["y"], X)


def test_a_body_sees_what_is_around_it_and_hides_its_own_names():
    """`x` inside is the carried value; `h` is the main graph's. A loop in the loop sees both."""
    deep = body([node("Add", "v h", "w")], "i c v", "c w", name="deep")
    inner = [*trip_constants(2), loop("trips", "go", "x", "n", deep)]
    nodes = [
        node("Mul", "x x", "h"),
        constant("many", np.int32(3)),
        constant("on", np.bool_(True)),
        loop("many", "on", "x", "y", body(inner, "step cond x", "cond n")),
    ]
    assert_close(Given(model(nodes)).run(x=X)["y"], X + 6 * X * X)


def test_a_called_graph():
    callee = graph([node("Sub", "a b", "c")], [value("a"), value("b")], ["c"], name="difference")
    nodes = [node("Mul", "x x", "h"), node("Call", "h x", "y", GRAPHCORE, callee=callee)]
    assert_close(Given(model(nodes)).run(x=X)["y"], X * X - X)


# ---- replicas and batches


@pytest.mark.parametrize(
    ("kind", "size", "groups", "expected"),
    [
        (0, 0, None, [7, 7, 7, 7]),
        (1, 1, 4, [0, 1, 2, 3]),
        (1, 2, 2, [0, 0, 1, 1]),
        (2, 2, 2, [0, 1, 0, 1]),
        (3, 0, 4, [0, 1, 2, 3]),
    ],
)
def test_groups_of_replicas_have_their_weights(kind, size, groups, expected):
    weight = np.float32([7]) if groups is None else np.arange(groups, dtype=np.float32).reshape(groups, 1)
    metadata = {"__comm_group_type/w": str(kind), "__comm_group_size/w": str(size), "__variable_settings/w": "0"}
    metadata["__replicated_stream_mode/x"] = "0"
    made = model([node("Add", "x w", "y")], [value("x", FLOAT, (1,))], weights={"w": weight}, metadata=metadata)
    assert Given(made, **replicated(4)).run(x=np.zeros(1, np.float32))["y"][:, 0].tolist() == expected


def test_one_replica_keeps_the_leading_dimension():
    metadata = {"__comm_group_type/w": "1", "__comm_group_size/w": "1"}
    made = model([node("Add", "x w", "y")], weights={"w": np.ones((1, 2, 3), np.float32)}, metadata=metadata)
    assert Given(made).run(x=X)["y"].shape == (1, 2, 3)


def test_streams_and_anchors_have_batches_and_replicas():
    """[batches, replicas, ...]; a sum adds up the batches, Final is the last, EveryN each N-th."""
    nodes = [node("Add", "x x", "y"), node("Mul", "x x", "z"), node("Sub", "x y", "w"), node("Neg", "x", "v")]
    made = model(nodes, [value("x", FLOAT, (5,))])
    fed = np.arange(40, dtype=np.float32).reshape(4, 2, 5)
    anchors = {"y": "All", "z": "Sum", "w": "Final", "v": ("EveryN", 2)}
    results = Given(made, batches=4, anchors=anchors, **replicated(2)).run(x=fed)
    assert_close(results["v"], -fed[1::2])
    assert_close(results["y"], 2 * fed)
    assert_close(results["z"], (fed**2).sum(0))
    assert_close(results["w"], -fed[-1])


def test_collectives():
    """A gather has rank 1, replica after replica; groups talk among themselves."""
    nodes = [
        node("ReplicatedAllReduce", "x", "sum", GRAPHCORE),
        node("ReplicatedAllReduce", "x", "most", GRAPHCORE, __collectiveOperator=4),
        node("ReplicatedAllReduce", "x", "pairs", GRAPHCORE, __collectiveCommGroup=[1, 2]),
        node("ReplicatedAllReduce", "x", "across", GRAPHCORE, __collectiveReplicaGrouping=[4, 2, 2]),
        node("ReplicatedAllGather", "x", "all", GRAPHCORE),
    ]
    fed, names = np.arange(8, dtype=np.float32).reshape(4, 1, 2), ("sum", "most", "pairs", "across", "all")
    results = Given(model(nodes, [value("x", FLOAT, (1, 2))], names), anchors=names, **replicated(4)).run(x=fed)
    assert results["sum"].tolist() == [[[12, 16]]] * 4 and results["most"].tolist() == [[[6, 7]]] * 4
    assert results["pairs"][:, 0].tolist() == [[2, 4], [2, 4], [10, 12], [10, 12]]
    assert results["across"][:, 0].tolist() == [[4, 6], [8, 10], [4, 6], [8, 10]]
    assert results["all"].tolist() == [list(range(8))] * 4


def test_a_collective_in_a_loop():
    inner = [node("ReplicatedAllReduce", "value", "next", GRAPHCORE)]
    given = Given(model([*trip_constants(3), loop(body=body(inner))], [value("x", FLOAT, (1,))]), **replicated(2))
    assert given.run(x=np.float32([[1], [2]]))["y"].tolist() == [[12], [12]]


def test_replicas_must_leave_a_loop_together():
    inner = body([constant("two", np.float32(2)), node("Less", "value two", "again"), node("Add", "value value", "next")],
                 outputs="again next")  # fmt: skip
    given = Given(model([*trip_constants(3), loop(body=inner)], [value("x", FLOAT)]), **replicated(2))
    with pytest.raises(popart_runtime_error, match="replicas disagree"):
        given.run(x=np.float32([1, 2]))


# ---- operators that are not what ONNX's reference has


def test_argmax_and_topk_give_int32():
    x = np.float32([[3, 1, 3, 2], [0, 5, 4, 5]])
    best = one("ArgMax", [x], "", axis=1, keepdims=0)
    assert best.dtype == np.int32 and best.tolist() == [0, 1]
    nodes = [constant("k", np.int64([2])), node("TopK", "x k", "y places", axis=-1)]
    results = Given(model(nodes, [value("x", FLOAT, (2, 4))]), anchors=("y", "places")).run(x=x)
    assert results["places"].dtype == np.int32 and results["places"].tolist() == [[0, 2], [1, 3]]
    assert results["y"].tolist() == [[3, 3], [5, 5]]


def test_softmax_flattens_from_its_axis_on():
    """Axis 1 unless given: the meaning before opset 13."""
    x = np.float32(np.random.default_rng(0).standard_normal((2, 3, 4)))
    rows = np.exp(x.reshape(2, 12))
    assert_close(one("Softmax", [x], ""), (rows / rows.sum(1, keepdims=True)).reshape(x.shape))
    last = np.exp(x)
    assert_close(one("Softmax", [x], "", axis=-1), last / last.sum(-1, keepdims=True))


def test_float16_products_are_summed_in_float32():
    x, y = np.full((1, 4096), 1, np.float16), np.full((4096, 1), 1, np.float16)
    y[0] = 2048  # beyond it a float16 sum of ones would stay where it is
    assert one("MatMul", [x, y], "")[0, 0] == np.float16(2048 + 4095)
    result = one("MatMul", [x, y], "", __output_type="FLOAT")
    assert result.dtype == np.float32 and result[0, 0] == 2048 + 4095


def test_float8_products():
    """2^(sx) and 2^(sw) before the casts, 2^(-sx-sw) after the product."""
    nodes = [
        constant("up", np.int32(2)),
        constant("down", np.int32(-4)),
        node("Pow2ScaleThenCast", "x up", "x8", GRAPHCORE, to="FLOAT8_143"),
        node("Pow2ScaleThenCast", "w up", "w8", GRAPHCORE, to="FLOAT8_143"),
        node("MatMul", "x8 w8 down", "y", __partials_type="half"),
    ]
    given = Given(model(nodes, [value("x", FLOAT16, (1, 2)), value("w", FLOAT16, (2, 1))]))
    assert given.run(x=np.float16([[1.5, 1.03]]), w=np.float16([[2], [4]]))["y"][0, 0] == 1.5 * 2 + 1 * 4


def test_a_float8_scale_is_in_range():
    nodes = [constant("s", np.int32(32)), node("Pow2ScaleThenCast", "x s", "h", GRAPHCORE, to="FLOAT8_152"),
             constant("t", np.int32(0)), node("CastThenPow2Scale", "h t", "y", GRAPHCORE, to=FLOAT16)]  # fmt: skip
    with pytest.raises(popart_runtime_error, match=r"32 is not in \[-32, 32\)"):
        Given(model(nodes)).run(x=X)


def test_gather():
    table, rows = np.arange(24, dtype=np.float32).reshape(2, 4, 3), np.int32([[0, 3], [1, 1]])
    assert_close(one("Gather", [table, rows], "", axis=1), table[:, rows])
    grouped = np.stack([table[0][rows[0]], table[1][rows[1]]])
    assert_close(one("Gather", [table, rows], "", axis=1, group_size=2), grouped)
    with pytest.raises(popart_runtime_error, match="-1 .. 3"):  # counting from the end came with opset 11
        one("Gather", [table, rows - np.int32([[1, 0], [0, 0]])], "", axis=1)


def test_dynamic_slice_and_update():
    x, at = np.arange(12, dtype=np.float32).reshape(3, 4), np.int32([1, 2])
    assert_close(one("DynamicSlice", [x, at], axes=[0, 1], sizes=[2, 2]), x[1:3, 2:4])
    expected = x.copy()
    expected[1:2] = 9
    assert_close(one("DynamicUpdate", [x, at[:1], np.full((1, 4), 9, np.float32)], axes=[0], sizes=[1]), expected)
    with pytest.raises(popart_runtime_error, match="leaves axis 0"):
        one("DynamicSlice", [x, np.int32([2])], axes=[0], sizes=[2])


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("Gelu", lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("GeluErf", lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
        ("Swish", lambda x: x / (1 + np.exp(-x))),
        ("Log1p", np.log1p),
        ("Expm1", np.expm1),
    ],
)
def test_functions(kind, function):
    x = np.linspace(-0.9, 3, 40, dtype=np.float32)
    assert_close(one(kind, [x]), function(x.astype(np.float64)).astype(np.float32))
    assert_close(one(kind, [x.astype(np.float16)]), function(x.astype(np.float16).astype(np.float64)).astype(np.float16))


def test_group_normalization():
    """One group of all channels is a layer norm; the third output is the inverse of the deviation."""
    x = np.float32(np.random.default_rng(1).standard_normal((3, 8)))
    scale, bias = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32)
    inputs = [value("x", FLOAT, (3, 8))]
    nodes = [node("GroupNormalization", "x scale bias", "y mean inverse", GRAPHCORE, num_groups=1, epsilon=1e-3)]
    made = model(nodes, inputs, weights={"scale": scale, "bias": bias})
    results = Given(made, anchors=("y", "mean", "inverse")).run(x=x)
    inverse = 1 / np.sqrt(x.var(-1) + 1e-3)
    assert_close(results["y"], (x - x.mean(-1, keepdims=True)) * inverse[:, None] * scale + bias)
    assert_close(results["inverse"], inverse.astype(np.float32))


def test_integers_wrap_and_are_cut():
    """Products of UINT32 wrap, quotients are cut towards zero: shifts, for who has none."""
    nodes = [
        constant("left", np.uint32(2**13)),
        constant("right", np.uint32(2**19)),
        node("Cast", "x", "bits", to=TensorProto.UINT32),
        node("Mul", "bits left", "high"),
        node("Div", "bits right", "low"),
        node("BitwiseOr", "high low", "y", GRAPHCORE),
    ]
    x = np.int32([1, 0x7ABCDEF0, 12345])
    results = Given(model(nodes, [value("x", INT32, (3,))])).run(x=x)
    assert results["y"].tolist() == [((n << 13) | (n >> 19)) & 0xFFFFFFFF for n in x.tolist()]


def test_numbers_in_typed_fields_are_read_as_popart_reads_them():
    """A BOOL Constant of several elements can be had with its bytes packed into int32_data of full length."""
    mask = TensorProto(data_type=BOOL, dims=[3], int32_data=[0x010001, 0, 0])
    nodes = [node("Constant", "", "mask", value=mask), node("Where", "mask x h", "y"), node("Add", "x x", "h")]
    nodes = [nodes[0], nodes[2], nodes[1]]
    assert run(Given(model(nodes)).session(), x=X)["y"].tolist() == [[0, 2, 2], [3, 8, 5]]
