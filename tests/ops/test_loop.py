"""loop: a body that is repeated on the device. The reference engine walks the body; the op has no NumPy function."""

import numpy as np
import pytest
from run_op import compiled, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops
from poptransformer.errors import UserError
from poptransformer.graph import Graph
from poptransformer.ops import OPS

f32, i32 = np.float32, np.int32


def test_steps_conditions_and_values_from_outside():
    """Sums of step * factor, until the sum reaches the limit or the steps are over."""

    def build(total, factor, limit, go):
        def body(step, total, count):
            total = total + ops.cast(step, f32) * factor
            return total < limit, total, count + 1

        return ops.loop(5, go, [total, total.graph.constant(0)], body)

    def in_python(total, factor, limit, go):
        step = 0
        while go and step < 5:
            total, step = total + step * factor, step + 1
            go = total < limit
        return total, step

    cases = [(0, 2, 100, True), (1, 2, 5, True), (1, 2, 0, True), (3, 1, 100, False), (0, -1, 100, True)]
    for engine in (reference(), xla()):
        run = compiled(engine, build, total=f32(0), factor=f32(0), limit=f32(0), go=np.bool_(True))
        for total, factor, limit, go in cases:
            result = run(total=f32(total), factor=f32(factor), limit=f32(limit), go=np.bool_(go))
            assert (float(result["0"]), int(result["1"])) == in_python(total, factor, limit, go)


@pytest.mark.parametrize("rows", [1, 2])
def test_carried_arrays_of_every_shape(rows):
    """Leading axes of size 1, which the lowering drops and puts back, scalars, empty arrays and bool."""
    arrays = {
        "grid": normal((rows, 3, 5)),
        "column": np.arange(rows, dtype=i32),
        "ones": normal((1, 1)),
        "none": np.zeros((rows, 0), f32),
        "flag": np.zeros(rows, bool),
    }

    def build(**values):
        def body(step, grid, column, ones, none, flag):
            at = ops.reshape(ops.cast(column, f32), (rows, 1, 1))
            grid = ops.dynamic_update(grid, at + ops.broadcast_to(ones, (rows, 1, 5)), step, axis=1)
            return step < 9, grid, column + 10, ones * 2, none, ops.logical_not(flag)

        return ops.loop(3, values["grid"].graph.constant(True), list(values.values()), body)

    wanted, actual = (run_op(engine, build, **arrays) for engine in (reference(), xla()))
    for result, expected, array in zip(actual, wanted, arrays.values(), strict=True):
        assert_close(result, expected)
        assert result.shape == array.shape
    ones, rise = arrays["ones"][0, 0], np.arange(rows)[:, None] + 10 * np.arange(3)[None]
    assert_close(wanted[0], np.repeat((rise + ones * 2.0 ** np.arange(3))[..., None], 5, -1).astype(f32))
    assert_close(wanted[1], np.arange(rows, dtype=i32) + 30)
    assert wanted[4].all()


def test_a_loop_in_a_loop():
    """The inner one uses values of the outer body and of the graph around both: 3 * (0 + 1 + 2) more in each outer step."""

    def build(x, three):
        def outer(step, x):
            def inner(i, y):
                return i < 9, y + three * ops.cast(i, f32) + x * 0

            (y,) = ops.loop(3, step < 9, [x], inner)
            return step < 9, y

        return ops.loop(2, x.graph.constant(True), [x], outer)

    for engine in (reference(), xla()):
        assert run_op(engine, build, x=np.array([1, 2], f32), three=f32(3))[0].tolist() == [19, 20]


def test_values_from_outside_may_be_the_result():
    def build(x, y):
        def body(step, x):
            return y > 1, y + 1  # computed once, outside: nothing here changes from step to step

        return ops.loop(4, y > 0, [x], body)

    for engine in (reference(), xla()):
        assert run_op(engine, build, x=f32(0), y=f32(2))[0] == 3


def body_returning(*results):
    return lambda *values: ops.loop(3, values[0], values[1:], lambda step, *carried: [r(step, *carried) for r in results])


@pytest.mark.parametrize(
    "build, specs, message",
    [
        (
            body_returning(lambda s, x: s < 1, lambda s, x: ops.cast(x, i32)),
            [((), bool), ((2,), f32)],
            "loop(bool[], float32[2]): carried value 0 is float32[2], the body returns int32[2]",
        ),
        (
            body_returning(lambda s, x: s < 1),
            [((), bool), ((2,), f32)],
            "return a condition and 1 carried values, not 1 values",
        ),
        (body_returning(), [((), bool), ((2,), f32)], "return a condition and 1 carried values, not 0 values"),
        (body_returning(lambda s, x: s, lambda s, x: x), [((), bool), ((2,), f32)], "must be a bool scalar, not int32[]"),
        (
            body_returning(lambda s, x: s < 1, lambda s, x: x),
            [((1,), bool), ((2,), f32)],
            "the first condition must be a bool scalar",
        ),
        (
            lambda go, x: ops.loop(0, go, [x], lambda s, x: (s < 1, x)),
            [((), bool), ((2,), f32)],
            "max_steps must be at least 1",
        ),
        (
            lambda go, x: ops.loop(2, go, [x], lambda s, x: (True, x)),
            [((), bool), ((2,), f32)],
            "loop: the body must return Values",
        ),
    ],
)
def test_what_is_refused(build, specs, message):
    assert message in refusal(build, *specs)


def test_bodies_keep_to_themselves():
    """A value of a body is nobody else's; a state is updated outside."""
    graph, leaked = Graph("outer"), []
    x, go = graph.input("x", (2,), f32), graph.constant(True)
    ops.loop(2, go, [x], lambda step, x: (leaked.append(x + 1), step < 1, x)[1:])
    with pytest.raises(UserError, match="belongs to graph 'outer/body', not 'outer'"):
        graph.output("leaked", leaked[0])
    with graph.scope("layer.1"), pytest.raises(UserError, match="layer.1: add: x:?.* belongs to graph 'other'"):
        ops.loop(2, go, [x], lambda step, x: (step < 1, x + Graph("other").input("x", (2,), f32)))


def test_the_reference_engine_walks_the_body():
    with pytest.raises(AssertionError, match="engine walks it"):
        OPS["loop"].reference()
