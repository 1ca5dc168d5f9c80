"""Runs a typed graph on all replicas in lock step, node by node.

A value is a list with one array for each replica. Where all replicas hold the very same array a node is computed once.
"""

from __future__ import annotations

from collections import ChainMap

import numpy as np
from popart_contract.standin.errors import popart_runtime_error
from popart_contract.standin.kernels import COLLECTIVES, compute
from popart_contract.standin.machine import MACHINE


def run_graph(graph, values: ChainMap, replicas: int) -> None:
    """Compute every node of a graph; `values` maps names to lists of arrays and takes the results."""
    for node in graph.nodes:
        inputs = [values[name] if name else None for name in node.proto.input]
        if node.kind == "Loop" and node.bodies:
            results = _run_loop(node, inputs, values, replicas)
        elif node.kind == "Call" and node.bodies:
            results = _run_body(node.bodies[0], inputs, ChainMap(), replicas)
        elif (node.domain, node.kind) in COLLECTIVES:
            results = COLLECTIVES[node.domain, node.kind](node, inputs[0])
        else:
            results = _run_everywhere(node, inputs, replicas)
        values.update({name: result for name, result in zip(node.proto.output, results, strict=False) if name})


def _run_everywhere(node, inputs, replicas):
    if all(value is None or all(array is value[0] for array in value) for value in inputs):
        return [[array] * replicas for array in compute(node, [value and value[0] for value in inputs])]
    each = [compute(node, [value and value[replica] for value in inputs]) for replica in range(replicas)]
    return [list(arrays) for arrays in zip(*each, strict=True)]


def _run_body(body, inputs, around, replicas):
    values = around.new_child(dict(zip(body.inputs, inputs, strict=True)))
    run_graph(body, values, replicas)
    return [values[name] for name in body.outputs]


def _run_loop(node, inputs, values, replicas):
    trips, condition, carried = inputs[0], inputs[1], list(inputs[2:])
    most, kept = int(np.reshape(trips[0], ())), len(carried)
    scans = [[] for _ in node.body_results[1 + kept :]]
    step = 0
    while step < most and _agreed(node, condition):
        number = np.full(trips[0].shape, step, trips[0].dtype)
        condition, *results = _run_body(node.bodies[0], [[number] * replicas, condition, *carried], values, replicas)
        carried = results[:kept]
        for scan, result in zip(scans, results[kept:], strict=True):
            scan.append(result)
        step += 1
    MACHINE.loop_steps.append((node.place, step))
    return carried + [
        _stacked(scan, most, like, replicas) for scan, like in zip(scans, node.body_results[1 + kept :], strict=True)
    ]


def _agreed(node, condition):
    """The condition, which must be the same on all replicas: they could not meet in a collective otherwise."""
    answers = {bool(np.reshape(value, ())) for value in condition}
    if len(answers) > 1:
        raise popart_runtime_error(f"{node.place}: replicas disagree about going on")
    return answers.pop()


def _stacked(scan, most, like, replicas):
    """A scan output: one row for each of the M iterations; rows that were not reached are zeros."""
    rest = [np.zeros(like.shape, like.like().dtype)] * (most - len(scan))
    return [np.stack([result[replica] for result in scan] + rest) for replica in range(replicas)]
