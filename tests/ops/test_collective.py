"""all_reduce, all_gather and rank_index: every rank of the reference in lock step, and XLA on virtual CPU devices."""

import numpy as np
import pytest
from run_op import FLOATS, SIZES, normal, reference, refusal, xla
from tolerance import TOLERANCE, assert_close

from poptransformer import ops
from poptransformer.errors import UserError
from poptransformer.graph import Graph, Parameter
from poptransformer.ops import OPS
from poptransformer.parallel import even_cut

f32, i32 = np.float32, np.int32
WORLD_SIZES = [1, 2, 3, 8]


def run_on_ranks(engine, build, **parts):
    """Build a graph of values that each rank has its own of, and run it.

    Args:
      build: as for run_op.
      parts: for each value the arrays of all ranks, [R, ...].
    """
    graph, values = Graph(f"test_{len(engine.graphs)}"), {}
    for name, array in parts.items():
        world_size, size = array.shape[:2]
        cut = even_cut(0, world_size * size, world_size)
        parameter = Parameter(f"{name}_{graph.name}", array.shape[1:], array.dtype, cut, lambda rank, array=array: array[rank])
        values[name] = graph.parameter(parameter)
        engine.load([parameter])
    for name, value in build(**values).items():
        graph.output(str(name), value)
    engine.compile(graph.name, graph)
    return engine.run(graph.name, {})


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_lowerings_equal_references(world_size):
    """Sums and gathers of odd sizes, every dtype, every axis."""
    shapes = {f"n{size}": (world_size, size) for size in SIZES} | {"grid": (world_size, 3, 1, 5)}
    parts = {
        f"{name}_{dtype}": normal(shape, kind, seed=i)
        for i, (name, shape) in enumerate(shapes.items())
        for dtype, kind in FLOATS.items()
    }
    parts["counts"] = np.random.default_rng(0).integers(-(2**28), 2**28, (world_size, 17)).astype(i32)
    parts["flags"] = np.random.default_rng(0).integers(0, 2, (world_size, 7)).astype(bool)

    def build(**values):
        results = {f"sum {name}": ops.all_reduce(value, world_size) for name, value in values.items() if name != "flags"}
        results |= {
            f"gather {name} {axis}": ops.all_gather(value, axis, world_size)
            for name, value in values.items()
            for axis in range(value.rank)
        }
        rank = ops.reshape(ops.rank_index(values["counts"], world_size), (1,))
        return results | {"ranks": ops.all_gather(rank, -1, world_size)}

    wanted, actual = (run_on_ranks(engine, build, **parts) for engine in (reference(None, world_size), xla(False, world_size)))
    assert wanted.keys() == actual.keys()
    for key in wanted:
        # XLA rounds after each rank's share, the reference once. Models add up in float32.
        steps = world_size - 1 if key.startswith("sum") else 1
        rtol, atol = TOLERANCE.get(wanted[key].dtype, (0, 0))
        assert_close(actual[key], wanted[key], rtol=max(steps, 1) * rtol, atol=max(steps, 1) * atol)
    assert wanted["ranks"].tolist() == list(range(world_size))
    assert wanted["sum counts"].tolist() == parts["counts"].sum(0).tolist()
    assert np.array_equal(wanted["gather grid_float32 2"], np.concatenate(list(parts["grid_float32"]), 2))
    assert np.array_equal(wanted["gather flags 0"], parts["flags"].reshape(-1))


def test_what_one_rank_has_plus_zeros_is_not_rounded():
    """The cut embedding relies on it."""
    whole = normal((4, 129), FLOATS["bfloat16"])
    parts = np.zeros((4, 4, 129), whole.dtype)
    parts[range(4), range(4)] = whole
    for engine in (reference(None, 4), xla(False, 4)):
        result = run_on_ranks(engine, lambda x: {"sum": ops.all_reduce(x, 4)}, x=parts)
        assert np.array_equal(result["sum"], whole)


def test_rank_index_differs_and_is_used_in_a_loop():
    """Each rank adds its number in each step; the sum of all is the same everywhere."""

    def build(x):
        def body(step, total):
            return step < 9, total + ops.cast(ops.rank_index(total, 3), f32)

        (total,) = ops.loop(5, x.graph.constant(True), [x], body)
        return {"each": ops.all_gather(total, 0, 3), "sum": ops.all_reduce(total, 3)}

    for engine in (reference(None, 3), xla(False, 3)):
        results = run_on_ranks(engine, build, x=np.zeros((3, 2), f32))
        assert results["each"].tolist() == [0, 0, 5, 5, 10, 10]
        assert results["sum"].tolist() == [15, 15]


def test_an_engine_of_another_size_refuses_the_graph():
    """The sum over two ranks means something else on three."""
    graph = Graph("sums")
    graph.output("sum", ops.all_reduce(graph.input("x", (2,), f32), 2))
    parameter = Parameter("weight", (2,), np.dtype(f32), even_cut(0, 4, 2), lambda rank: np.zeros(2, f32))
    for engine, size in ((reference(None, 3), 3), (xla(False, 3), 3), (xla(), 1)):
        with pytest.raises(UserError, match=f"graph 'sums' is made for a world_size of 2, the engine's is {size}"):
            engine.compile("sums", graph)
        with pytest.raises(UserError, match=f"weight is cut for a world_size of 2, the engine's is {size}"):
            engine.load([parameter])


def test_refusals():
    pair = ((2, 3), f32)
    assert refusal(lambda x: ops.all_gather(x, 2, 2), pair) == "all_gather(float32[2, 3]): x has no axis 2"
    assert refusal(lambda x: ops.all_gather(x, -3, 2), pair) == "all_gather(float32[2, 3]): x has no axis -1"
    assert refusal(lambda x: ops.all_reduce(x, 2), ((2,), bool)) == "all_reduce(bool[2]): wants a floating dtype or int32"
    for build in (lambda x: ops.all_reduce(x, 0), lambda x: ops.all_gather(x, 0, 0), lambda x: ops.rank_index(x, 0)):
        assert refusal(build, pair).endswith("): world_size must be at least 1")


def test_references_take_all_ranks_at_once():
    x = np.arange(12, dtype=f32).reshape(2, 3, 2)
    (total,), (whole,) = OPS["all_reduce"].reference(x, 2), OPS["all_gather"].reference(x, 1, 2)
    assert total.tolist() == [[[6, 8], [10, 12], [14, 16]]] * 2
    assert whole.tolist() == [[[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]] * 2
    (ranks,) = OPS["rank_index"].reference(3)
    assert ranks.tolist() == [0, 1, 2] and ranks.dtype == i32
