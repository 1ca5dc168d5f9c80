"""Element-wise ops: add, sub, mul, div, minimum, maximum, equal, less, less_equal, greater, greater_equal, logical_and,
logical_or, logical_not, neg, exp, log, sqrt, tanh, sigmoid, relu, silu, gelu, gelu_tanh, select, cast.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS, SIZES, build_graph, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops
from poptransformer.errors import UserError
from poptransformer.graph import Graph, Value
from poptransformer.ops.elementwise import BINARY, COMPARE, LOGICAL, UNARY

f32, i32 = np.float32, np.int32
POINTS = np.array([-3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0])
# torch 2.13.0: F.silu(torch.tensor([-3, -1, -0.1, 0, 0.1, 1, 3], dtype=torch.float64)), F.gelu(x), F.gelu(x,
# approximate="tanh"), torch.sigmoid(x), torch.tanh(x), torch.exp(x)
TORCH = {
    "silu": [-0.14227762, -0.26894142, -0.04750208, 0.0, 0.05249792, 0.73105858, 2.85772238],
    "gelu": [-0.00404969, -0.15865525, -0.04601722, 0.0, 0.05398278, 0.84134475, 2.99595031],
    "gelu_tanh": [-0.00363739, -0.15880801, -0.04601725, 0.0, 0.05398275, 0.84119199, 2.99636261],
    "sigmoid": [0.04742587, 0.26894142, 0.47502081, 0.5, 0.52497919, 0.73105858, 0.95257413],
    "tanh": [-0.99505475, -0.76159416, -0.09966799, 0.0, 0.09966799, 0.76159416, 0.99505475],
    "exp": [0.04978707, 0.36787944, 0.90483742, 1.0, 1.10517092, 2.71828183, 20.08553692],
}


def all_unary(**values):
    """Every unary op of every input, keyed "<op> <input>"; log and sqrt of numbers above zero."""
    return {
        f"{name} {key}": getattr(ops, name)(ops.exp(x) if name in ("log", "sqrt") else x)
        for key, x in values.items()
        for name in UNARY
    }


def all_pairs(x, y):
    """Every op of two numbers."""
    return {name: getattr(ops, name)(x, y) for name in (*BINARY, *COMPARE)}


def test_references_equal_torch():
    results = run_op(reference(), all_unary, x=POINTS)
    for name, wanted in TORCH.items():
        assert_close(results[f"{name} x"], np.array(wanted), atol=6e-9)  # the literals have eight places
    assert_close(results["relu x"], np.maximum(POINTS, 0))
    assert_close(results["neg x"], -POINTS)
    assert_close(results["log x"], POINTS)
    assert_close(results["sqrt x"], np.exp(POINTS / 2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_unary_lowerings_equal_references(dtype):
    arrays = {f"x{size}": normal(size, FLOATS[dtype], seed=size, scale=3) for size in SIZES}
    wanted, actual = (run_op(engine, all_unary, **arrays) for engine in (reference(), xla()))
    for key in wanted:
        assert_close(actual[key], wanted[key])


def test_unary_ops_of_extreme_numbers():
    """No NaN where the limit is a number, and no warning from the reference."""
    x = np.array([-np.inf, -3e38, -100, 100, 3e38, np.inf], f32)

    def build(x):
        return {name: getattr(ops, name)(x) for name in ("sigmoid", "tanh", "relu", "exp", "neg")}

    for engine in (reference(), xla()):
        results = run_op(engine, build, x=x)
        for name, wanted in {"sigmoid": [0, 0, 0, 1, 1, 1], "tanh": [-1, -1, -1, 1, 1, 1]}.items():
            assert_close(results[name], np.array(wanted, f32))
        assert results["relu"].tolist() == np.maximum(x, 0).tolist() and results["neg"].tolist() == (-x).tolist()
        assert_close(results["exp"], np.array([0, 0, 0, np.inf, np.inf, np.inf], f32))
        finite = run_op(engine, lambda x: {name: getattr(ops, name)(x) for name in ("silu", "gelu", "gelu_tanh")}, x=x[1:-1])
        for result in finite.values():
            assert_close(result, np.array([0, 0, 100, 3e38], f32))


def test_16_bit_activations_round_once():
    """Within half a unit of the last place of the float64 result, plus the little that float32 is off."""
    x = normal(4096, seed=1, scale=2)
    for dtype, half_unit in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        narrow = x.astype(FLOATS[dtype])
        wanted = run_op(reference(), all_unary, x=narrow.astype(np.float64))
        for name, result in run_op(reference(), all_unary, x=narrow).items():
            if name.split()[0] in ("gelu", "gelu_tanh", "silu", "sigmoid"):
                bound = 1.02 * half_unit * np.abs(wanted[name]) + 1e-6
                assert np.all(np.abs(result.astype(np.float64) - wanted[name]) <= bound), (dtype, name)


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_pair_lowerings_equal_references(dtype):
    x, y = (normal((17, 129), seed=seed, scale=4).round(1).astype(FLOATS.get(dtype, i32)) for seed in (1, 2))
    x[3], y[y == 0] = 1, 1
    y[3] = x[3]

    def build(x, y):
        if dtype != "int32":
            return all_pairs(x, y)
        return {name: getattr(ops, name)(x, y) for name in (*BINARY, *COMPARE) if name != "div"}

    wanted, actual = (run_op(engine, build, x=x, y=y) for engine in (reference(), xla()))
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    for key in wanted:
        assert_close(actual[key], wanted[key])
        if key in functions:
            assert_close(wanted[key], functions[key](x, y))
    assert actual["equal"][3].all() and actual["less_equal"][3].all() and not actual["greater"][3].any()


def test_logic_and_select():
    p, q = np.array([[True], [False]]), np.array([True, False, True])
    x, y = np.arange(6, dtype=f32).reshape(2, 3), np.zeros((), f32)

    def build(p, q, x, y):
        results = {name: getattr(ops, name)(p, q) for name in LOGICAL}
        return results | {"not": ops.logical_not(p), "operators": (p & ~q) | q, "select": ops.select(q, x, y)}

    for engine in (reference(), xla()):
        results = run_op(engine, build, p=p, q=q, x=x, y=y)
        assert_close(results["logical_and"], np.array([[True, False, True], [False, False, False]]))
        assert_close(results["logical_or"], np.array([[True, True, True], [True, False, True]]))
        assert_close(results["not"], ~p)
        assert_close(results["operators"], np.array([[True, True, True], [True, False, True]]))
        assert_close(results["select"], np.array([[0, 0, 2], [3, 0, 5]], f32))


def test_casts_between_all_dtypes():
    dtypes = [*FLOATS.values(), np.dtype(i32), np.dtype(np.uint32), np.dtype(bool)]
    x = np.array([0, 1, 2, 77, 255.75, 0.4], f32)

    def build(x):
        return {f"{a} {b}": ops.cast(ops.cast(x, a), b) for a in dtypes for b in dtypes}

    wanted, actual = (run_op(engine, build, x=x) for engine in (reference(), xla()))
    for key in wanted:
        assert_close(actual[key], wanted[key], rtol=0, atol=0)
    assert wanted["float32 int32"].tolist() == [0, 1, 2, 77, 255, 0]  # towards zero
    graph = Graph("cast")
    value = graph.input("x", (2,), f32)
    assert ops.cast(value, f32) is value and not graph.nodes


@hypothesis_settings(8)
@given(st.data())
def test_broadcasting_follows_numpy(data):
    full = data.draw(st.lists(st.sampled_from([1, 2, 3, 17]), max_size=3), "shape")

    def part():
        shape = [data.draw(st.sampled_from([1, size])) for size in full]
        return shape[data.draw(st.integers(0, len(shape))) :]

    x, y, z = (normal(part(), seed=seed) for seed in range(3))
    for engine in (reference(), xla()):
        total, chosen = run_op(engine, lambda x, y, z: (x - y, ops.select(x < y, y, z)), x=x, y=y, z=z)
        assert_close(total, x - y)
        assert_close(chosen, np.where(x < y, y, z))


def test_operators_take_numbers_on_both_sides():
    x = np.array([1.0, 2.0, 4.0], f32)

    def build(x):
        return {
            "sum": (2 + x) - 1,
            "rsub": 1 - x,
            "rdiv": 2 / x,
            "rmul": 3 * -x,
            "array": np.array([1, 2, 3]) * x,
            "compare": (x >= 2) & (3 > x),
        }

    wanted = {"sum": x + 1, "rsub": 1 - x, "rdiv": 2 / x, "rmul": -3 * x, "array": x * [1, 2, 3]}
    for engine in (reference(), xla()):
        results = run_op(engine, build, x=x)
        for key, value in wanted.items():
            assert_close(results[key], value.astype(f32))
        assert results["compare"].tolist() == [False, True, False]
    graph = build_graph(build, x=x)
    assert all(isinstance(value, Value) for value in graph.outputs.values())


@pytest.mark.parametrize(
    "build, specs, message",
    [
        (ops.add, [((2,), f32), ((3,), f32)], r"add(float32[2], float32[3]): shapes do not broadcast"),
        (ops.mul, [((2,), f32), ((2,), i32)], "mul(float32[2], int32[2]): operands differ in dtype; cast one of them"),
        (ops.less, [((2,), f32), ((2,), i32)], "less(float32[2], int32[2]): operands differ in dtype; cast one of them"),
        (ops.sub, [((2,), bool), ((2,), bool)], "sub(bool[2], bool[2]): wants numbers, not bool"),
        (ops.neg, [((2,), bool)], "neg(bool[2]): wants numbers, not bool"),
        (ops.relu, [((), bool)], "relu(bool[]): wants numbers, not bool"),
        (ops.gelu, [((2,), i32)], "gelu(int32[2]): wants a floating dtype"),
        (ops.div, [((2,), i32), ((2,), i32)], "div(int32[2], int32[2]): wants a floating dtype"),
        (ops.logical_or, [((2,), bool), ((2,), i32)], "logical_or(bool[2], int32[2]): wants bool operands"),
        (ops.logical_not, [((2,), f32)], "logical_not(float32[2]): wants a bool operand"),
        (ops.select, [((2,), f32)] * 3, "select(float32[2], float32[2], float32[2]): the condition must be bool"),
        (ops.select, [((2,), bool), ((2,), f32), ((2,), i32)], "select(bool[2], float32[2], int32[2]): the two choices differ"),
        (ops.select, [((2,), bool), ((3,), f32), ((2,), f32)], "shapes do not broadcast"),
        (lambda x: x + 0.5, [((2,), i32)], "0.5 is no int32 like x0; cast it"),
        (lambda x: x + 2**40, [((2,), i32)], "1099511627776 is no int32 like x0; cast it"),
        (lambda x: ops.equal(x, 1), [((2,), bool)], "1 is no bool like x0; cast it"),
        (lambda x: -1 < x, [((2,), np.uint32)], "-1 is no uint32 like x0; cast it"),
    ],
)
def test_what_is_refused(build, specs, message):
    assert message in refusal(build, *specs)


def test_an_op_needs_a_value():
    for build in (lambda: ops.add(1, 2), lambda: ops.select(True, 1.0, 2.0)):
        with pytest.raises(UserError, match="needs at least one input that is a Value"):
            build()
