"""Step programs: steps on rows of float32 that one kernel runs in one parallel region.

custom_ops/step_program/step_program.h says what steps mean. `fuse` makes them from nodes of a graph; here they are put in
phases, get places for their values, and are written as the row of integers that the kernel reads. A row is a token: M = B of a
decode step, M = B * T of a prompt. Up to 8 are multiplied with weights as they are read; more of them in tiles, as bfloat16.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from poptransformer.graph import Value

MAX_ROWS = 8  # without tiles; kMaxProgramRows in custom_ops/step_program/step_program.h
KINDS = ("load", "store", "embed", "norm", "product", "rope", "attention", "map", "round", "heads")  # StepKind, in its order
FUNCTIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid", "add", "sub", "mul")  # Function
NORMS = ("none", "rms_norm", "layer_norm")  # NormKind
_ALIGN = 16  # floats: a cache line
TILE = 32  # rows, and numbers of a row, that tiles hold whole multiples of


@dataclasses.dataclass(frozen=True)
class RowCount:
    """The rows of a program.

    Attributes:
      num_rows: M.
      num_positions: T, new positions of each sequence.
      is_tiled: whether its products are made in tiles.
    """

    num_rows: int
    num_positions: int = 1
    is_tiled: bool = False


@dataclasses.dataclass(eq=False)
class Slot:
    """M rows of numbers that one step writes.

    Attributes:
      width: numbers of a row.
      form: "rows" of float32, each at a cache line of its own; "dense", one after the other; or "tiles", in bfloat16.
      result: the Value whose array it is, or None where it lives in the arena.
    """

    width: int
    form: str = "rows"
    result: Value | None = None

    @property
    def stride(self):
        """Floats from one row to the next; 0 for tiles."""
        return {"rows": _round_up(self.width, _ALIGN), "dense": self.width, "tiles": 0}[self.form]

    def num_floats(self, num_rows):
        """What it takes of the arena."""
        if self.form == "tiles":
            return _round_up(num_rows, TILE) * _round_up(self.width, TILE) // 2
        return _round_up(num_rows * self.stride, _ALIGN)


@dataclasses.dataclass(frozen=True)
class View:
    """Columns [offset, offset + width) of a slot."""

    slot: Slot
    offset: int
    width: int

    def part(self, offset, width):
        """Some of its columns."""
        return View(self.slot, self.offset + offset, width)


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm of rows: kind of NORMS, eps, weight and bias Values (bias None for rms_norm)."""

    kind: str
    eps: float
    weight: Value
    bias: Value | None = None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Rows first .. first + out_features - 1 of a weight, with the same part of a bias."""

    weight: Value
    packing: object  # Packing, or None for an array of numbers
    first: int
    out_features: int
    in_features: int
    bias: Value | None

    @property
    def form(self):
        """What a quantised input depends on."""
        return (self.packing.bits, self.packing.units_per_group) if self.packing else None


@dataclasses.dataclass(eq=False)
class Step:
    """One step: a kind of KINDS, the slot it writes (None: it stores into a result), and what `write` needs.

    Attributes:
      reads: views that must be there before.
      write: (writer) -> None, writes what stands after kind and width.
      residual: of the views that it reads, what a product adds.
    """

    kind: str
    width: int
    reads: tuple[View, ...]
    out: Slot | None
    write: object
    residual: View | None = None
    phase: int = -1


class StepProgram:
    """Steps in phases, what they take and give.

    Attributes:
      inputs: Values that are arguments, in order.
      outputs: Values that are results, in order.
      aliases: argument -> result that takes its memory (caches).
      numbers: the steps as the kernel reads them, int64.
      nodes: the nodes of the graph that it computes.
      is_tiled: whether its products are made in tiles.
    """

    def __init__(self, rows: RowCount, steps, outputs, caches, nodes):
        """outputs: Values that slots or stores hold; caches: pairs (old, new)."""
        self.nodes, self.is_tiled = nodes, rows.is_tiled
        self.outputs = [*outputs, *(new for _, new in caches)]
        self.inputs = []
        self._argument, self._result = {}, {value: i for i, value in enumerate(self.outputs)}
        phases = _phases(_wanted(steps))
        self._place, arena = _places(phases, rows.num_rows)
        begins = np.cumsum([0, *map(len, phases)]).tolist()
        self._numbers = [rows.num_rows, rows.num_positions, int(rows.is_tiled), arena, len(phases), *begins]
        for step in (step for phase in phases for step in phase):
            self._numbers += [KINDS.index(step.kind), step.width]
            step.write(self)
        self.numbers = np.array(self._numbers, np.int64)
        self.aliases = {self._argument[old]: self._result[new] for old, new in caches}

    # ---- what steps write

    def write_ints(self, *numbers):
        """Plain integers."""
        self._numbers += [int(number) for number in numbers]

    def write_float(self, number):
        """A float, as the integer with its bits."""
        self._numbers.append(int(np.float32(number).view(np.uint32)))

    def write_value(self, value):
        """An argument, or none."""
        if value is not None and value not in self._argument:
            self._argument[value] = len(self.inputs)
            self.inputs.append(value)
        self._numbers.append(-1 if value is None else self._argument[value])

    def write_result(self, value):
        """A result."""
        self._numbers.append(self._result[value])

    def write_view(self, view):
        """Where a view lies, or none."""
        if view is None:
            self._numbers.append(-2)
        elif view.slot.result is not None:
            self._numbers += [self._result[view.slot.result], view.offset, view.slot.width]
        else:
            self._numbers += [-1, self._place[view.slot] + view.offset, view.slot.stride]

    def write_slot(self, slot):
        """Where a whole slot lies."""
        self.write_view(View(slot, 0, slot.width))

    def write_norm(self, norm):
        """A norm, or none."""
        self._numbers.append(NORMS.index(norm.kind if norm else "none"))
        if norm:
            self.write_float(norm.eps)
            self.write_value(norm.weight)
            self.write_value(norm.bias)

    def write_matrix(self, matrix):
        """A matrix, or none."""
        self.write_value(matrix.weight if matrix else None)
        if matrix:
            packing = matrix.packing
            self.write_ints(packing.bits if packing else 0, packing.group_size if packing else -1)
            self.write_ints(matrix.first, matrix.in_features, matrix.out_features, matrix.first if matrix.bias else 0)
            self.write_value(matrix.bias)


def _wanted(steps):
    """Those that something comes of: a result, a cache, or the input of one that is wanted."""
    wanted, read = [], set()
    for step in reversed(steps):
        if step.out is None or step.out.result is not None or step.kind == "attention" or step.out in read:
            wanted.append(step)
            read.update(view.slot for view in step.reads)
    return wanted[::-1]


def _phases(steps):
    """Lists of steps: each step in the first phase after all that it reads is there."""
    phase_of, phases = {}, []
    for step in steps:
        step.phase = max((phase_of[view.slot] + 1 for view in step.reads), default=0)
        if step.out is not None:
            phase_of[step.out] = step.phase
        while len(phases) <= step.phase:
            phases.append([])
        phases[step.phase].append(step)
    return phases


def _round_up(number, multiple):
    return -(-number // multiple) * multiple


def _places(phases, num_rows):
    """Where each slot begins in the arena, and the arena's floats; slots that are no longer read give their place to others."""
    last_read = {}
    for number, phase in enumerate(phases):
        for step in phase:
            last_read.update((view.slot, number) for view in step.reads)
    places, free, live, size = {}, {}, [], 0
    for number, phase in enumerate(phases):
        for slot in [slot for slot in live if last_read.get(slot, -1) < number]:
            live.remove(slot)
            free.setdefault(slot.num_floats(num_rows), []).append(places[slot])
        for step in phase:
            slot = step.out
            if slot is None or slot.result is not None or slot in places:
                continue
            num_floats = slot.num_floats(num_rows)
            same_size = free.get(num_floats)
            summand = _last_summand(step, phase, number, last_read)
            if summand in live:  # the sum takes its place, number by number
                live.remove(summand)
                places[slot] = places[summand]
            elif same_size:
                places[slot] = same_size.pop()
            else:
                places[slot], size = size, size + num_floats
            live.append(slot)
    return places, size


def _last_summand(step, phase, number, last_read):
    """The slot that a product adds to its sums, if nothing else reads it any more; None otherwise."""
    if step.kind != "product" or step.residual is None:
        return None
    slot, out = step.residual.slot, step.out
    is_alike = (slot.form, slot.width, step.residual.width) == (out.form, out.width, out.width)
    num_readers = sum(view.slot is slot for one in phase for view in one.reads)
    return slot if is_alike and last_read[slot] == number and num_readers == 1 else None


def lower_step_program(context, *arrays, program):
    """The kernel's call: a lowering like those in LOWERINGS, for the nodes that `fuse` makes."""
    from poptransformer.backends.xla import custom_ops

    context.use_kernel("step_program", isa=(lambda: "tiles") if program.is_tiled else None)
    return custom_ops.step_program(arrays, [value.spec for value in program.outputs], program.numbers, program.aliases)
