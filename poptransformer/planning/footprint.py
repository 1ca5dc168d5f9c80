"""What each part of a model takes on one device, read off its graphs; no weight is loaded and no array made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from poptransformer.graph import Graph
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.planning.activations import peak_bytes

PREFILL_LENGTH = 512  # tokens that a run of prefill takes at once: Session's longest chunk
_LOOK_UPS = ("gather", "packed_gather")  # read a few rows of their first input, whatever its size


@dataclasses.dataclass(frozen=True)
class Part:
    """A layer, or what comes before all layers or after them, on one rank.

    Attributes:
      weights: bytes of each parameter that it uses, by name.
      reads: the names of those that a decode step reads whole.
      caches: bytes of each state, by name.
      activation_bytes: the most that values take while it runs, see `activations.peak_bytes`.
    """

    weights: dict[str, int]
    reads: frozenset[str]
    caches: dict[str, int]
    activation_bytes: int


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a model takes, part by part, on one of num_replicas ranks.

    Attributes:
      first, layers, last: embeddings; blocks; final norm and head. A parameter may be in several: a tied embedding.
      num_replicas: ranks among which each part is cut.
      memory: what the states are, for reports.
    """

    first: Part
    layers: tuple[Part, ...]
    last: Part
    num_replicas: int = 1
    memory: str = "KV cache"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def join(self, begin: int, end: int, is_first: bool, is_last: bool) -> Part:
        """Layers begin .. end - 1 on one device, with what comes before or after; what several use is there once."""
        parts = [*[self.first] * is_first, *self.layers[begin:end], *[self.last] * is_last]
        return Part(
            weights={name: num_bytes for part in parts for name, num_bytes in part.weights.items()},
            reads=frozenset().union(*(part.reads for part in parts)),
            caches={name: num_bytes for part in parts for name, num_bytes in part.caches.items()},
            activation_bytes=max((part.activation_bytes for part in parts), default=0),
        )


def measure(model: DecoderModel, prefill_length: int | None = None, unpacks: str = "never") -> Footprint:
    """Read a footprint off the graphs of a model.

    Activations are the larger of those of the graph that prefills `prefill_length` tokens and of one step of the decode graph.

    Args:
      model: with the batch size, cache length, precision and number of ranks that it was built for.
      prefill_length: None takes PREFILL_LENGTH, or max_length where that is less.
      unpacks: see `activations.peak_bytes`.
    """
    prefill = model.build_prefill(min(prefill_length or PREFILL_LENGTH, model.max_length))
    decode = model.build_decode()
    places = _Places(model)
    num_parts = len(model.blocks) + 2
    weights, reads, caches = ([{} for _ in range(num_parts)] for _ in range(3))
    activations = [0] * num_parts
    states = {value: state for state, value in prefill.states.values()}
    loop_body = next(node.attributes["body"] for node in decode.nodes if node.op == "loop")
    # What needs no value of the loop stands before it: a weight in another shape.
    for graph, nodes in ((prefill, prefill.nodes), (decode, decode.nodes), (decode, loop_body.nodes)):
        parameters = {value: parameter for parameter, value in graph.parameters.values()}
        nodes_at = places.of(nodes)
        for node, at in zip(nodes, nodes_at, strict=True):
            for place, value in enumerate(node.inputs):
                if value in parameters:
                    parameter = parameters[value]
                    weights[at][parameter.name] = parameter.spec.num_bytes
                    if graph is decode and not (node.op in _LOOK_UPS and place == 0):
                        reads[at][parameter.name] = True
                if value in states:
                    caches[at][states[value].name] = states[value].spec.num_bytes
        for at, num_bytes in peak_bytes(nodes, nodes_at, _counted_apart(graph), unpacks).items():
            activations[at] = max(activations[at], num_bytes)
    parts = [Part(w, frozenset(r), c, a) for w, r, c, a in zip(weights, reads, caches, activations, strict=True)]
    return Footprint(parts[0], tuple(parts[1:-1]), parts[-1], model.world_size, model.memory)


def _counted_apart(graph: Graph) -> Iterable:
    """Values that are no activations: parameters, constants, states and what replaces them in place."""
    yield from (value for _, value in (*graph.parameters.values(), *graph.states.values()))
    yield from graph.constants
    yield from graph.state_updates.values()
    for node in graph.nodes:
        if node.op == "loop":
            yield from node.attributes["body"].inputs.values()
            yield from node.attributes["body"].outputs.values()


class _Places:
    """Tells which part of the model a node belongs to: 0 before the first block, i + 1 for block i, then what comes after."""

    def __init__(self, model):
        self.num_blocks = len(model.blocks)
        self._block_of = {}
        for index, block in enumerate(model.blocks):
            pending = [block]
            while pending:
                layer = pending.pop()
                self._block_of[layer.name] = index
                pending += [item for item in layer._items() if hasattr(item, "parameters")]

    def of(self, nodes) -> list[int]:
        """The place of each node; one that belongs to no layer of a block stays with the node before it."""
        places, place = [], 0
        for node in nodes:
            block = self._block_of.get(node.scope)
            if block is not None:
                place = block + 1
            elif place == self.num_blocks:  # after the last block
                place += 1
            places.append(place)
        return places
