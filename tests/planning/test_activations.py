"""Live values of small graphs, against sums made by hand."""

import numpy as np

from poptransformer import ops
from poptransformer.graph import Graph, State
from poptransformer.packing import Packing
from poptransformer.planning.activations import peak_bytes, workspace_bytes

FLOAT32 = np.dtype(np.float32)


def peaks(graph, places=None, apart=(), unpacks="never"):
    return peak_bytes(graph.nodes, places or [0] * len(graph.nodes), apart, unpacks)


def test_a_value_is_there_until_its_last_use():
    graph = Graph("chain")
    x = graph.input("x", (10,), FLOAT32)
    a = ops.tanh(x)  # 40 bytes
    b = ops.concat([a, a], axis=0)  # 80: a and b, 120
    c = ops.tanh(b)  # b and c, 160; a is gone
    graph.output("y", ops.reduce_sum(c))  # c and 4 bytes
    assert peaks(graph) == {0: 160}
    assert peaks(graph, places=[0, 0, 1, 2]) == {0: 120, 1: 160, 2: 84}


def test_a_value_that_is_used_late_stays_all_the_while():
    graph = Graph("residual")
    x = ops.tanh(graph.input("x", (10,), FLOAT32))
    y = ops.tanh(ops.tanh(x))
    graph.output("y", x + y)
    assert peaks(graph) == {0: 120}


def test_a_reshape_takes_no_memory_and_keeps_its_source():
    graph = Graph("reshape")
    x = ops.tanh(graph.input("x", (10,), FLOAT32))
    shaped = ops.reshape(x, (2, 5))
    graph.output("y", ops.tanh(ops.tanh(shaped)))
    assert peaks(graph) == {0: 80}


def test_what_is_counted_elsewhere_is_left_out():
    graph = Graph("apart")
    x = graph.input("x", (10,), FLOAT32)
    state = State("state", (10,), FLOAT32)
    new = graph.state(state) + x
    graph.update_state(state, new)
    graph.output("y", ops.tanh(new))
    assert peaks(graph, apart=[new]) == {0: 40}
    assert peaks(graph) == {0: 80}


def attention_node(cache_dtype):
    graph = Graph("attention")
    query = graph.input("query", (2, 3, 4, 8), FLOAT32)
    key, value = (graph.input(name, (2, 3, 2, 8), FLOAT32) for name in ("key", "value"))
    caches = [graph.input(name, (2, 2, 16, 8), cache_dtype) for name in ("k_cache", "v_cache")]
    counts = [graph.input(name, (2,), np.int32) for name in ("cache_len", "num_tokens")]
    ops.attention(query, key, value, *caches, *counts, 1.0)
    return graph.nodes[-1]


def test_attention_needs_its_scores_and_their_softmax():
    num_scores = 2 * 3 * 4 * 16  # rows, queries, heads, positions of the cache
    assert workspace_bytes(attention_node(np.float32), "never") == num_scores * 8
    assert workspace_bytes(attention_node(np.float16), "never") == num_scores * 6


def test_wkv_needs_sums_of_all_tokens_in_prefill():
    def node(num_new):
        graph = Graph("wkv")
        key, value = (graph.input(name, (2, num_new, 8), FLOAT32) for name in ("key", "value"))
        decays = [graph.input(name, (8,), FLOAT32) for name in ("time_decay", "time_first")]
        counts = [graph.input(name, (2,), np.int32) for name in ("cache_len", "num_tokens")]
        ops.wkv(key, value, *decays, graph.input("state", (2, 3, 8), FLOAT32), *counts)
        return graph.nodes[-1]

    assert workspace_bytes(node(1), "never") == 0
    assert workspace_bytes(node(5), "never") == 5 * 3 * 2 * 5 * 8 * 4


def test_packed_matrices_are_unpacked_where_no_kernel_reads_them():
    def node(rows):
        graph, packing = Graph("packed"), Packing("int4", 32, 48, 64)
        x = graph.input("x", (rows, 1, 64), np.float16)
        ops.packed_linear(x, graph.input("weight", packing.shape, np.uint8), packing)
        return graph.nodes[-1]

    unpacked = 48 * 64 * 2
    expected = {"never": (0, 0), "rows": (0, unpacked), "always": (unpacked, unpacked)}
    for unpacks, needs in expected.items():
        assert tuple(workspace_bytes(node(rows), unpacks) for rows in (1, 2)) == needs
