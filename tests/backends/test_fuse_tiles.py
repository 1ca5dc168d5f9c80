"""Tiled programs: prompts and many rows, beside the same graphs node by node; what they are made of, and what is left out."""

import numpy as np
import pytest
from fused_blocks import Block, check, f16, f32, i32
from hypothesis import given
from hypothesis import strategies as st
from run_op import hypothesis_settings

from poptransformer import kv_cache, ops
from poptransformer.backends.xla.custom_ops import load_cpu_library
from poptransformer.backends.xla.fuse import STEP_PROGRAM, fuse
from poptransformer.float8 import FLOAT8
from poptransformer.graph import Graph, Parameter, bfloat16
from poptransformer.layers import LayerNorm, RMSNorm
from poptransformer.packing import Packing

needs_tiles = pytest.mark.skipif(
    not load_cpu_library().has_tiles, reason="no tile unit (AMX) here, or POPTRANSFORMER_ISA leaves it out"
)

BLOCKS = {
    "llama bf16": Block(num_positions=37, rotary_dim=10, dtype=bfloat16, cache_dtype=bfloat16),
    "llama int4, two rows": Block(batch_size=2, num_positions=20, rotary_dim=10, packing=("int4", 32), cache_dtype=f16),
    "gpt2 int8": Block(
        batch_size=3, num_positions=13, num_kv_heads=4, norm=LayerNorm, bias=True, is_qkv_fused=True, mlp="plain",
        activation="gelu_new", packing=("int8", 32), cache_dtype=f16,
    ),
    "chatglm bf16": Block(
        num_positions=33, rotary_dim=4, interleaved=True, is_qkv_fused=True, mlp="gated, fused", bias=True, is_prefix=True,
        dtype=bfloat16, cache_dtype=f32,
    ),
    "qwen3 int8": Block(num_positions=16, rotary_dim=10, qk_norm=RMSNorm, packing=("int8", -1), cache_dtype=kv_cache.INT8),
    "mistral, fused int4": Block(
        num_positions=40, rotary_dim=10, window=9, packing=("int4", 64), mlp="gated, fused", intermediate_size=64
    ),
    "bloom bf16": Block(
        batch_size=4, num_positions=5, norm=LayerNorm, alibi=True, bias=True, mlp="plain", activation="relu", dtype=bfloat16,
        cache_dtype=FLOAT8,
    ),
    "many rows of a step": Block(batch_size=13, rotary_dim=10, packing=("int8", 32), cache_dtype=f16),
    "many rows of a step, bf16": Block(batch_size=9, rotary_dim=6, qk_norm=RMSNorm, dtype=bfloat16, cache_dtype=bfloat16),
}  # fmt: skip


@needs_tiles
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    check(BLOCKS[name])


@st.composite
def blocks(draw):
    kind = draw(st.sampled_from(["bf16", "int8", "int4"]))
    num_kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 7, 16, 34]))
    window = draw(st.sampled_from([None, 1, 5, 70]))
    batch_size, num_positions = draw(st.sampled_from([(1, 2), (1, 33), (1, 70), (2, 16), (5, 3), (9, 1), (33, 1)]))
    return Block(
        batch_size=batch_size,
        num_positions=num_positions,
        hidden_size=draw(st.sampled_from([1, 17, 32, 65, 129])),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(st.sampled_from([1, 32, 48, 100])),
        dtype=bfloat16 if kind == "bf16" else f32,
        cache_dtype=draw(st.sampled_from([f32, f16, FLOAT8, kv_cache.INT8])),
        packing=None if kind == "bf16" else (kind, draw(st.sampled_from([32, 64, -1]))),
        norm=draw(st.sampled_from([RMSNorm, LayerNorm])),
        bias=draw(st.booleans()),
        is_qkv_fused=draw(st.booleans()),
        mlp=draw(st.sampled_from(["gated", "gated, fused", "plain"])),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_new", "relu", "tanh", "sigmoid"])),
        rotary_dim=draw(st.sampled_from([None, 2, head_dim // 2 * 2])),
        interleaved=draw(st.booleans()),
        qk_norm=None if head_dim == 2 else draw(st.sampled_from([None, RMSNorm, LayerNorm])),  # of two numbers: nearly a sign
        window=window,
        alibi=draw(st.booleans()),
        is_parallel=draw(st.booleans()),
        is_prefix=window is None and draw(st.booleans()),
    )


@needs_tiles
@hypothesis_settings(10)
@given(blocks())
def test_any_block(block):
    check(block)


# ---- what they are made of


def fused(graph):
    fusion = fuse(graph, True)
    return [node.attributes["program"] for node in fusion.nodes[graph] if node.op == STEP_PROGRAM], fusion


def test_a_block_is_one_program():
    (program,), fusion = fused(Block(num_positions=4, rotary_dim=10, packing=("int8", 32)).build())
    assert not fusion.reasons
    # x loaded; rounded; q, k, v; heads; attention; rounded; out + x; rounded; gate * up; rounded; down + x; rounded; the
    # logits
    assert program.numbers[4] == 13


@pytest.mark.parametrize("size, num_phases", [(50, 13), (64, 12)])
def test_a_product_rounds_what_only_products_read(size, num_phases):
    """If it is whole tiles: gate * up, which down reads."""
    block = Block(num_positions=4, rotary_dim=10, packing=("int8", 32), intermediate_size=size)
    (program,), _ = fused(block.build())
    assert program.numbers[4] == num_phases


def test_what_nobody_reads_is_not_computed():
    """As the last layer of a prompt, of which keys and values are wanted."""

    def num_steps(is_read):
        graph = Graph("prefill")
        x = graph.input("x", (1, 3, 8), bfloat16)
        q, k, v, o = (graph.parameter(Parameter(name, (8, 8), bfloat16)) for name in "qkvo")
        caches = [graph.input(name, (1, 2, 5, 4), f32) for name in ("k_cache", "v_cache")]
        lengths = [graph.input(name, (1,), i32) for name in ("cache_len", "num_tokens")]
        heads = [ops.reshape(ops.linear(x, weight), (1, 3, 2, 4)) for weight in (q, k, v)]
        out, k_new, v_new = ops.attention(*heads, *caches, *lengths, 1.0)
        y = ops.linear(ops.reshape(out, (1, 3, 8)), o)
        for name, value in {"k": k_new, "v": v_new, **({"y": y} if is_read else {})}.items():
            graph.output(name, value)
        (program,), _ = fused(graph)
        return program.numbers[5 + program.numbers[4]]

    assert num_steps(True) - num_steps(False) == 3  # rounded, multiplied, stored


# ---- what is left out, and why


def reasons(graph):
    return {(node.op, reason) for node, reason in fused(graph)[1].reasons.items()}


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), f16])
def test_plain_weights_of_other_dtypes_are_no_tiles(dtype):
    found = reasons(Block(num_positions=4, dtype=dtype, cache_dtype=f16).build())
    assert ("linear", f"a weight in {dtype} for {dtype}, tiles take packed ones and bfloat16") in found
    assert {reason for op, reason in found if op == "attention"} == {"too little beside it to fuse with"}


def test_rows_without_attention():
    graph = Graph("rows")
    packing = Packing("int8", 32, 8, 8)
    x = graph.input("x", (9, 8), f32)
    for name in "ab":
        x = ops.packed_linear(x, graph.parameter(Parameter(name, packing.shape, np.dtype(np.uint8), packing=packing)), packing)
    graph.output("y", x)
    assert reasons(graph) == {("packed_linear", "9 rows without attention, programs take up to 8")}


def test_without_tiles_there_is_none():
    graph = BLOCKS["llama bf16"].build()
    assert {reason for reason in fuse(graph, False).reasons.values()} == {
        "37 rows, programs without tiles take one new position of up to 8"
    }
