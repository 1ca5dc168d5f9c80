"""Graphs whose stages are on several devices, compared with the reference: loops on the host, what moves, what is donated."""

import jax
import numpy as np
import pytest
from run_op import normal, reference, xla
from tolerance import assert_close

from poptransformer import ops
from poptransformer.checkpoint.tensor_file import aligned_empty
from poptransformer.errors import UserError
from poptransformer.graph import Graph, Parameter, State
from poptransformer.parallel import even_cut

f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
LARGE = (1, 17000)  # beyond StagedProgram's SMALL_BYTES, so that it is donated


def parameter(name, array, cut=None):
    load = (lambda rank: array) if cut is None else (lambda rank: cut.take(array, rank))
    shape = load(0).shape
    return Parameter(name, shape, array.dtype, cut, load)


def engines(graph, num_stages=2, world_size=1):
    """A reference and an XLA engine that have loaded and compiled a graph."""
    both = reference(None, world_size), xla(False, world_size, num_stages)
    for engine in both:
        engine.load([each for each, _ in graph.parameters.values()], stages_of=graph.stages_of())
        engine.compile("graph", graph)
    return both


def check(graph, *runs, num_stages=2, world_size=1):
    """Run a graph several times on both engines; outputs and states must agree after each."""
    wanted, actual = engines(graph, num_stages, world_size)
    for inputs in runs:
        results = [
            engine.run("graph", {key: np.asarray(array) for key, array in inputs.items()}) for engine in (wanted, actual)
        ]
        assert results[0].keys() == results[1].keys()
        for key in results[0]:
            assert_close(results[1][key], results[0][key])
        for key, state in actual._states.items():
            parts = np.asarray(state).reshape(-1, *wanted._states[key][0].shape)
            for part, theirs in zip(parts, wanted._states[key], strict=False):
                assert_close(part, theirs)
    return actual


# ---- values and weights on several stages


def test_a_chain_over_stages_with_a_weight_and_an_input_that_several_use():
    graph = Graph("chain")
    x, table = graph.input("x", (2, 3), f32), parameter("table", normal((3, 3)))
    y = ops.linear(x, graph.parameter(table))
    with graph.stage(1):
        z = ops.exp(y) + x
    with graph.stage(3):  # nothing is on stage 2
        w = ops.linear(z, graph.parameter(table)) + y
    graph.output("w", w)
    graph.output("y", y)
    graph.output("x again", x)
    graph.output("constant", graph.constant(np.arange(3)))
    assert graph.stages_of() == {"table": (0, 3)}
    engine = check(graph, {"x": normal((2, 3))}, {"x": normal((2, 3), seed=1)}, num_stages=4)
    places = engine._parameters["table"]
    assert {stage: array.devices() for stage, array in places.items()} == {
        0: {jax.devices("cpu")[0]},
        3: {jax.devices("cpu")[3]},
    }


def test_stages_do_not_go_back():
    """A node on stage 0 that uses a value of stage 1 runs on stage 1, and after it."""
    graph = Graph("back")
    x = graph.input("x", (3,), f32)
    with graph.stage(1):
        y = x * 2
    z = y + x
    assert z.stage == 1
    graph.output("z", z)
    check(graph, {"x": normal((3,))})


def test_a_state_that_two_stages_use_and_the_later_one_updates():
    state, kept = State("total", (3,), f32), State("kept", (3,), f32)
    graph = Graph("states")
    x = graph.input("x", (3,), f32)
    early = graph.state(state) * 2 + x
    with graph.stage(1):
        later = graph.state(state) + early
        graph.output("kept", graph.state(kept) + later)
    graph.update_state(state, later)
    graph.output("early", early)
    assert graph.stages_of()["total"] == (0, 1)
    check(graph, *({"x": normal((3,), seed=i)} for i in range(4)))


def twins(graph, first, second, x, table):
    """One value is the update of both."""
    total = first + second * 2 + x
    return total, total


def swapped(graph, first, second, x, table):
    return second, first + x


def one_keeps_what_the_other_had(graph, first, second, x, table):
    return first + x, first


def from_outside(graph, first, second, x, table):
    """Weights and inputs become states: what is overwritten is a copy."""
    return table, x


def a_constant(graph, first, second, x, table):
    return first * 0.5 + x, graph.constant(np.full(LARGE, 3, f32))


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("update", [twins, swapped, one_keeps_what_the_other_had, from_outside, a_constant])
def test_a_state_has_its_array_for_itself(update, num_stages):
    """Run after run, on one device and on two, whatever a state is updated with; weights and inputs stay as they are."""
    first, second = State("first", LARGE, f32), State("second", LARGE, f32)
    table = parameter("table", normal(LARGE))
    graph = Graph("update")
    x, before = graph.input("x", LARGE, f32), [graph.state(first), graph.state(second)]
    with graph.stage(num_stages - 1):
        graph.output("first", before[0] + x)
        graph.output("sum", before[0] + before[1] * x + graph.parameter(table))
        after = update(graph, *before, x, graph.parameter(table))
    for state, value in zip((first, second), after, strict=True):
        graph.update_state(state, value)
    inputs = [aligned_empty(LARGE, f32) for _ in range(3)]  # arrays that XLA takes as they are
    for seed, array in enumerate(inputs):
        array[:] = normal(LARGE, seed=seed)
    check(graph, *({"x": array} for array in inputs), num_stages=num_stages)
    for seed, array in enumerate(inputs):
        assert np.array_equal(array, normal(LARGE, seed=seed))


# ---- loops


def counting(limit_at=99, steps=6, shape=(2, 3), update=True):
    """A loop over two stages that carries a state of each, an input, a constant; stops where the sum is beyond the limit."""
    first, second = State("first", shape, f32), State("second", shape, f32)
    graph = Graph("counting")
    x, limit, go = graph.input("x", shape, f32), graph.input("limit", (), f32), graph.input("go", (), bool)
    table = parameter("table", normal((shape[-1],)))

    def body(step, first, second, x, count):
        first = first + x * graph.parameter(table)
        with step.graph.stage(1):
            second = second * 0.5 + first + ops.cast(step, f32)
            x = x + 0.25 * graph.parameter(table)
        total = ops.reduce_sum(ops.reduce_sum(second), axis=0)
        return ops.reshape(total, ()) < limit, first, second, x, count + 1

    before = x * 1
    results = ops.loop(steps, go, [graph.state(first), graph.state(second), x, graph.constant(0)], body)
    graph.output("x", results[2])
    graph.output("before", before + results[2])
    graph.output("count", results[3])
    if update:
        graph.update_state(first, results[0])
        graph.update_state(second, results[1])
    else:
        graph.output("first", results[0])
        graph.output("second", results[1])
    return graph


@pytest.mark.parametrize("shape", [(2, 3), LARGE], ids=["small", "large"])
@pytest.mark.parametrize("update", [True, False], ids=["updated", "kept"])
def test_loops_stop_early_late_or_do_not_begin(shape, update):
    """All steps, a condition that ends them, none at all; states that are carried but keep what they held as well."""
    graph, x = counting(shape=shape, update=update), np.abs(normal(shape, scale=1 / shape[-1]))
    runs = [(1e9, True), (1.5, True), (1e9, False), (-1e9, True), (1e9, True)]
    engine = check(graph, *({"x": x, "limit": f32.type(limit), "go": np.bool_(go)} for limit, go in runs))
    assert engine.run("graph", {"x": x, "limit": f32.type(1e9), "go": np.False_})["count"] == 0


def test_what_a_body_passes_on_is_not_overwritten():
    """Values that change places, that are returned twice, that come from outside, a state that is carried twice."""
    state = State("state", LARGE, f32)
    graph = Graph("passing")
    x, other = graph.input("x", LARGE, f32), graph.input("other", LARGE, f32)
    table = parameter("table", normal(LARGE))
    outside = x + other

    def body(step, a, b, c, d, e, s, t):
        with step.graph.stage(1):
            a2 = a + b * 0.5
            c2 = c * 0.25 + graph.parameter(table) + outside
        s2 = s + t
        return step < 9, b, a2, c2, c2, graph.parameter(table), s2, s2

    weight = graph.parameter(table)
    carried = [x, x, outside, weight, weight, graph.state(state), graph.state(state)]
    results = ops.loop(4, graph.constant(True), carried, body)
    for index, value in enumerate(results):
        graph.output(f"r{index}", value)
    graph.output("later", outside + graph.state(state) + weight)
    graph.update_state(state, results[5])
    check(graph, *({"x": normal(LARGE, seed=i), "other": normal(LARGE, seed=9)} for i in range(3)))


def test_a_state_that_a_body_reads_while_it_is_carried():
    state = State("state", LARGE, f32)
    graph = Graph("reading")
    x = graph.input("x", LARGE, f32)

    def body(step, s):
        with step.graph.stage(1):
            return step < 9, s * 0.5 + graph.state(state) + x

    (result,) = ops.loop(3, graph.constant(True), [graph.state(state)], body)
    graph.update_state(state, result)
    graph.output("result", result)
    check(graph, *({"x": normal(LARGE, seed=i)} for i in range(3)))


def test_loops_in_loops_and_one_after_the_other():
    state = State("state", LARGE, f32)
    graph = Graph("nested")
    x, go = graph.input("x", LARGE, f32), graph.input("go", (), bool)

    def outer(step, y, s):
        def inner(i, y, s):
            with i.graph.stage(1):
                s = s + y * ops.cast(i + step, f32)
            return i < step, y * 0.5 + x, s

        y, s = ops.loop(3, go, [y, s], inner)
        return step < 3, y, s

    y, s = ops.loop(5, graph.constant(True), [x, graph.state(state)], outer)
    y, s = ops.loop(2, graph.constant(True), [y, s], lambda step, y, s: (step < 9, y + s, s * 0.5))
    graph.update_state(state, s)
    graph.output("y", y)
    check(graph, *({"x": normal(LARGE, seed=i), "go": np.bool_(i != 1)} for i in range(3)))


def test_results_of_a_run_stay_when_the_next_one_overwrites_the_states():
    graph, x = counting(shape=LARGE), np.abs(normal(LARGE, scale=1e-5))
    graph.output("first", graph.state_updates["first"])
    _, engine = engines(graph)
    inputs = {"x": x, "limit": f32.type(1e9), "go": np.True_}
    one = engine.run("graph", inputs)
    kept = {key: array.copy() for key, array in one.items()}
    engine.run("graph", inputs)
    assert all(np.array_equal(one[key], kept[key]) for key in one)


def test_states_are_donated_not_copied():
    """The memory that a state had is its new value's, run after run, in loops of many steps too."""
    graph, x = counting(shape=LARGE, steps=5), np.abs(normal(LARGE, scale=1e-5))
    _, engine = engines(graph)
    inputs = {"x": x, "limit": f32.type(1e9), "go": np.True_}
    engine.run("graph", inputs)
    before = dict(engine._states)
    pointers = {key: array.unsafe_buffer_pointer() for key, array in before.items()}
    homes = {key: array.devices() for key, array in before.items()}
    engine.run("graph", inputs)
    assert all(array.is_deleted() for array in before.values())
    assert {key: array.unsafe_buffer_pointer() for key, array in engine._states.items()} == pointers
    assert {key: array.devices() for key, array in engine._states.items()} == homes
    assert homes["first"] != homes["second"]


def test_an_interrupt_inside_a_loop_leaves_zeros(monkeypatch):
    """Steps have overwritten the states by then."""
    graph, x = counting(shape=LARGE), np.abs(normal(LARGE, scale=1e-5))
    wanted, engine = engines(graph)
    inputs = {"x": x, "limit": f32.type(1e9), "go": np.True_}
    fresh = wanted.run("graph", inputs)
    engine.run("graph", inputs)
    program = engine._programs["graph"]
    loop = next(part for part in program._parts if hasattr(part, "parts"))
    piece, run, count = loop.parts[-1], loop.parts[-1].program, []

    def interrupted(*arguments):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(piece, "program", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.run("graph", inputs)
    assert not any(np.asarray(state).any() for state in engine._states.values())
    for key, array in engine.run("graph", inputs).items():
        assert_close(array, fresh[key])


# ---- stages of ranks


def test_stages_of_ranks():
    """Weights and states that are cut, on each stage's own ranks; a loop that adds them up between the stages."""
    world_size, first, second = 2, State("first", (2, 4), f32, is_cut=True), State("second", (2, 4), f32, is_cut=True)
    whole = normal((8, 3))
    up = parameter("up", whole, even_cut(0, 8, world_size))
    down = parameter("down", np.ascontiguousarray(whole.T), even_cut(1, 8, world_size))
    graph = Graph("both")
    x = graph.input("x", (2, 3), f32)

    def layer(x, state):
        hidden = ops.linear(x, x.graph.parameter(up)) + state
        return ops.tanh(ops.all_reduce(ops.linear(hidden, x.graph.parameter(down)), world_size)), hidden * 0.5

    def body(step, x, a, b):
        x, a = layer(x, a)
        with step.graph.stage(1):
            x, b = layer(x, b)
            rank = ops.cast(ops.rank_index(x, world_size), f32)
        return step < 9, x, a, b + rank

    x, a, b = ops.loop(3, graph.constant(True), [x, graph.state(first), graph.state(second)], body)
    graph.update_state(first, a)
    graph.update_state(second, b)
    graph.output("x", x)
    engine = check(graph, *({"x": normal((2, 3), seed=i)} for i in range(3)), world_size=world_size)
    devices = jax.devices("cpu")
    assert engine._states["first"].devices() == set(devices[:2]) and engine._states["second"].devices() == set(devices[2:4])


def test_a_ranks_number_may_cross_a_loop_but_not_a_stage():
    graph = Graph("numbers")
    x = graph.input("x", (3,), f32)
    rank = ops.cast(ops.rank_index(x, 2), f32)
    (y,) = ops.loop(3, graph.constant(True), [x], lambda step, y: (step < 9, y + ops.all_reduce(y * rank, 2)))
    with graph.stage(1):
        graph.output("y", y * 2)
    check(graph, {"x": normal((3,))}, world_size=2)
    with graph.stage(1):
        graph.output("z", ops.all_reduce(y * rank, 2))
    told = r"graph 'numbers': cast differs between ranks and lies on stage 0, but stage 1 uses it; an all_reduce or all_gather"
    with pytest.raises(UserError, match=told):
        engines(graph, world_size=2)[1].run("graph", {"x": normal((3,))})
