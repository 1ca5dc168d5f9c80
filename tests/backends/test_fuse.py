"""Fusion: blocks of every kind as one step program, beside the same graph node by node; what is left out, and why."""

import re

import numpy as np
import pytest
from fused_blocks import CAPACITY, Block, check, f16, f32, give_weights, i32, run_both
from hypothesis import given
from hypothesis import strategies as st
from run_op import hypothesis_settings, normal, xla
from tolerance import assert_close

from poptransformer import kv_cache, ops
from poptransformer.backends.xla import custom_ops
from poptransformer.backends.xla.fuse import STEP_PROGRAM, fuse
from poptransformer.float8 import FLOAT8
from poptransformer.graph import Graph, Parameter, bfloat16
from poptransformer.layers import LayerNorm, RMSNorm
from poptransformer.packing import Packing

BLOCKS = {
    "llama": Block(rotary_dim=10),
    "llama bf16": Block(batch_size=2, rotary_dim=10, dtype=bfloat16, cache_dtype=bfloat16),
    "gpt2": Block(
        batch_size=3, num_kv_heads=4, norm=LayerNorm, bias=True, is_qkv_fused=True, mlp="plain", activation="gelu_new",
        cache_dtype=f16,
    ),
    "chatglm2": Block(rotary_dim=4, interleaved=True, is_qkv_fused=True, mlp="gated, fused", intermediate_size=48, bias=True),
    "qwen3 int8": Block(batch_size=2, rotary_dim=10, qk_norm=RMSNorm, packing=("int8", 32), cache_dtype=f16),
    "phi int4, parallel": Block(
        rotary_dim=6, is_parallel=True, norm=LayerNorm, bias=True, mlp="plain", activation="gelu", packing=("int4", 32),
        qk_norm=LayerNorm,
    ),
    "mistral, fused int4": Block(
        batch_size=8, rotary_dim=10, window=9, packing=("int4", -1), mlp="gated, fused", intermediate_size=64
    ),
    "bloom fp16": Block(
        batch_size=4, norm=LayerNorm, alibi=True, bias=True, mlp="plain", activation="relu", dtype=f16, cache_dtype=f16
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    check(BLOCKS[name])


@st.composite
def blocks(draw):
    kind = draw(st.sampled_from(["fp32", "bf16", "fp16", "int8", "int4"]))
    dtype = {"bf16": bfloat16, "fp16": f16}.get(kind, f32)
    num_kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 7, 16, 34]))
    return Block(
        batch_size=draw(st.integers(1, 8)),
        hidden_size=draw(st.sampled_from([1, 17, 32, 65, 129])),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(st.sampled_from([1, 31, 48, 100])),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from([f32, f16, FLOAT8, kv_cache.INT8])),
        packing=(kind, draw(st.sampled_from([32, 64, -1]))) if kind in ("int8", "int4") else None,
        norm=draw(st.sampled_from([RMSNorm, LayerNorm])),
        bias=draw(st.booleans()),
        is_qkv_fused=draw(st.booleans()),
        mlp=draw(st.sampled_from(["gated", "gated, fused", "plain"])),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_new", "relu", "tanh", "sigmoid"])),
        rotary_dim=draw(st.sampled_from([None, 2, head_dim // 2 * 2])),
        interleaved=draw(st.booleans()),
        qk_norm=draw(st.sampled_from([None, RMSNorm, LayerNorm])),
        window=draw(st.sampled_from([None, 1, 5, 70])),
        alibi=draw(st.booleans()),
        is_parallel=draw(st.booleans()),
    )


@hypothesis_settings(10)
@given(blocks())
def test_any_block(block):
    check(block)


# ---- what becomes one program


def programs_of(graph):
    fusion = fuse(graph, False)
    return [node.attributes["program"] for node in fusion.nodes[graph] if node.op == STEP_PROGRAM], fusion


def test_a_block_is_one_program_in_few_phases():
    (program,), fusion = programs_of(Block(rotary_dim=10).build())
    # x loaded, the table; q, k, v; attention; out + x; gate * up; down + x; the head, beside the stores
    assert program.numbers[4] == 7
    assert not fusion.reasons
    # The arena holds what is alive, not everything.
    assert program.numbers[3] < 400


def test_caches_stay_where_they_are():
    engine, graph = xla(True), Block(rotary_dim=10).build()
    engine.load(give_weights([parameter for parameter, _ in graph.parameters.values()]))
    engine.compile("step", graph)
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(", engine._programs["step"].as_text())
    assert f"1,2,{CAPACITY},10" not in shapes
    before = {name: array.unsafe_buffer_pointer() for name, array in engine._states.items()}
    engine.run("step", Block().inputs(0))
    assert before == {name: array.unsafe_buffer_pointer() for name, array in engine._states.items()}
    engine.close()


def weight(graph, name, *shape):
    return graph.parameter(Parameter(name, shape, f32))


def test_an_op_that_no_program_takes_ends_it():
    """Two programs with the op between them, and one before both that needs nothing of them."""

    def build():
        graph = Graph("step")
        x, y = graph.input("x", (2, 6), f32), graph.input("y", (2, 6), f32)
        a = ops.silu(ops.linear(x, weight(graph, "a", 5, 6)))
        b = ops.linear(a, weight(graph, "b", 6, 5))
        late = ops.exp(y)
        c = ops.exp(b)
        d = ops.linear(c, weight(graph, "c", 5, 6)) + a
        graph.output("both", ops.linear(d, weight(graph, "d", 6, 5)) + late)
        graph.output("b", b)
        return graph

    graph = build()
    programs, fusion = programs_of(graph)
    assert [node.op for node in fusion.nodes[graph]] == ["exp", STEP_PROGRAM, "exp", STEP_PROGRAM]
    assert set(fusion.reasons.values()) == {"no step of programs for this op"}
    assert [sorted(node.op for node in program.nodes) for program in programs] == [
        ["linear", "linear", "silu"], ["add", "add", "linear", "linear"],
    ]  # fmt: skip
    fused, plain, taken = run_both(build, [{"x": normal((2, 6)), "y": normal((2, 6), seed=1)}])
    assert taken["linear", "kernel step_program"] == 4
    assert taken["exp", "plain XLA"] == 2
    for name, expected in plain[0].items():
        assert_close(fused[0][name], expected)


def test_values_that_others_read_are_results():
    """Of every dtype; a norm, a product and a part of one; each computed once."""

    def build():
        graph = Graph("step")
        x = graph.input("x", (3, 8), bfloat16)
        parameters = [graph.parameter(Parameter(name, shape, bfloat16)) for name, shape in (("n", (8,)), ("w", (10, 8)))]
        normed = ops.rms_norm(x, parameters[0], 1e-5)
        wide = ops.linear(normed, parameters[1], out_dtype=np.float32)
        first, second = ops.split(wide, (4, 6))
        graph.output("normed", normed)
        graph.output("second", second)
        graph.output("twice", ops.linear(ops.cast(wide, bfloat16), graph.parameter(Parameter("v", (3, 10), bfloat16))))
        graph.output("first", ops.relu(first) * 2.0)
        return graph

    programs, _ = programs_of(build())
    assert [len(program.nodes) for program in programs] == [7]
    fused, plain, _ = run_both(build, [{"x": normal((3, 8), bfloat16)}])
    for name, expected in plain[0].items():
        assert_close(fused[0][name], expected, 0.02, 0.05)


def packed_pair(graph, x, size):
    packing = Packing("int8", 32, 2 * size, x.shape[-1])
    whole = graph.parameter(Parameter("gate_up", packing.shape, np.dtype(np.uint8), packing=packing))
    gate, up = ops.split(ops.packed_linear(x, whole, packing), (size, size))
    return ops.linear(ops.silu(gate) * up, weight(graph, "down", 5, size))


@pytest.mark.parametrize("size, num_phases", [(32, 3), (24, 5)])
def test_a_fused_gate_is_cut_at_blocks_only(size, num_phases):
    """Where the second half of a packed weight does not begin with a block, the whole is one product and the rest is mapped."""

    def build():
        graph = Graph("step")
        graph.output("y", packed_pair(graph, graph.input("x", (1, 40), f32), size))
        return graph

    (program,), _ = programs_of(build())
    assert program.numbers[4] == num_phases
    fused, plain, _ = run_both(build, [{"x": normal((1, 40))}])
    assert_close(fused[0]["y"], plain[0]["y"], 1e-4, 1e-4)


# ---- what is left out, and why


def reasons(graph):
    return {(node.op, reason) for node, reason in fuse(graph, False).reasons.items()}


def test_no_program_for_many_rows():
    assert ("linear", "9 rows, programs without tiles take one new position of up to 8") in reasons(Block(batch_size=9).build())


def test_no_program_for_prompts():
    graph = Graph("prefill")
    x = graph.input("x", (1, 3, 2, 4), f32)
    cache = graph.input("k", (1, 2, 5, 4), f32), graph.input("v", (1, 2, 5, 4), f32)
    lengths = graph.input("cache_len", (1,), i32), graph.input("num_tokens", (1,), i32)
    out = ops.attention(x, x, x, *cache, *lengths, 1.0)[0]
    graph.output("y", ops.linear(ops.reshape(out, (1, 3, 8)), weight(graph, "w", 2, 8)))
    assert reasons(graph) == {
        (op, "3 rows, programs without tiles take one new position of up to 8") for op in ("attention", "reshape", "linear")
    }


def test_no_program_without_products():
    graph = Graph("sum")
    x = graph.input("x", (2, 3), f32)
    graph.output("y", x + x)
    assert reasons(graph) == {("add", "no products here to fuse with")}


def test_one_product_alone_stays_what_it_is():
    graph = Graph("step")
    graph.output("y", ops.linear(graph.input("x", (2, 3), f32), weight(graph, "w", 4, 3)))
    assert reasons(graph) == {("linear", "too little beside it to fuse with")}


@pytest.mark.parametrize(
    "turn_query, turn_key, reason",
    [
        (0, 1, "query and key turn differently"),
        (1, None, "query and key turn differently"),
        (2, 2, None),
    ],
)
def test_ropes_of_query_and_key(turn_query, turn_key, reason):
    graph = Graph("step")
    x = graph.input("x", (1, 1, 8), f32)
    positions = graph.input("position_ids", (1, 1), i32)
    caches = graph.input("k", (1, 2, 5, 4), f32), graph.input("v", (1, 2, 5, 4), f32)
    lengths = graph.input("cache_len", (1,), i32), graph.input("num_tokens", (1,), i32)
    q, k, v = (ops.reshape(ops.linear(x, weight(graph, name, 8, 8)), (1, 1, 2, 4)) for name in "qkv")
    freqs = [graph.constant(np.array([1, factor], np.float32)) for factor in (0.5, 0.25, 0.125)]
    q = ops.rope(q, positions, freqs[turn_query])
    k = k if turn_key is None else ops.rope(k, positions, freqs[turn_key])
    out = ops.attention(q, k, v, *caches, *lengths, 1.0)[0]
    graph.output("y", ops.linear(ops.reshape(out, (1, 1, 8)), weight(graph, "o", 8, 8)))
    found = {reason for op, reason in reasons(graph) if op == "attention"}
    assert found == ({reason} if reason else set())


def refused(build):
    """Why no program takes the last node of what `build` makes of a product [2, 6]; None if one does."""
    graph = Graph("step")
    x = graph.input("x", (2, 6), f32)
    y = ops.linear(ops.linear(x, weight(graph, "w", 6, 6)), weight(graph, "v", 6, 6))
    last = build(graph, y)
    node = graph.nodes[-1]
    graph.output("y", last)
    return fuse(graph, False).reasons.get(node)


@pytest.mark.parametrize(
    "build, reason",
    [
        (lambda graph, y: ops.cast(y, np.int32), "int32 is no dtype of programs"),
        (lambda graph, y: ops.reshape(y, (3, 4)), "float32[3, 4] is not 2 rows"),
        (lambda graph, y: ops.split(y, (1, 1), axis=0)[0], "float32[1, 6] is not 2 rows"),
        (lambda graph, y: y + graph.input("b", (6,), f32), "float32[6] beside float32[2, 6]"),
        (lambda graph, y: ops.linear(y, y), "its linear:1 is computed, not given"),
        (lambda graph, y: ops.exp(y), "no step of programs for this op"),
        (lambda graph, y: y * 3.0, None),
        (lambda graph, y: ops.gelu(y) - y, None),
    ],
)
def test_why_a_node_is_left_out(build, reason):
    assert refused(build) == reason


# ---- the kernel refuses what does not fit


def test_numbers_that_do_not_fit_are_refused():
    """Whatever stands in the steps, the kernel refuses it or computes something: it touches no other memory."""
    import jax

    block = Block(batch_size=2, rotary_dim=10, packing=("int4", 32), intermediate_size=32)
    graph = block.build()
    (program,), _ = programs_of(graph)
    xla(True).close()
    rng = np.random.default_rng(0)
    arrays = []
    for value in program.inputs:
        array = rng.integers(0, 2, value.shape) if value.dtype.kind in "iu" else rng.standard_normal(value.shape)
        arrays.append(jax.numpy.asarray(array.astype(value.dtype)))
    specs = [value.spec for value in program.outputs]

    def run(numbers):
        return jax.block_until_ready(jax.jit(lambda *a: custom_ops.step_program(a, specs, numbers, program.aliases))(*arrays))

    run(program.numbers)
    refusals = 0
    for _ in range(60):
        numbers = program.numbers.copy()
        at = rng.integers(0, len(numbers))
        numbers[at] = rng.choice([-3, -1, 0, 1, numbers[at] + 1, numbers[at] * 2 + 1, 1 << 40])
        try:
            run(numbers)
        except jax.errors.JaxRuntimeError as error:
            refusals += 1
            assert "step_program: " in str(error)
    assert refusals > 20
    for cut in (0, 1, 10, len(program.numbers) - 1):
        with pytest.raises(jax.errors.JaxRuntimeError, match="step_program: step .*: wanted"):
            run(program.numbers[:cut])


def test_rows_that_do_not_fit_their_cache_are_refused():
    engine, graph = xla(True), Block().build()
    engine.load(give_weights([parameter for parameter, _ in graph.parameters.values()]))
    engine.compile("step", graph)
    inputs = Block().inputs(0) | {"cache_len": np.array([CAPACITY], np.int32)}
    with pytest.raises(Exception, match=f"row 0: cache_len {CAPACITY} and num_tokens 1 do not fit {CAPACITY} cached"):
        engine.run("step", inputs)
    engine.close()
