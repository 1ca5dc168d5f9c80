"""Engines: weights and states that graphs share, what is refused, failed runs, and caches that are updated in place."""

import re
import threading

import numpy as np
import pytest
from run_op import normal, reference, xla
from tolerance import assert_close

from poptransformer import Session, UnsupportedError, UserError, ops
from poptransformer.backends import make_engine
from poptransformer.backends.engine import random_weight
from poptransformer.graph import Graph, Parameter, State, bfloat16

f32, i32 = np.dtype(np.float32), np.dtype(np.int32)


@pytest.fixture(params=["reference", "xla"])
def engine(request):
    engine = reference() if request.param == "reference" else xla()
    yield engine
    engine.close()


def weight(name="weight", array=(1.0, 2.0), **options):
    array = np.array(array, np.float32)
    return Parameter(name, array.shape, f32, **{"load": lambda rank: array} | options)


def accumulator(state, parameter=None, name="add"):
    """state += x (* parameter); gives the state after and before, and what another state, never updated, holds."""
    graph = Graph(name)
    x = graph.input("x", state.shape, f32)
    before = graph.state(state)
    after = before + (x if parameter is None else x * graph.parameter(parameter))
    graph.update_state(state, after)
    graph.output("after", after)
    graph.output("before", before)
    return graph


# ---- what is refused


def test_unknown_graphs_and_wrong_inputs(engine):
    with pytest.raises(UserError, match="no graph 'decode' is compiled; compiled: none"):
        engine.run("decode", {})
    graph = Graph("decode")
    graph.output("y", graph.input("x", (2,), f32) + ops.cast(graph.input("n", (), i32), f32))
    engine.compile("decode", graph)
    with pytest.raises(UserError, match="no graph 'prefill' is compiled; compiled: decode"):
        engine.run("prefill", {})
    x, n = np.zeros(2, np.float32), np.int32(1)
    for inputs in ({"x": x}, {"x": x, "n": n, "m": n}, {}):
        with pytest.raises(UserError, match=r"graph 'decode' takes inputs \['n', 'x'\], given are "):
            engine.run("decode", inputs)
    for wrong, told in ((np.zeros(3, np.float32), r"float32\[3\]"), (np.zeros(2), r"float64\[2\]"), ([1, 2], r"int64\[2\]")):
        with pytest.raises(UserError, match=rf"graph 'decode': input 'x' is float32\[2\], given is {told}"):
            engine.run("decode", {"x": wrong, "n": n})
    assert engine.run("decode", {"x": x, "n": n})["y"].tolist() == [1, 1]
    with pytest.raises(UserError, match="a graph called 'decode' is already compiled"):
        engine.compile("decode", graph)


def test_parameters_that_are_not_loaded(engine):
    graph = Graph("g")
    for number in range(7):
        graph.parameter(weight(f"w{number}"))
    engine.load([weight("w3")])
    with pytest.raises(UserError, match="graph 'g' uses 6 parameters that are not loaded: w0, w1, w2, w4, w5"):
        engine.compile("g", graph)
    assert not engine.graphs


def test_states_that_differ_between_graphs(engine):
    engine.compile("small", accumulator(State("cache", (2,), f32)))
    with pytest.raises(UserError, match=r"state 'cache' is float32\[2\] in one graph and float32\[3\] in another"):
        engine.compile("large", accumulator(State("cache", (3,), f32)))


def test_unknown_backend_and_options():
    with pytest.raises(UnsupportedError, match="backend='popart' is not supported; this version has xla, reference"):
        make_engine("popart")
    assert make_engine("reference").device_info.platform == "numpy"
    with pytest.raises(UserError, match="platform='npu' is unknown; choose one of auto, cpu, cuda, tpu"):
        make_engine("xla", "npu", False, "")
    with pytest.raises(UserError, match="custom_ops='yes': wanted true, false or auto"):
        make_engine("xla", "cpu", "yes", "")
    info = make_engine("xla", "cpu", False, "").device_info
    assert (info.platform, info.custom_ops) == ("cpu", "none (plain XLA)")


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_xla_refuses_64_bits_instead_of_rounding_them(dtype):
    engine, graph = xla(), Graph("wide")
    x = graph.input("x", (2,), np.float32)
    graph.output("y", ops.cast(x, dtype))
    with pytest.raises(UnsupportedError, match=f"graph 'wide': backend xla has no {np.dtype(dtype)}"):
        engine.compile("wide", graph)
    assert not engine.graphs


# ---- weights


def test_two_graphs_share_weights_that_are_read_once(engine):
    reads, ticks, array = [], [], np.array([2, 3], np.float32)
    shared = weight(load=lambda rank: reads.append(1) or array)
    engine.load([shared, shared], progress=ticks.append)
    engine.load([shared])
    assert len(reads) == 1 and ticks == [shared, shared]
    for name, state in (("first", State("a", (2,), f32)), ("second", State("b", (2,), f32))):
        engine.compile(name, accumulator(state, shared, name))
        assert engine.run(name, {"x": np.ones(2, np.float32)})["after"].tolist() == [2, 3]


def test_a_weight_that_cannot_be_read_can_be_read_later(engine):
    def fail(rank):
        raise OSError("gone")

    parameter = weight(load=fail)
    with pytest.raises(OSError, match="gone"):
        engine.load([parameter])
    parameter.load = lambda rank: np.array([5, 6], np.float32)
    engine.load([parameter])
    engine.compile("g", accumulator(State("s", (2,), f32), parameter))
    assert engine.run("g", {"x": np.ones(2, np.float32)})["after"].tolist() == [5, 6]


def test_random_weights(engine):
    """Deviation 0.02, the same for the same name, others for another; ones and zeros where the layer says so."""
    names = {"a.weight": "normal", "b.weight": "normal", "ones": "ones", "zeros": "zeros", "half": "normal"}
    graph = Graph("g")
    parameters = [Parameter(name, (40, 50), bfloat16 if name == "half" else f32, init=init) for name, init in names.items()]
    for parameter in parameters:
        value = graph.parameter(parameter)
        graph.output(parameter.name, ops.reshape(value, (2000,)))
    engine.load(parameters)
    engine.compile("g", graph)
    drawn = engine.run("g", {})
    assert (drawn["ones"] == 1).all() and (drawn["zeros"] == 0).all() and drawn["half"].dtype == bfloat16
    for name in ("a.weight", "b.weight", "half"):
        numbers = drawn[name].astype(np.float64)
        assert abs(numbers.mean()) < 2e-3 and abs(numbers.std() - 0.02) < 2e-3
    assert np.abs(drawn["a.weight"] - drawn["b.weight"]).max() > 0.01
    again = random_weight(parameters[0])
    assert_close(again, random_weight(parameters[0]), rtol=0, atol=0)


# ---- states


def test_states_stay_from_run_to_run_and_are_shared(engine):
    state, one = State("total", (2,), f32), np.ones(2, np.float32)
    engine.compile("add", accumulator(state))
    assert engine.run("add", {"x": one})["after"].tolist() == [1, 1], "states begin as zeros"
    engine.run("add", {"x": 2 * one})
    reading = Graph("read")
    reading.output("double", reading.state(State("total", (2,), f32)) * 2)
    engine.compile("read", reading)  # another State of the same name and kind: the same tensor, which keeps what it holds
    for _ in range(2):
        assert engine.run("read", {})["double"].tolist() == [6, 6]
    doubling = Graph("double")
    doubling.update_state(state, doubling.state(state) * 2)
    engine.compile("double", doubling)
    assert engine.run("double", {}) == {}
    result = engine.run("add", {"x": one})
    assert result["before"].tolist() == [6, 6] and result["after"].tolist() == [7, 7]
    engine.reset_states()
    assert engine.run("read", {})["double"].tolist() == [0, 0]


def test_outputs_outlive_later_runs(engine):
    """An output that is also a state, or only read from one, keeps its numbers when the state moves on or is freed."""
    state, kept = State("total", (2000,), f32), State("kept", (2000,), f32)
    graph = accumulator(state)
    graph.output("kept", graph.state(kept))
    fill = Graph("fill")
    fill.update_state(kept, fill.state(kept) + 5)
    engine.compile("add", graph)
    engine.compile("fill", fill)
    engine.run("fill", {})
    outputs = [engine.run("add", {"x": np.full(2000, 1, np.float32)}) for _ in range(3)]
    engine.run("fill", {})
    engine.reset_states()
    engine.close()
    garbage = [np.full(2000, 77, np.float32) for _ in range(20)]
    for number, output in enumerate(outputs):
        assert (output["before"] == number).all() and (output["after"] == number + 1).all()
        assert (output["kept"] == 5).all()
    assert len(garbage) == 20


def test_writing_into_an_output_changes_no_state(engine):
    state, one = State("total", (2,), f32), np.ones(2, np.float32)
    engine.compile("add", accumulator(state))
    for output in engine.run("add", {"x": one}).values():
        if output.flags.writeable:
            output[:] = 99
    assert engine.run("add", {"x": one})["after"].tolist() == [2, 2]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_broken_run_leaves_zeros(engine, monkeypatch, error, moment):
    """However far the run came: also when the states have been given away to the program already."""
    state, one = State("total", (2,), f32), np.ones(2, np.float32)
    engine.compile("add", accumulator(state))
    engine.run("add", {"x": one})

    def broken(run):
        def program(*arguments):
            if moment == "after":
                run(*arguments)
            raise error("broken off")

        return program

    with monkeypatch.context() as patch:
        if hasattr(engine, "_programs"):
            patch.setitem(engine._programs, "add", broken(engine._programs["add"]))
        else:
            patch.setattr(engine, "_evaluate", broken(engine._evaluate))
        with pytest.raises(error, match="broken off"):
            engine.run("add", {"x": one})
    result = engine.run("add", {"x": 3 * one})
    assert result["before"].tolist() == [0, 0] and result["after"].tolist() == [3, 3]


def test_wrong_inputs_do_not_touch_the_states(engine):
    engine.compile("add", accumulator(State("total", (2,), f32)))
    engine.run("add", {"x": np.ones(2, np.float32)})
    with pytest.raises(UserError):
        engine.run("add", {"x": np.ones(3, np.float32)})
    assert engine.run("add", {"x": np.ones(2, np.float32)})["after"].tolist() == [2, 2]


def test_the_reference_computes_in_float64_when_told():
    engine = reference(np.float64)
    parameter = weight(array=[1 + 2**-20])
    graph = accumulator(State("s", (1,), f32), parameter)
    engine.load([parameter])
    graph.output("small", graph.input("y", (1,), bfloat16) + 2.0**-40)
    engine.compile("add", graph)
    result = engine.run("add", {"x": np.array([1 + 2**-20], np.float32), "y": np.ones(1, bfloat16)})
    assert result["after"].dtype == np.float64 and result["after"][0] == (1 + 2.0**-20) ** 2
    assert result["small"][0] == 1 + 2.0**-40


# ---- memory (backend xla)


def test_close_frees_the_memory():
    import jax

    engine, parameter = xla(), weight(array=np.ones(1000))
    engine.load([parameter])
    engine.compile("add", accumulator(State("total", (1000,), f32), parameter))
    engine.run("add", {"x": np.ones(1000, np.float32)})
    held = [*(array for places in engine._parameters.values() for array in places.values()), *engine._states.values()]
    assert len(held) == 2
    engine.close()
    assert all(array.is_deleted() for array in held)
    assert not any(array is other for array in held for other in jax.live_arrays())
    engine.close()


def custom_ops_are_built():
    from poptransformer.backends.xla.custom_ops import MissingLibraryError, load_cpu_library

    try:
        return bool(load_cpu_library())
    except MissingLibraryError:
        return False


def widened_tables(engine, name, shape):
    """Lines of a compiled program that make a float32 or 16-bit-integer copy of a table of this shape."""
    return re.findall(
        rf"= (?:f32|u16)\[{shape[0]},{shape[1]}\]\S* (?:convert|fusion|bitcast-convert)\(.*", engine._programs[name].as_text()
    )


def copies(engine, name):
    """Numbers of elements of all arrays that a compiled program copies."""
    text = engine._programs[name].as_text()
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(", text)
    assert "while" in text
    return [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize(("custom_ops", "precision"), [(False, "fp32"), (True, "fp32"), (True, "bf16")])
def test_a_decode_loop_updates_its_caches_in_place(batch_size, custom_ops, precision):
    """No copy of an array of a cache's size in the compiled program, and the same memory before and after a run.

    Plain XLA in float32 only: with 16 bits XLA:CPU turns the whole cache into float32 for its products.
    """
    if custom_ops and not custom_ops_are_built():
        pytest.skip("the custom ops are not built: run `make`")
    config = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 30, "n_layer": 2, "n_head": 3, "n_positions": 53}
    options = {"batch_size": batch_size, "max_length": 53, "random_weights": True, "precision": precision}
    with Session(config, platform="cpu", custom_ops=custom_ops, execution_cache_dir="", **options) as session:
        session.compile()
        engine = session._engine
        elements = batch_size * 3 * 53 * 10
        assert {state.shape for name, state in engine._states.items() if "cache" in name} == {(batch_size, 3, 53, 10)}
        assert elements not in copies(engine, "decode")
        assert not widened_tables(engine, "decode", (61, 30))
        before = {name: state.unsafe_buffer_pointer() for name, state in engine._states.items()}
        tokens = session.generate([[1, 2, 3]] * batch_size, max_new_tokens=5, temperature=0)
        assert [len(row.token_ids) for row in tokens] == [5] * batch_size
        after = {name: state.unsafe_buffer_pointer() for name, state in engine._states.items()}
        assert {name for name in before if before[name] == after[name]} >= {name for name in before if "cache" in name}


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_loop_over_attention_updates_its_caches_in_place(batch_size):
    """The same for the op alone, with caches that are large beside everything else; and the result is right."""
    shape, cache_shape = (batch_size, 1, 4, 8), (batch_size, 2, 301, 8)
    k_state, v_state = State("k_cache", cache_shape, f32), State("v_cache", cache_shape, f32)
    graph = Graph("decode")
    query = graph.input("query", shape, f32)
    length = graph.input("length", (batch_size,), i32)
    one = graph.constant(np.ones(batch_size, np.int32))

    def body(step, x, length, k_cache, v_cache):
        key = ops.slice_axis(x, 0, 2, axis=2)
        x, k_cache, v_cache = ops.attention(x, key, key * 2, k_cache, v_cache, length, one, 0.3)
        return step < 99, x, length + one, k_cache, v_cache

    carried = [query, length, graph.state(k_state), graph.state(v_state)]
    x, _, k_cache, v_cache = ops.loop(20, graph.constant(True), carried, body)
    graph.update_state(k_state, k_cache)
    graph.update_state(v_state, v_cache)
    graph.output("x", x)
    inputs = {"query": normal(shape), "length": np.arange(batch_size, dtype=np.int32)}
    results = []
    for engine in (reference(), xla()):
        engine.compile("decode", graph)
        results.append(
            [
                engine.run("decode", inputs)["x"],
                *(np.reshape(engine._states[key], cache_shape) for key in ("k_cache", "v_cache")),
            ]
        )
    assert int(np.prod(cache_shape)) not in copies(engine, "decode")
    for actual, wanted in zip(results[1], results[0], strict=True):
        assert_close(actual, wanted, rtol=1e-4, atol=1e-5)  # twenty steps, each on the result of the one before


def test_an_interrupt_comes_through_while_a_compiler_runs(monkeypatch):
    """The compiler's thread is waited for when the process ends, not interrupted: XLA's would crash the process then."""
    from poptransformer.backends.xla import program

    release, done = threading.Event(), threading.Event()

    def compiler():
        release.wait(60)
        done.set()
        return "program"

    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("concurrent.futures.Future.result", interrupted)
        program.uninterrupted(compiler)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "compile")
    assert not thread.daemon and not done.is_set()
    release.set()
    thread.join(60)
    assert done.is_set()
    assert program.uninterrupted(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        program.uninterrupted(lambda: 1 / 0)
