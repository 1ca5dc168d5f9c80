"""Cases of standin/rules/loops.py."""

from __future__ import annotations

import numpy as np
from popart_contract.cases import case
from popart_contract.protos import (
    FLOAT,
    GRAPHCORE,
    INT32,
    Given,
    body,
    constant,
    graph,
    loop,
    model,
    node,
    trip_constants,
    value,
)


def _loop(inner=None, before=None, **options):
    return Given(model([*(trip_constants() if before is None else before), loop(body=inner or body(), **options)]))


@case
def fact_c_an_anchor_is_needed():
    made = model([node("Add", "x x", "y")])
    return Given(made, anchors=()), Given(made)


@case
def fact_c_anchors_exist():
    """An initializer that nothing takes is not created, so it cannot be an anchor either."""
    made = model([node("Add", "x x", "y")], weights={"w": np.ones(3, np.float32)})
    return Given(made, anchors=("y", "w")), Given(made)


@case
def fact_c_loop_gets_trip_count_and_condition():
    made = [model([*trip_constants(), node("Loop", ["trips", name, "x"], "y", body=body())]) for name in ("", "go")]
    return Given(made[0]), Given(made[1])


@case
def fact_c_each_loop_input_has_a_body_input():
    broken = body(inputs="step cond value more")
    return _loop(broken), _loop()


@case
def fact_c_loop_outputs_follow_the_body():
    broken = body(outputs="cond next value")
    return _loop(broken), _loop(broken, outputs="y seen")


@case
def fact_c_nodes_are_in_order():
    """In bodies as well; and what the graph around makes after the Loop is not there yet."""
    inner = body([node("Add", "value late", "next")])
    late, looped = node("Add", "x x", "late"), loop(body=inner)
    orders = ([*trip_constants(), looped, late], [*trip_constants(), late, looped])
    return tuple(Given(model(nodes)) for nodes in orders)


@case
def fact_c_bodies_have_no_initializers():
    inner = [node("Add", "value one", "next")]
    broken = body(inner, weights={"one": np.ones(3, np.float32)})
    return _loop(broken), _loop(body([constant("one", np.ones(3, np.float32)), *inner]))


@case
def fact_c_bodies_have_no_empty_inputs():
    """Clip-11 with its lower limit left out."""

    def made(inputs, lower):
        limits = [constant("low", np.float32(0)), constant("high", np.float32(1))][1 - lower :]
        inner = body([*limits, node("Clip", inputs, "next")])
        return Given(model([*trip_constants(), loop(body=inner)], opset=11))

    return made(["value", "", "high"], 0), made(["value", "low", "high"], 1)


@case
def fact_c_bodies_have_no_shape_nodes():
    add = node("Add", "value value", "next")
    return _loop(body([node("Shape", "value", "sizes"), add])), _loop(body([add]))


@case
def fact_c_a_called_graph_is_named_once():
    """Two different graphs of one name: PopART takes the first for both."""

    def made(names):
        kinds = zip(names, ("Add", "Mul"), ("x", "h"), ("h", "y"), strict=True)
        callees = [
            node("Call", given, result, GRAPHCORE, callee=graph([node(kind, "a a", "b")], [value("a")], ["b"], name=name))
            for name, kind, given, result in kinds
        ]
        return Given(model(callees))

    return made(["block", "block"]), made(["block", "other"])


@case
def fact_c_names_are_made_once():
    twice = [node("Add", "x x", "h"), node("Mul", "x x", "h"), node("Add", "h h", "y")]
    once = [node("Add", "x x", "h"), node("Mul", "x h", "g"), node("Add", "g g", "y")]
    return Given(model(twice)), Given(model(once))


@case
def fact_c_trip_count_is_a_known_integer():
    go = constant("go", np.bool_(True))
    inputs = [value("x", FLOAT, (2, 3)), value("trips", INT32)]
    broken = Given(model([go, loop(body=body())], inputs))
    return broken, Given(model([go, loop(body=body())], weights={"trips": np.int32(3)}))


@case
def fact_c_loop_condition_is_bool():
    broken = [constant("trips", np.int32(3)), constant("go", np.int32(1))]
    # The body passes the condition on, so it is of another type there too; what the loop is given is named first.
    inner = body([constant("yes", np.bool_(True)), node("Add", "value value", "next")], outputs="yes next")
    return _loop(inner, broken), _loop(inner)


@case
def fact_c_carried_values_keep_their_shape():
    broken = body([node("Concat", "value value", "next", axis=0)])
    return _loop(broken), _loop()
