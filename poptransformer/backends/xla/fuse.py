"""Fusion: runs of a graph's nodes become programs, so that model files stay plain equations.

What a program takes, of a decode step of at most 8 rows, or of any number of rows and positions where the CPU has tiles:
embeddings, norms, linear and packed_linear, rope, attention, activations, sums and products of rows, and the reshapes and
splits between them. Within a program

    a norm goes into the linears that read it          several linears of one input are one phase
    act(gate(x)) * up(x) is one step, as is act(up(x))  x + linear(y) adds in the linear
    norm and rope of query and key go into attention, which appends to its caches in place
    in tiles, norms go into the rounding to bfloat16 that products share, and norm and rope of heads are steps of their own

A decoder of the Llama or GPT-2 kind is one program from its embedding to the logits. A node that no program takes ends it if it
needs something of it, and is computed before it otherwise; the reason is kept for reports.
"""

from __future__ import annotations

import collections
import dataclasses
import math

import numpy as np

from poptransformer.backends.xla.step_program import (
    FUNCTIONS,
    MAX_ROWS,
    TILE,
    Matrix,
    Norm,
    RowCount,
    Slot,
    Step,
    StepProgram,
    View,
)
from poptransformer.float8 import FLOAT8
from poptransformer.graph import Graph, Node, Value, bfloat16
from poptransformer.kv_cache import INT8

STEP_PROGRAM = "step_program"  # op of the nodes made here
_FLOATS = (np.dtype(np.float32), bfloat16, np.dtype(np.float16))
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid")
_BINARY = ("add", "sub", "mul")
_VIEWS = ("reshape", "split", "slice", "cast")
_PRODUCTS = ("linear", "packed_linear")
_PACKED = ("int8", "int4")  # kinds of packed weights


@dataclasses.dataclass
class Fusion:
    """How a graph is computed after fusion.

    Attributes:
      nodes: graph (or loop body) -> its nodes, programs among them.
      reasons: node that no program took -> why not, in words.
    """

    nodes: dict[Graph, list[Node]]
    reasons: dict[Node, str]


def fuse(graph: Graph, has_tiles: bool) -> Fusion:
    """Rewrite a graph and its loop bodies.

    Args:
      has_tiles: whether the kernels multiply many rows in tiles.
    """
    fusion = Fusion({}, {})
    _fuse_one(graph, has_tiles, fusion)
    for node in graph.walk():
        for attribute in node.attributes.values():
            if isinstance(attribute, Graph):
                _fuse_one(attribute, has_tiles, fusion)
    return fusion


def _fuse_one(graph, has_tiles, fusion):
    uses = _count_uses(graph)
    rows, why_none = _rows_of_graph(graph, has_tiles)
    if rows is None:
        fusion.nodes[graph] = graph.nodes
        fusion.reasons.update((node, why_none) for node in graph.nodes)
        return
    attentions = _Attentions(graph, rows, uses)
    done, segment = [], _Segment(rows, uses, attentions)
    for node in graph.nodes:
        if node in attentions.absorbed:
            continue  # comes with its attention
        reason = segment.refusal(node)
        if reason is None:
            segment.take(node)
            continue
        for refused in (*attentions.nodes.get(node, ()), node):
            fusion.reasons[refused] = reason
            if segment.has_made(refused):
                done += segment.close(fusion.reasons)
                segment = _Segment(rows, uses, attentions)
            done.append(refused)
    fusion.nodes[graph] = done + segment.close(fusion.reasons)


def _count_uses(graph):
    """How often each value is read: by nodes (those of loop bodies too) and as an output or a state's update."""
    uses = collections.Counter(value for node in graph.walk() for value in node.inputs if value is not None)
    for node in graph.walk():
        for attribute in node.attributes.values():
            if isinstance(attribute, Graph):
                uses.update(attribute.outputs.values())
    uses.update(graph.outputs.values())
    uses.update(graph.state_updates.values())
    return uses


def _rows_of_graph(graph, has_tiles):
    """The RowCount that programs of a graph have, or None and the reason."""
    attentions = [node for node in graph.nodes if node.op == "attention"]
    products = [node for node in graph.nodes if node.op in _PRODUCTS]
    if not products:
        return None, "no products here to fuse with"
    shape = attentions[0].inputs[0].shape if attentions else products[0].inputs[0].shape
    num_rows = math.prod(shape[:2]) if attentions else math.prod(shape[:-1])
    num_positions = shape[1] if attentions else 1
    is_tiled = num_positions > 1 or num_rows > MAX_ROWS
    if is_tiled and not has_tiles:
        return None, f"{num_rows} rows, programs without tiles take one new position of up to {MAX_ROWS}"
    if is_tiled and not attentions:
        return None, f"{num_rows} rows without attention, programs take up to {MAX_ROWS}"
    if num_rows == 0:
        return None, "no rows"
    return RowCount(num_rows, num_positions, is_tiled), None


def _width(shape, num_rows):
    """Floats of a row, for a shape whose leading axes are the rows; None for another shape."""
    count, axis = 1, 0
    while count < num_rows and axis < len(shape):
        count, axis = count * shape[axis], axis + 1
    return math.prod(shape[axis:]) if count == num_rows else None


# ---- Attention with what goes into it ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Head:
    """A query or key: the value before its norm and rope, those, and the rope's inputs and attributes."""

    value: Value
    norm: Norm | None
    rope: tuple | None  # position_ids, inv_freq, attention_scale, interleaved


class _Attentions:
    """The attention nodes that programs take, and the nodes that go into them.

    Attributes:
      reasons: attention node -> why none does; None where one does.
      heads: attention node -> its query and key as _Head.
      nodes: attention node -> the norm and rope nodes that go into it, in order.
      absorbed: all of those.
    """

    def __init__(self, graph, rows, uses):
        self.reasons, self.heads, self.nodes, self.absorbed = {}, {}, {}, set()
        self._producer = {value: node for node in graph.nodes for value in node.outputs}
        self._uses, self._order = uses, graph.nodes
        for node in graph.nodes:
            if node.op == "attention":
                self.reasons[node] = self._match(node, rows)

    def _match(self, node, rows):
        query, key, value, k_cache, v_cache, *_ = node.inputs
        if query.shape[:2] != (rows.num_rows // rows.num_positions, rows.num_positions):
            return f"queries {query.spec} in a program of {rows.num_rows} rows"
        if query.dtype not in _FLOATS or k_cache.dtype not in (*_FLOATS, FLOAT8, INT8):
            return f"queries in {query.dtype} with a cache in {k_cache.dtype}"
        if self._uses[k_cache] > 1 or self._uses[v_cache] > 1:
            return "its cache is read by others too"
        (query, query_nodes), (key, key_nodes) = (self._head(x) for x in (query, key))
        if query.rope != key.rope:
            return "query and key turn differently"
        self.heads[node] = query, key
        inside = {*query_nodes, *key_nodes}
        self.nodes[node] = [one for one in self._order if one in inside]
        self.absorbed |= inside
        return None

    def _head(self, value):
        nodes, rope, norm = [], None, None
        node = self._single(value)
        if node is not None and node.op == "rope":
            value, position_ids, inv_freq = node.inputs
            rope = (position_ids, inv_freq, node.attributes["attention_scale"], node.attributes["interleaved"])
            nodes.append(node)
            node = self._single(value)
        casts = []
        while node is not None and node.op == "cast" and node.inputs[0].dtype in _FLOATS and node.outputs[0].dtype in _FLOATS:
            casts.append(node)
            node = self._single(node.inputs[0])
        if node is not None and node.op in ("rms_norm", "layer_norm"):
            norm, value = _norm_of(node), node.inputs[0]
            nodes += [*casts, node]
        return _Head(value, norm, rope), nodes

    def _single(self, value):
        """The node that makes a value, if nothing else reads it."""
        return self._producer.get(value) if self._uses[value] == 1 else None


def _norm_of(node):
    weight, *bias = node.inputs[1:]
    return Norm(node.op, node.attributes["eps"], weight, bias[0] if bias else None)


# ---- One program ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Norm:
    """A norm that is not computed yet: products take it in."""

    x: Value
    norm: Norm


@dataclasses.dataclass(eq=False)
class _Product:
    """act(x W^T + b) * (x U^T + c) that is not computed yet: an activation, a factor or a sum may still go into it."""

    x: Value
    matrix: Matrix
    function: str = "none"
    multiply: Matrix | None = None


class _Segment:
    """Nodes that are becoming one program.

    Values that nodes made are known as views of slots, or as something that waits for what goes into it.
    """

    def __init__(self, rows, uses, attentions):
        self._rows, self._num_rows, self._uses, self._attentions = rows, rows.num_rows, uses, attentions
        self._nodes, self._made, self._steps, self._caches = [], set(), [], []
        self._known = {}  # Value -> View, _Norm or _Product
        self._loaded, self._tables, self._prepared, self._tiles, self._turned, self._maker = {}, {}, {}, {}, {}, {}

    # ---- which nodes

    def has_made(self, node):
        """Whether a node needs something of this segment."""
        inner = [value for attribute in node.attributes.values() if isinstance(attribute, Graph)
                 for used in attribute.walk() for value in used.inputs]  # fmt: skip
        return any(value in self._made for value in (*node.inputs, *inner))

    def refusal(self, node):
        """Why the program cannot take a node, in words; None if it can."""
        if node.op == "attention":
            given = [value for one in self._attentions.nodes.get(node, ()) for value in one.inputs[1:]]
            return self._attentions.reasons[node] or self._made_inside((*node.inputs[3:], *given))
        if node.op in ("gather", "packed_gather"):
            table, ids = node.inputs
            is_table = node.op == "packed_gather" or table.rank == 2 and table.dtype in _FLOATS
            if not is_table or math.prod(ids.shape) != self._num_rows:
                return f"rows of {table.spec} for {math.prod(ids.shape)} ids, wanted a table and {self._num_rows} ids"
            if node.op == "packed_gather" and node.attributes["packing"].kind not in _PACKED:
                return f"a table in {node.attributes['packing'].kind}"
            return self._not_rows(node.outputs) or self._made_inside(node.inputs)
        if node.op in _VIEWS:
            return self._refuse_view(node)
        if node.op in _PRODUCTS:
            if node.inputs[1].dtype not in (*_FLOATS, np.uint8):
                return f"a weight in {node.inputs[1].dtype}"
            if node.op == "packed_linear" and node.attributes["packing"].kind not in _PACKED:
                return f"a weight in {node.attributes['packing'].kind}"
            if self._rows.is_tiled and node.op == "linear" and {value.dtype for value in node.inputs[:2]} != {bfloat16}:
                return f"a weight in {node.inputs[1].dtype} for {node.inputs[0].dtype}, tiles take packed ones and bfloat16"
            return self._not_rows((node.inputs[0], *node.outputs)) or self._made_inside(node.inputs[1:])
        if node.op in ("rms_norm", "layer_norm"):
            is_whole = _width(node.inputs[0].shape, self._num_rows) == node.inputs[0].shape[-1]
            rows = self._not_rows(node.outputs)
            return rows or self._made_inside(node.inputs[1:]) or (None if is_whole else "a norm of parts of rows")
        if node.op in _ACTIVATIONS:
            return self._not_rows(node.outputs)
        if node.op in _BINARY:
            return self._refuse_binary(node)
        return "no step of programs for this op"

    def _not_rows(self, values):
        for value in values:
            if value.dtype not in _FLOATS:
                return f"{value.dtype} is no dtype of programs"
            if _width(value.shape, self._num_rows) is None:
                return f"{value.spec} is not {self._num_rows} rows"
        return None

    def _made_inside(self, values):
        made = [value for value in values if value in self._made]
        return f"its {made[0].name} is computed, not given" if made else None

    def _refuse_view(self, node):
        x = node.inputs[0]
        if x not in self._known:
            return "nothing of a program to cut or rename"
        if node.op in ("split", "slice"):
            is_last = node.attributes["axis"] == x.rank - 1 and _width(x.shape, self._num_rows) == x.shape[-1]
            return self._not_rows(node.outputs) or (None if is_last else "cuts along another axis than the rows'")
        return self._not_rows(node.outputs)

    def _refuse_binary(self, node):
        out = node.outputs[0]
        if not any(value in self._known for value in node.inputs):
            return "nothing of a program in it"
        for place, value in enumerate(node.inputs):
            is_number = math.prod(value.shape) == 1 and math.prod(out.shape) > 1 and value not in self._known
            if value.shape != out.shape and not (is_number and place == 1 and value.dtype in _FLOATS):
                return f"{value.spec} beside {out.spec}"
        return self._not_rows(node.outputs)

    # ---- taking a node

    def take(self, node):
        """Add a node of which `refusal` says nothing."""
        taken = [*self._attentions.nodes.get(node, ()), node]
        self._nodes += taken
        self._made.update(value for one in taken for value in one.outputs)
        family = "view" if node.op in _VIEWS else "product" if node.op in _PRODUCTS else node.op
        family = "norm" if node.op in ("rms_norm", "layer_norm") else "embed" if "gather" in node.op else family
        family = "activation" if node.op in _ACTIVATIONS else "binary" if node.op in _BINARY else family
        getattr(self, f"_take_{family}")(node)

    def _take_embed(self, node):
        table, ids = node.inputs
        packing = node.attributes.get("packing")
        num_ids, width = (packing.out_features, packing.in_features) if packing else table.shape
        matrix = Matrix(table, packing, 0, num_ids, width, None)
        slot = Slot(width)

        def write(program):
            program.write_matrix(matrix)
            program.write_value(ids)
            program.write_slot(slot)

        self._add("embed", width, (), slot, write, node.outputs[0])

    def _take_view(self, node):
        x = node.inputs[0]
        known = self._known[x]
        if node.op in ("reshape", "cast"):
            # A product whose only reader this is may still take something in under its new name.
            is_free = not isinstance(known, _Product) or self._uses[x] == 1
            self._known[node.outputs[0]] = known if is_free else self._view(x)
            return
        sizes = node.attributes.get("sizes") or (node.attributes["stop"] - node.attributes["start"],)
        begins = np.cumsum([node.attributes.get("start", 0), *sizes]).tolist()
        is_free = isinstance(known, _Product) and known.function == "none" and known.multiply is None and self._uses[x] == 1
        if is_free and len(sizes) == 2 and all(self._uses[part] == 1 for part in node.outputs) and _can_cut(known, sizes):
            gate, up = (
                dataclasses.replace(known.matrix, first=known.matrix.first + begin, out_features=size)
                for begin, size in zip(begins, sizes, strict=False)
            )
            self._known.update(zip(node.outputs, (_Product(known.x, gate), _Product(known.x, up)), strict=True))
            return
        whole = self._view(x)
        for value, begin, size in zip(node.outputs, begins, sizes, strict=False):
            self._known[value] = whole.part(begin, size)

    def _take_norm(self, node):
        self._known[node.outputs[0]] = _Norm(node.inputs[0], _norm_of(node))

    def _take_product(self, node):
        x, weight, bias = node.inputs
        packing = node.attributes.get("packing")
        out_features = packing.out_features if packing else weight.shape[0]
        matrix = Matrix(weight, packing, 0, out_features, x.shape[-1], bias)
        self._known[node.outputs[0]] = _Product(x, matrix)

    def _take_activation(self, node):
        product = self._waiting(node.inputs[0])
        if product and product.function == "none" and product.multiply is None:
            self._known[node.outputs[0]] = dataclasses.replace(product, function=node.op)
        else:
            self._map(node, node.op, node.inputs[0], None)

    def _take_binary(self, node):
        first, second = node.inputs
        if node.op == "mul":
            for gate, up in ((first, second), (second, first)):
                a, b = self._waiting(gate), self._waiting(up)
                if a and b and _are_alike(a, b) and a.multiply is None and b.multiply is None and b.function == "none":
                    self._known[node.outputs[0]] = dataclasses.replace(a, multiply=b.matrix)
                    return
        if node.op == "add" and first is not second and second.shape == first.shape:
            for product, other in ((second, first), (first, second)):
                waiting = self._waiting(product)
                if waiting:
                    self._product(waiting, self._view(other), node.outputs[0])
                    return
        self._map(node, node.op, first, second)

    def _take_attention(self, node):
        query, key = self._attentions.heads[node]
        value, k_cache, v_cache, cache_len, num_tokens, context_len, slopes = node.inputs[2:]
        num_heads, head_dim = node.inputs[0].shape[2:]
        num_kv_heads, capacity = k_cache.shape[1:3]
        if self._rows.num_positions > 1:
            q, k, v = (self._heads(head, head_dim) for head in (query, key, _Head(value, None, None)))
            query, key = (dataclasses.replace(head, norm=None, rope=None) for head in (query, key))
        else:
            q, k, v = (self._view(x) for x in (query.value, key.value, value))
            context_len = None  # one new position sees all before it
        table, half, interleaved = self._turning(query.rope)
        slot = Slot(num_heads * head_dim, "dense" if self._rows.num_positions > 1 else "rows")
        window = min(node.attributes["window"] or 0, capacity)
        caches = list(zip((k_cache, v_cache), node.outputs[1:], strict=True))

        def write(program):
            program.write_ints(half, interleaved, num_heads, num_kv_heads, head_dim, window)
            program.write_float(node.attributes["scale"])
            for view in (q, k, v, table):
                program.write_view(view)
            program.write_norm(query.norm)
            program.write_norm(key.norm)
            for old, new in caches:
                program.write_value(old)
                program.write_result(new)
            for given in (cache_len, num_tokens, context_len, slopes):
                program.write_value(given)
            program.write_slot(slot)

        self._caches += caches
        reads = (q, k, v) if table is None else (q, k, v, table)
        self._add("attention", slot.width, reads, slot, write, node.outputs[0])

    def _heads(self, head, head_dim):
        """All heads of a query, key or value, normed and turned, row after row as attention over many positions reads them."""
        x = self._view(head.value)
        table, half, interleaved = self._turning(head.rope)
        slot = Slot(x.width, "dense")
        self._turned[slot] = head.norm is not None or half > 0

        def write(program):
            program.write_ints(half, interleaved, head_dim)
            program.write_view(self._maker[slot].reads[0])
            program.write_norm(head.norm)
            program.write_view(table)
            program.write_slot(slot)

        return self._add("heads", x.width, (x,) if table is None else (x, table), slot, write)

    def _turning(self, rope):
        """Table of cosines and sines, pairs that turn, whether these are neighbours."""
        return (self._table(rope), rope[1].shape[0], rope[3]) if rope else (None, 0, False)

    # ---- steps

    def _add(self, kind, width, reads, slot, write, value=None):
        step = Step(kind, width, tuple(reads), slot, write)
        self._steps.append(step)
        if slot:
            self._maker[slot] = step
        view = View(slot, 0, slot.width) if slot else None
        if value is not None:
            self._known[value] = view
        return view

    def _waiting(self, value):
        """The product that a value is, if it is not computed yet and nothing else wants it as it is."""
        known = self._known.get(value)
        return known if isinstance(known, _Product) and self._uses[value] == 1 else None

    def _view(self, value):
        """A value's floats; computes what waits."""
        known = self._known.get(value)
        if known is None:
            return self._load(value)
        if isinstance(known, _Product):
            return self._product(known, None, value)
        if isinstance(known, _Norm):
            x, width = self._view(known.x), _width(value.shape, self._num_rows)
            slot = Slot(width)

            def write(program):
                program.write_norm(known.norm)
                program.write_view(x)
                program.write_slot(slot)

            return self._add("norm", width, (x,), slot, write, value)
        return known

    def _load(self, value):
        if value not in self._loaded:
            slot = Slot(_width(value.shape, self._num_rows))

            def write(program):
                program.write_value(value)
                program.write_slot(slot)

            self._loaded[value] = self._add("load", slot.width, (), slot, write)
        return self._loaded[value]

    def _product(self, product, residual, value):
        known = self._known.get(product.x)
        norm = known.norm if isinstance(known, _Norm) else None
        x = self._view(known.x if norm else product.x)
        if self._rows.is_tiled:
            x, norm = self._rounded(x, norm), None
        slot = Slot(product.matrix.out_features)
        prepared = self._prepared.setdefault((x, norm, product.matrix.form), len(self._prepared))

        def write(program):
            program.write_ints(product.matrix.in_features)
            program.write_view(x)
            program.write_norm(norm)
            program.write_ints(FUNCTIONS.index(product.function))
            program.write_matrix(product.matrix)
            program.write_matrix(product.multiply)
            program.write_view(residual)
            out = self._maker[slot].out
            program.write_ints(prepared, out.form == "tiles")
            program.write_slot(out)

        reads = (x,) if residual is None else (x, residual)
        view = self._add("product", slot.width, reads, slot, write, value)
        self._maker[slot].residual = residual
        return view

    def _rounded(self, x, norm):
        """x, normed if asked for, in tiles; for all products that multiply it."""
        if (x, norm) not in self._tiles:
            slot = Slot(x.width, "tiles")

            def write(program):
                program.write_view(x)
                program.write_norm(norm)
                program.write_slot(slot)

            self._tiles[x, norm] = self._add("round", x.width, (x,), slot, write)
        return self._tiles[x, norm]

    def _map(self, node, function, first, second):
        is_number = second is not None and second.shape != node.outputs[0].shape
        a, b = self._view(first), None if second is None or is_number else self._view(second)
        slot = Slot(_width(node.outputs[0].shape, self._num_rows))

        def write(program):
            program.write_ints(FUNCTIONS.index(function))
            program.write_view(a)
            program.write_view(b)
            program.write_value(second if is_number else None)
            program.write_slot(slot)

        self._add("map", slot.width, (a,) if b is None else (a, b), slot, write, node.outputs[0])

    def _table(self, rope):
        if rope not in self._tables:
            position_ids, inv_freq, scale, _ = rope
            slot = Slot(2 * inv_freq.shape[0])

            def write(program):
                program.write_value(position_ids)
                program.write_value(inv_freq)
                program.write_float(scale)
                program.write_slot(slot)

            self._tables[rope] = self._add("rope", slot.width, (), slot, write)
        return self._tables[rope]

    # ---- the end

    def close(self, reasons):
        """The nodes that stand for the segment: a program, or what was taken where a program would save nothing."""
        if sum(node.op in (*_PRODUCTS, "attention") for node in self._nodes) < 2:
            reasons.update((node, "too little beside it to fuse with") for node in self._nodes)
            return self._nodes
        inside = collections.Counter(value for node in self._nodes for value in node.inputs if value is not None)
        wanted = [value for node in self._nodes for value in node.outputs if self._uses[value] > inside[value]]
        caches = {new for _, new in self._caches}
        outputs = [value for value in wanted if value not in caches]
        views = {value: self._view(value) for value in outputs}
        for value, view in views.items():
            is_whole = view.offset == 0 and view.width == view.slot.width and view.slot.result is None
            if is_whole and value.dtype == np.float32 and not self._is_loaded(view.slot):
                view.slot.result = value
            else:
                self._store(value, view)
        self._save_copies()
        program = StepProgram(self._rows, self._steps, outputs, self._caches, self._nodes)
        return [Node(STEP_PROGRAM, tuple(program.inputs), {"program": program}, tuple(program.outputs), self._nodes[0].scope)]

    def _save_copies(self):
        """Let products write to where the only step that reads their result would put it: rounded, or as heads.

        Heads are then normed and turned in place. What is a copy and nothing else is no step any more.
        """
        readers = collections.Counter(view.slot for step in self._steps for view in step.reads)

        def writes_to(x, slot):
            maker = self._maker[x.slot]
            if maker.kind != "product" or x.width != x.slot.width or x.slot.result is not None or readers[x.slot] > 1:
                return False
            maker.out = slot
            return True

        for (x, norm), tiles in self._tiles.items():
            if norm is None and x.width % TILE == 0 and writes_to(x, tiles.slot):
                self._steps.remove(self._maker[tiles.slot])
        for slot, is_turned in self._turned.items():
            step = self._maker[slot]
            if not writes_to(step.reads[0], slot):
                continue
            if is_turned:
                step.reads = (View(slot, 0, slot.width), *step.reads[1:])
            else:
                self._steps.remove(step)

    def _is_loaded(self, slot):
        return any(view.slot is slot for view in self._loaded.values())

    def _store(self, value, view):
        def write(program):
            program.write_view(view)
            program.write_result(value)

        self._add("store", view.width, (view,), None, write)


def _are_alike(a, b):
    """Whether two products can be one step: of one input, equally wide, of one form."""
    same_kind = a.matrix.form == b.matrix.form and (a.matrix.packing is None) == (b.matrix.packing is None)
    return a.x is b.x and same_kind and a.matrix.out_features == b.matrix.out_features


def _can_cut(product, sizes):
    """Whether a product's weight can be cut in two: equal halves, at whole blocks."""
    from poptransformer.packing import BLOCK_ROWS

    return sizes[0] == sizes[1] and (product.matrix.packing is None or sizes[0] % BLOCK_ROWS == 0)
