"""Graphs: names, scopes, parameters, states, constants, loop bodies, and what building one imports."""

import ast
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import poptransformer
from poptransformer import UserError, ops
from poptransformer.graph import Graph, Parameter, Spec, State, Value, bfloat16

f32, i32 = np.dtype(np.float32), np.dtype(np.int32)


def test_specs():
    spec = Spec([np.int64(2), 3], "float32")
    assert spec == Spec((2, 3), np.float32) and spec.rank == 2 and spec.num_bytes == 24
    assert str(spec) == "float32[2, 3]" and str(Spec((), bfloat16)) == "bfloat16[]"
    assert Spec((4,), bfloat16).num_bytes == 8 and Spec((), bool).num_bytes == 1 and Spec((0, 5), f32).num_bytes == 0


def test_names_are_unique_and_tell_the_layer():
    graph = Graph("names")
    x = graph.input("x", (2,), f32)
    with graph.scope("model.layers.0"):
        first, second = x + x, x + x
        with graph.scope("model.layers.0.mlp"):
            inner = ops.exp(x)
        after = ops.exp(x)
    outside = x + x
    names = [value.name for value in (first, second, inner, after, outside)]
    assert names == ["model.layers.0/add", "model.layers.0/add:1", "model.layers.0.mlp/exp", "model.layers.0/exp", "add"]
    assert [node.scope for node in graph.nodes] == ["model.layers.0"] * 2 + ["model.layers.0.mlp", "model.layers.0", ""]
    with graph.scope("add"):  # names that collide by accident
        names += [ops.exp(graph.input("add:1", (1,), f32)).name, graph.input("add", (1,), f32).name]
    assert len({*names, x.name}) == 8


def test_scope_and_stage_come_back_after_an_error():
    graph = Graph("scopes")
    with pytest.raises(RuntimeError), graph.scope("layer"), graph.stage(3):
        x = graph.input("x", (), f32)
        assert (graph.scope_name, (x + x).stage) == ("layer", 3)
        raise RuntimeError
    assert graph.scope_name == "" and (x + x).stage == 0


def test_stages_place_nodes():
    graph = Graph("stages")
    x = graph.input("x", (2,), f32)
    with graph.stage(1):
        y = x + 1
        with graph.stage(2):
            z = y + 1
    assert [node.stage for node in graph.nodes] == [1, 2] and (y.stage, z.stage) == (1, 2)


def test_inputs_and_outputs_have_names_of_their_own():
    graph = Graph("decode")
    x = graph.input("x", (2,), f32)
    graph.output("x", x)
    with pytest.raises(UserError, match="graph 'decode' already has an input 'x'"):
        graph.input("x", (2,), f32)
    with pytest.raises(UserError, match="graph 'decode' already has an output 'x'"):
        graph.output("x", x)


def test_values_of_other_graphs_are_refused():
    graph, other = Graph("decode"), Graph("prefill")
    x, y = graph.input("x", (2,), f32), other.input("y", (2,), f32)
    with graph.scope("layer.3"), pytest.raises(UserError, match="layer.3: add: y belongs to graph 'prefill', not 'decode'"):
        x + y
    with pytest.raises(UserError, match="output 'out': y belongs to graph 'prefill', not 'decode'"):
        graph.output("out", y)
    with pytest.raises(UserError, match="update of state 'cache': y belongs to graph 'prefill', not 'decode'"):
        graph.update_state(State("cache", (2,), f32), y)
    assert not graph.nodes and not graph.outputs and not graph.state_updates


def test_a_tied_parameter_is_one_value():
    graph = Graph("tied")
    table = Parameter("wte.weight", (5, 3), f32)
    assert graph.parameter(table) is graph.parameter(table)
    assert table.spec == Spec((5, 3), f32)
    with pytest.raises(UserError, match="graph 'tied': two different things are called 'wte.weight'"):
        graph.parameter(Parameter("wte.weight", (5, 3), f32))
    assert list(graph.parameters) == ["wte.weight"]


def test_states():
    graph = Graph("states")
    cache = State("cache", (2, 3), f32)
    assert graph.state(cache) is graph.state(cache)
    with pytest.raises(UserError, match=r"state 'cache' holds float32\[2, 3\], its update is float32\[2\]"):
        graph.update_state(cache, graph.input("x", (2,), f32))
    with pytest.raises(UserError, match="two different things are called 'cache'"):
        graph.state(State("cache", (2, 3), f32))
    graph.update_state(cache, graph.state(cache) + 1)
    graph.update_state(cache, graph.state(cache) + 2)  # the last word counts
    assert graph.state_updates["cache"] is graph.nodes[-1].outputs[0]

    def body(step, x):
        step.graph.update_state(cache, x)
        return step < 1, x

    with pytest.raises(UserError, match="'cache' is updated inside a loop body; carry it through the loop"):
        ops.loop(2, graph.constant(True), [graph.state(cache)], body)


def test_constants():
    graph = Graph("constants")
    wanted = [
        (1.5, f32),
        (3, i32),
        ([1, 2], i32),
        (True, bool),
        (np.ones(2, np.float16), np.float16),
        (np.uint32(7), np.uint32),
    ]
    for given, dtype in wanted:
        value = graph.constant(given)
        assert value.dtype == dtype and graph.constants[value].dtype == dtype and value.shape == np.shape(given)
    assert graph.constant(2, dtype=bfloat16).dtype == bfloat16
    for too_large in (2**31, [-(2**31) - 1, 0]):
        with pytest.raises(UserError, match="a constant does not fit int32; give its dtype"):
            graph.constant(too_large)
    assert graph.constant(2**31, dtype=np.uint32).dtype == np.uint32
    assert graph.constant(np.zeros((0, 2), np.int64)).shape == (0, 2)


def test_loop_bodies_register_with_the_outermost_graph():
    graph = Graph("outer")
    weight, cache = Parameter("weight", (2,), f32), State("cache", (2,), f32)
    bodies = []

    def body(step, x):
        bodies.append(step.graph)
        inner = step.graph
        with inner.scope("layer.0"):
            x = x * inner.parameter(weight) + inner.state(cache) + inner.constant(np.ones(2, np.float32))
        return step < 1, x

    with graph.scope("model"):
        x = graph.input("x", (2,), f32)
        ops.loop(3, graph.constant(True), [x], body)
    (inner,) = bodies
    assert inner.root is graph and (graph.depth, inner.depth) == (0, 1) and inner.scope_name == "model"
    assert list(graph.parameters) == ["weight"] and list(graph.states) == ["cache"]
    assert not inner.parameters and not inner.constants
    assert [node.op for node in graph.nodes] == ["loop"]
    assert [node.op for node in graph.walk()] == ["loop", "mul", "add", "add", "less"]
    assert inner.nodes[0].scope == "layer.0"


def test_what_depends_on_the_outside_alone_is_computed_outside():
    graph = Graph("outer")
    x, go = graph.input("x", (2,), f32), graph.constant(True)
    ops.loop(3, go, [x], lambda step, y: (step < 1, y + ops.exp(x)))
    assert [node.op for node in graph.nodes] == ["exp", "loop"]


def test_bytes_read():
    """Each weight once, however often it is used; tables that are only looked up do not count, tied ones do."""
    graph = Graph("bytes")
    ids = graph.input("ids", (3,), i32)
    table, weight = (graph.parameter(Parameter(name, (10, 4), dtype)) for name, dtype in (("wte", f32), ("head", bfloat16)))
    graph.parameter(Parameter("unused", (100, 100), f32))
    x = ops.gather(table, ids)

    def body(step, x):
        y = ops.linear(x, weight, out_dtype=f32)
        return step < 1, ops.matmul(y, ops.cast(weight, f32))

    ops.loop(5, graph.constant(True), [x], body)
    assert graph.parameter_bytes_read() == 10 * 4 * 2
    ops.linear(x, table)
    assert graph.parameter_bytes_read() == 10 * 4 * 2 + 10 * 4 * 4


def test_values_and_numpy():
    """NumPy leaves the operators to Value; values are compared as objects and can be keys."""
    graph = Graph("values")
    x = graph.input("x", (2,), f32)
    for y in (np.ones(2) * x, np.float32(1) + x, 1 - x, np.ones(2) < x):
        assert isinstance(y, Value)
    assert x == x and x != y and len({x, y}) == 2
    assert repr(x) == "Value(x: float32[2])"


HEAVY = ("jax", "transformers", "tokenizers", "torch", "onnx", "hydra", "huggingface_hub", "safetensors")


@pytest.mark.parametrize(
    "code",
    [
        "import poptransformer",
        "import poptransformer.sessions, poptransformer.models, poptransformer.config",
        """
import numpy as np
from poptransformer.models import find_model
from poptransformer.register import REGISTER
config = {"model_type": "gpt2", "vocab_size": 17, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 8}
kind = find_model(config)
types = dict(packing=None, dtype=np.float32, weight_dtype=np.float32, cache_dtype=np.float32)
with REGISTER.scope(batch_size=1, max_length=8, world_size=1, **types):
    model = kind(kind.config_class.from_hf(config))
assert len(list(model.build_decode().walk())) > 10
""",
    ],
    ids=["package", "modules", "building a graph"],
)
def test_light_imports(code):
    """Building a graph needs NumPy alone."""
    code += f"\nimport sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


def test_imports_point_one_way():
    """examples > sessions > models, backends > layers > ops > graph: no module imports from above it."""
    package = pathlib.Path(poptransformer.__file__).parent
    above = {
        "graph": {"ops", "layers", "models", "backends", "sessions", "generation"},
        "register": {"graph", "ops", "layers", "models", "backends", "sessions", "generation"},
        "ops": {"layers", "models", "backends", "sessions", "generation", "register"},
        "layers": {"models", "backends", "sessions", "generation"},
        "models": {"backends", "sessions", "generation"},
        "backends": {"layers", "models", "sessions", "generation", "register"},
        "checkpoint": {"layers", "models", "backends", "sessions", "generation", "ops"},
        "tokenizers": {"layers", "models", "backends", "sessions", "ops", "graph"},
    }
    wrong = []
    for path in package.rglob("*.py"):
        place = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            parts = [name.split(".") for name in names if name.startswith("poptransformer.")]
            wrong += [f"{place} imports {'.'.join(name)}" for name in parts if name[1] in above.get(place, ())]
    assert not wrong
