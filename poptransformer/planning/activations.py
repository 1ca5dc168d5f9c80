"""How much memory the values of a graph take while it runs, without running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from poptransformer.graph import Node, Value

FLOAT32_BYTES = 4


def peak_bytes(nodes: Sequence[Node], places: Sequence[int], apart: Iterable[Value], unpacks: str) -> dict[int, int]:
    """Estimate the most bytes that are in use at once, for each place where nodes run.

    A value is there from the node that makes it to the last one that takes it, both included, so a node never writes over
    what it reads. The results of `reshape` are their inputs. Compilers that fuse nodes need less; those that order them
    otherwise, or lay values out in another way, may need more. What an op needs inside is added while it runs: see WORKSPACE.

    Args:
      nodes: in the order in which they run.
      places: for each node a number: its layer, say.
      apart: values that are counted elsewhere or not at all: parameters, states before and after, constants.
      unpacks: when the device turns packed matrices into numbers in memory, "never", "rows" (products of more than one row)
        or "always".
    Returns: place -> bytes.
    """
    source = {}  # result of a reshape -> the value whose memory it is
    apart = set(apart)

    def owner(value):
        return source.get(value, value)

    last_use = {}
    for index, node in enumerate(nodes):
        if node.op == "reshape":
            source[node.outputs[0]] = owner(node.inputs[0])
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                last_use[owner(value)] = index
    ends = {}
    for value, index in last_use.items():
        ends.setdefault(index, []).append(value)

    live, now, peaks = set(), 0, {}
    made = {value for node in nodes for value in node.outputs}
    for index, (node, place) in enumerate(zip(nodes, places, strict=True)):
        for value in node.outputs:
            value = owner(value)
            if value not in apart and value not in live and value in made:
                live.add(value)
                now += value.spec.num_bytes
        peaks[place] = max(peaks.get(place, 0), now + workspace_bytes(node, unpacks))
        for value in ends.get(index, ()):
            if value in live:
                live.remove(value)
                now -= value.spec.num_bytes
    return peaks


def workspace_bytes(node: Node, unpacks: str) -> int:
    """Bytes that an op needs while it runs, beside its inputs and results."""
    return WORKSPACE[node.op](node, unpacks) if node.op in WORKSPACE else 0


def _attention(node, unpacks):
    """Scores of all queries against the whole cache in float32, and the softmax of them in the cache's dtype. Kernels that go
    through the cache piece by piece do without.
    """
    (rows, num_new, num_heads, _), cache = node.inputs[0].shape, node.inputs[3].spec
    return rows * num_new * num_heads * cache.shape[2] * (FLOAT32_BYTES + cache.dtype.itemsize)


def _packed_linear(node, unpacks):
    """The matrix as numbers of the dtype of x, on devices without a kernel that multiplies the codes."""
    x, packing = node.inputs[0].spec, node.attributes["packing"]
    if unpacks == "always" or unpacks == "rows" and math.prod(x.shape[:-1]) > 1:
        return packing.out_features * packing.in_features * x.dtype.itemsize
    return 0


def _sample(node, unpacks):
    """Sorted logits and their indices."""
    return 2 * math.prod(node.inputs[0].shape) * FLOAT32_BYTES


def _wkv(node, unpacks):
    """For prefill the sums over tokens in float32, a numerator, denominator and maximum each: of every token, the same in
    chunks, of those before it in its chunk, of those before it at all, and of both.
    """
    rows, num_new, width = node.inputs[0].shape
    return 5 * 3 * rows * num_new * width * FLOAT32_BYTES if num_new > 1 else 0


WORKSPACE: dict[str, Callable[[Node, str], int]] = {
    "attention": _attention,
    "packed_linear": _packed_linear,
    "sample": _sample,
    "wkv": _wkv,
}
