"""Which values differ between ranks, and what a model's author is told who has left a collective out."""

import numpy as np
import pytest
from run_op import xla

from poptransformer import ops
from poptransformer.errors import UserError
from poptransformer.graph import Graph, Parameter, State
from poptransformer.layers import BaseLayer, Linear
from poptransformer.parallel import even_cut
from poptransformer.rank_values import rank_values
from poptransformer.register import REGISTER

f32 = np.dtype(np.float32)


def cut_parameter(name="weight"):
    return Parameter(name, (2,), f32, even_cut(0, 4, 2), lambda rank: np.ones(2, np.float32))


def test_what_differs():
    graph = Graph("test")
    x, state, shared = graph.input("x", (2,), f32), State("cut", (2,), f32, is_cut=True), State("shared", (2,), f32)
    mine = graph.parameter(cut_parameter())
    product, same = x * mine, x + graph.state(shared)
    total = ops.all_reduce(product, 2)
    rank = ops.rank_index(x, 2)
    whole = ops.all_gather(graph.state(state), 0, 2)
    differing = rank_values(graph)
    assert {mine, product, rank, graph.state(state)} <= differing
    assert differing.isdisjoint({x, same, total, whole, graph.state(shared)})


def test_a_loop_makes_carried_values_differ_late():
    """b takes what a had, a step later; c is summed up in each step."""
    graph = Graph("loop")
    x, mine = graph.input("x", (2,), f32), graph.parameter(cut_parameter())

    def body(step, a, b, c, d):
        return step < 9, b, d * mine, ops.all_reduce(c + a, 2), d

    a, b, c, d = ops.loop(3, graph.constant(True), [x, x, x, x], body)
    differing = rank_values(graph)
    assert {a, b} <= differing and differing.isdisjoint({c, d})


def test_what_would_differ_is_named_all_at_once():
    graph = Graph("decode")
    x, mine, state = graph.input("x", (2,), f32), graph.parameter(cut_parameter()), State("cache", (2,), f32)
    graph.output("logits", x * mine)
    graph.output("fine", ops.all_reduce(x * mine, 2))
    graph.update_state(state, graph.state(state) + mine)
    with graph.scope("model.sampler"):
        mean = ops.reshape(ops.reduce_max(mine), ())
        ops.loop(2, mean > 0, [x], lambda step, x: (step < 1, x))
        ops.loop(2, graph.constant(True), [x], lambda step, x: (ops.reshape(ops.reduce_max(x * mine), ()) > 0, x))
    told = (
        "graph 'decode': output 'logits', state 'cache', condition of a loop of model.sampler, condition of a loop of "
        "model.sampler would differ between ranks; an all_reduce or all_gather is missing, or a state is not marked is_cut"
    )
    with pytest.raises(UserError) as caught:
        rank_values(graph)
    assert str(caught.value) == told


def test_a_state_that_is_marked_without_need():
    graph, state = Graph("decode"), State("cache", (2,), f32, is_cut=True)
    graph.update_state(state, graph.input("x", (2,), f32) + 1)
    with pytest.raises(UserError, match="'decode': state 'cache' is marked is_cut, but its update is the same on all ranks"):
        rank_values(graph)


class Forgetful(BaseLayer):
    """A layer whose author has left `shard="row"` out."""

    def __init__(self, name):
        super().__init__(name)
        self.up = Linear(f"{name}.up", 6, 8, shard="column")
        self.down = Linear(f"{name}.down", 4, 6)

    def forward(self, x):
        return self.down(self.up(x))


def test_a_models_author_is_told_when_the_graph_is_compiled():
    with REGISTER.scope(
        batch_size=1, max_length=8, world_size=2, dtype=f32, weight_dtype=f32, cache_dtype=f32, packing=None
    ):  # fmt: skip
        layer = Forgetful("model.mlp")
    graph = Graph("prefill")
    graph.output("y", layer(graph.input("x", (1, 1, 6), f32)))
    engine = xla(False, 2)
    engine.load(layer.parameters())
    with pytest.raises(UserError, match="graph 'prefill': output 'y' would differ between ranks; an all_reduce"):
        engine.compile("prefill", graph)
    assert not engine.graphs
