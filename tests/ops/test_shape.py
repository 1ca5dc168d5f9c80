"""Ops that move elements: reshape, transpose, broadcast_to, split, concat, slice (slice_axis), dynamic_update, gather."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import FLOATS, SIZES, compiled, hypothesis_settings, normal, reference, refusal, run_op, xla
from tolerance import assert_close

from poptransformer import ops
from poptransformer.errors import UserError

f32, i32 = np.float32, np.int32


def everything(x, u, start, table, ids):
    """Each op of the family on x [3, 4, size] and u [3, 2, size]."""
    size = x.shape[-1]
    cut = size // 3
    left, none, right = ops.split(x, (cut, 0, size - cut))
    return {
        "reshape": ops.reshape(x, (-1, 4 * size)),
        "transpose": ops.transpose(x, (2, 0, 1)),
        "broadcast_to": ops.broadcast_to(x, (2, 3, 4, size)),
        "left": left,
        "none": none,
        "right": right,
        "concat": ops.concat([right, left, x]),
        "slice": ops.slice_axis(x, 1, 3, axis=-2),
        "dynamic_update": ops.dynamic_update(x, u, start, axis=1),
        "gather": ops.gather(table, ids),
    }


def by_numpy(x, u, start, table, ids):
    cut = x.shape[-1] // 3
    updated = x.copy()
    updated[:, start : start + 2] = u
    return {
        "reshape": x.reshape(3, -1),
        "transpose": np.einsum("abc->cab", x),
        "broadcast_to": np.stack([x, x]),
        "left": x[..., :cut],
        "none": x[..., :0],
        "right": x[..., cut:],
        "concat": np.concatenate([x[..., cut:], x[..., :cut], x], -1),
        "slice": x[:, 1:3],
        "dynamic_update": updated,
        "gather": np.stack([table[i] for i in ids.ravel()]).reshape(*ids.shape, -1),
    }


@pytest.mark.parametrize(
    "dtype, size", [*zip(FLOATS, SIZES[:3], strict=True), ("bfloat16", 127), ("int32", 128), ("bool", 129)]
)
def test_lowerings_and_references_equal_numpy(dtype, size):
    kind = FLOATS.get(dtype, np.dtype(dtype))
    x, u, table = (normal(shape, seed=size).round().astype(kind) for shape in ((3, 4, size), (3, 2, size), (7, size)))
    arrays = {"x": x, "u": u, "start": i32(1), "table": table, "ids": np.array([[6, 0, 3], [3, 3, 5]], i32)}
    wanted = by_numpy(**arrays)
    for engine in (reference(), xla()):
        results = run_op(engine, everything, **arrays)
        for key in wanted:
            assert_close(results[key], wanted[key], rtol=0, atol=0)


def test_dynamic_update_stays_inside():
    """A start before or past the ends is moved, so that the whole update fits; so does the definition in the docstring."""
    x, u = np.zeros((2, 5), f32), np.ones((2, 3), f32)
    for engine in (reference(), xla()):
        run = compiled(engine, lambda x, u, start: ops.dynamic_update(x, u, start, axis=-1), x=x, u=u, start=i32(0))
        for start, begin in ((-(2**31), 0), (-1, 0), (0, 0), (1, 1), (2, 2), (3, 2), (2**31 - 1, 2)):
            wanted = x.copy()
            wanted[:, begin : begin + 3] = 1
            assert_close(run(x=x, u=u, start=i32(start)), wanted)


def test_scalars_and_empty_values():
    def build(x, e):
        return {
            "scalar": ops.reshape(x, ()),
            "back": ops.reshape(ops.reshape(x, ()), (1, 1)),
            "wide": ops.broadcast_to(ops.reshape(x, ()), (2, 2)),
            "empty": ops.concat([e, e], axis=0),
            "rows": ops.reshape(e, (0, 5)),
            "same": ops.transpose(ops.reshape(x, ()), ()),
        }

    for engine in (reference(), xla()):
        results = run_op(engine, build, x=np.array([3], i32), e=np.zeros((2, 0), f32))
        assert results["scalar"].shape == () and results["same"] == 3 and results["back"].tolist() == [[3]]
        assert results["wide"].tolist() == [[3, 3], [3, 3]]
        assert results["empty"].shape == (4, 0) and results["rows"].shape == (0, 5)


@hypothesis_settings(6)
@given(st.data())
def test_split_then_concat_gives_the_original(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), "shape")
    axis = data.draw(st.integers(-len(shape), len(shape) - 1), "axis")
    first = data.draw(st.integers(0, shape[axis]), "first")
    axes = data.draw(st.permutations(range(len(shape))), "axes")
    x = normal(shape)

    def build(x):
        joined = ops.concat(ops.split(x, (first, shape[axis] - first), axis), axis)
        there = ops.transpose(joined, axes)
        return joined, ops.transpose(there, np.argsort(axes).tolist())

    for engine in (reference(), xla()):
        for result in run_op(engine, build, x=x):
            assert_close(result, x)


@pytest.mark.parametrize(
    "build, specs, message",
    [
        (lambda x: ops.reshape(x, (4, 2)), [((2, 3), f32)], "reshape(float32[2, 3]): cannot become [4, 2]"),
        (lambda x: ops.reshape(x, (-1, 4)), [((2, 3), f32)], "cannot become [1, 4]"),
        (lambda x: ops.reshape(x, (-2, -3)), [((2, 3), f32)], "cannot become [-2, -3]"),
        (lambda x: ops.reshape(x, (-1, -1)), [((1, 1), f32)], "cannot become [-1, -1]"),
        (lambda x: ops.transpose(x, (0, 0)), [((2, 3), f32)], "axes [0, 0] do not name each of 2 axes once"),
        (lambda x: ops.broadcast_to(x, (3, 3)), [((2, 3), f32)], "cannot be broadcast to [3, 3]"),
        (lambda x: ops.broadcast_to(x, (3,)), [((2, 3), f32)], "cannot be broadcast to [3]"),
        (lambda x: ops.split(x, (1, 1)), [((2, 3), f32)], "axis 1 has 3 elements, the parts [1, 1]"),
        (lambda x: ops.split(x, (4, -1)), [((2, 3), f32)], "axis 1 has 3 elements, the parts [4, -1]"),
        (lambda x: ops.split(x, (2,), axis=2), [((2, 3), f32)], "has no axis 2"),
        (lambda x: ops.split(x, (2,), axis=-3), [((2, 3), f32)], "has no axis -3"),
        (lambda x, y: ops.concat([x, y]), [((2, 3), f32), ((3, 3), f32)], "parts differ in more than axis 1"),
        (lambda x, y: ops.concat([x, y]), [((2, 3), f32), ((2, 3), i32)], "parts differ in dtype"),
        (lambda x, y: ops.concat([x, y], axis=2), [((2, 3), f32)] * 2, "has no axis 2"),
        (lambda x: ops.slice_axis(x, 1, 4), [((2, 3), f32)], "slice(float32[2, 3]): axis 1 has 3 elements, wanted [1:4]"),
        (lambda x: ops.slice_axis(x, -1, 2), [((2, 3), f32)], "axis 1 has 3 elements, wanted [-1:2]"),
        (lambda x: ops.slice_axis(x, 0, 1, axis=5), [((2, 3), f32)], "has no axis 5"),
        (lambda *a: ops.dynamic_update(*a, axis=0), [((3,), f32), ((2,), i32), ((), i32)], "the update differs in dtype"),
        (lambda *a: ops.dynamic_update(*a, axis=0), [((3,), f32), ((2,), f32), ((1,), i32)], "start must be an int32 scalar"),
        (lambda *a: ops.dynamic_update(*a, axis=0), [((3, 2), f32), ((2, 1), f32), ((), i32)], "may differ in axis 0 only"),
        (lambda *a: ops.dynamic_update(*a, axis=0), [((3, 2), f32), ((4, 2), f32), ((), i32)], "may differ in axis 0 only"),
        (lambda *a: ops.dynamic_update(*a, axis=0), [((3, 2), f32), ((2,), f32), ((), i32)], "may differ in axis 0 only"),
        (lambda *a: ops.dynamic_update(*a, axis=1), [((3,), f32), ((2,), f32), ((), i32)], "has no axis 1"),
        (ops.gather, [((), f32), ((2,), i32)], "wants a table with at least one axis"),
        (ops.gather, [((3, 2), f32), ((2,), np.int64)], "gather(float32[3, 2], int64[2]): indices must be int32"),
    ],
)
def test_what_is_refused(build, specs, message):
    assert message in refusal(build, *specs)


def test_concat_of_nothing():
    with pytest.raises(UserError, match="at least one part"):
        ops.concat([])
