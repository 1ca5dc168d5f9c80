"""The Attention layer: what its options make of the op."""

import numpy as np
import pytest

from poptransformer.graph import Graph
from poptransformer.layers import Attention
from poptransformer.models.decoder_model import DecoderTokens
from poptransformer.register import REGISTER

f32, i32 = np.dtype(np.float32), np.dtype(np.int32)


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({}, (None, None, None)),
        ({"window": 5}, (5, None, None)),
        ({"use_prefix": True}, (None, "context_len", None)),
        ({"alibi_slopes": np.array([0.5, 0.25])}, (None, None, [0.5, 0.25])),
    ],
)
def test_options(options, wanted):
    with REGISTER.scope(batch_size=2, max_length=16, world_size=1, dtype=f32, weight_dtype=f32, cache_dtype=f32, packing=None):
        layer = Attention("layer", hidden_size=6, num_heads=2, **options)
    graph = Graph("test")
    rows = [graph.input(name, (2,), i32) for name in ("cache_len", "num_tokens", "context_len")]
    states = {state: graph.state(state) for state in (layer.k_cache, layer.v_cache)}
    tokens = DecoderTokens(graph.input("position_ids", (2, 3), i32), *rows[:2], {"context_len": rows[2]}, states)
    out = layer(graph.input("x", (2, 3, 6), f32), tokens)
    assert out.shape == (2, 3, 6)
    (node,) = (node for node in graph.nodes if node.op == "attention")
    window, context_len, alibi_slopes = wanted
    assert node.attributes["window"] == window
    assert (node.inputs[7] and node.inputs[7].name) == context_len
    slopes = node.inputs[8]
    assert (slopes and graph.constants[slopes].tolist()) == alibi_slopes
    assert slopes is None or slopes.dtype == f32
    assert node.inputs[5:7] == tuple(rows[:2])
    assert [tokens.states[state] for state in states] == list(node.outputs[1:])
