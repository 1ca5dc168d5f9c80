"""Packed weights: codes of 8 or 4 bits with a scale for each group, laid out for the kernel that reads them.

A matrix W [O, I] is cut into groups of consecutive inputs of a row. A group's values are

    int8:  scale * (code - 128)            codes 1 .. 255 (a file's own may use 0)
    int4:  scale * code + minimum          codes 0 .. 15
    fp8:   scale * code                    codes in e4m3 (float8.py), none of them NaN; the group is the whole row

with float16 scales and minimums, in fp8 float32 scales: 8.5 and 5 bits a weight in groups of 32, and 8. The packed form is one
array of bytes [ceil(O / 16), block_bytes], a row for each block of 16 outputs, whose parts follow each other:

    codes    [I / 32 rounded up] units of 32 inputs: int8, fp8 [8, 16, 4] bytes: quad q of inputs, output, input of the quad;
             int4 [4, 16, 4] bytes: the low half of a byte is of quad q, the high half of quad q + 4
    scales   [groups, 16] float16, fp8 float32
    minimums [groups, 16] float16, int4 only
    zeros    up to a multiple of 64 bytes

so that one vector holds four inputs of 16 outputs, as the dot product instructions of 8-bit integers want them. Inputs past I
and outputs past O have zeros. In Python only the lowerings of packed_linear know the layout as well, in C++ its kernel.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.float8 import FLOAT8, LARGEST, to_float8
from poptransformer.parallel import take_or_zero

BLOCK_ROWS = 16  # outputs that lie side by side
UNIT = 32  # inputs of one unit; groups are whole units
WHOLE_ROW = -1  # group_size that makes each row one group
BITS = {"int8": 8, "int4": 4, "fp8": 8}
GROUP_SIZES = (32, 64, 128, WHOLE_ROW)
ZERO_CODES = {"int8": 128, "int4": 0, "fp8": 0}
_LEAST_SCALE = 2.0**-100  # rows of fp8 whose scale is below it are zeros, so that its inverse stays finite
_ROWS_AT_ONCE = 1024  # rows that are packed together, so that intermediate arrays stay small


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a matrix is packed.

    Attributes:
      kind: "int8", "int4" or "fp8".
      group_size: inputs that share a scale, 32, 64 or 128, or -1 for the whole row, as always in fp8; the last
        group of a row may be shorter.
      out_features, in_features: the matrix's shape, O and I.
    """

    kind: str
    group_size: int
    out_features: int
    in_features: int

    def __post_init__(self):
        if self.kind not in BITS:
            raise UnsupportedError(f"packed weights of kind {self.kind!r} are not supported; there are {', '.join(BITS)}")
        if self.group_size not in GROUP_SIZES:
            raise UnsupportedError(
                f"group_size={self.group_size!r} is not supported; there are {', '.join(map(str, GROUP_SIZES))}"
            )
        if self.kind == "fp8" and self.group_size != WHOLE_ROW:
            raise UnsupportedError(f"group_size={self.group_size!r} is not supported for fp8, which has one scale a row")

    def __str__(self):
        return f"{self.kind} in {'rows' if self.group_size == WHOLE_ROW else f'groups of {self.group_size}'}"

    # ---- sizes

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.kind]

    @property
    def num_units(self) -> int:
        """Units of 32 inputs of a row, the last one filled up."""
        return -(-self.in_features // UNIT)

    @property
    def units_per_group(self) -> int:
        return self.num_units if self.group_size == WHOLE_ROW else self.group_size // UNIT

    @property
    def num_groups(self) -> int:
        return -(-self.num_units // self.units_per_group)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one block."""
        return self.num_units * UNIT * BLOCK_ROWS * self.bits // 8

    @property
    def scale_dtype(self) -> np.dtype:
        """Of the scales, and of the minimums where there are any."""
        return np.dtype(np.float32 if self.kind == "fp8" else np.float16)

    @property
    def has_minimums(self) -> bool:
        return self.kind == "int4"

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one block; the minimums, where there are any, take as many."""
        return self.num_groups * BLOCK_ROWS * self.scale_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of 16 outputs."""
        return -(-(self.code_bytes + self.scale_bytes * (2 if self.has_minimums else 1)) // 64) * 64

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the packed array, uint8."""
        return -(-self.out_features // BLOCK_ROWS), self.block_bytes

    # ---- floats to packed and back

    def pack(self, weight: np.ndarray) -> np.ndarray:
        """Quantise a matrix.

        Each value of int8 and int4 is off by at most half a scale. For a group's scale a float16 is taken that is just large
        enough for its values, so that none is cut off. In fp8 the largest of a row becomes 448; values are off by at most a
        16th of themselves, or a 1024th of the scale.

        Args:
          weight: [O, I], any floating dtype.
        Returns: uint8 of `shape`.
        Raises: UserError for values that are not finite, or too large for a float16 scale.
        """
        assert weight.shape == (self.out_features, self.in_features), f"{weight.shape} is not the shape of {self}"
        packed = np.empty(self.shape, np.uint8)
        for begin in range(0, self.out_features, _ROWS_AT_ONCE):
            rows = weight[begin : begin + _ROWS_AT_ONCE].astype(np.float32)
            codes, scales, minimums = self._quantize_float8(rows) if self.kind == "fp8" else self._quantize(rows)
            blocks = slice(begin // BLOCK_ROWS, -(-(begin + len(rows)) // BLOCK_ROWS))
            self.assemble(codes, scales, minimums, packed[blocks])
        return packed

    def _quantize(self, weight):
        """codes [O, I padded to units] uint8, scales [O, G], minimums [O, G] float16 or None."""
        rows = len(weight)
        padded = np.zeros((rows, self.num_groups * self.units_per_group * UNIT), np.float32)
        padded[:, : self.in_features] = weight
        groups = padded.reshape(rows, self.num_groups, -1)
        low, high = groups.min(-1), groups.max(-1)
        if self.group_size != WHOLE_ROW and self.in_features % self.group_size or self.in_features % UNIT:
            # What the last group was filled up with does not count.
            last = weight[:, (self.num_groups - 1) * self.units_per_group * UNIT :]
            low[:, -1], high[:, -1] = last.min(-1), last.max(-1)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise UserError(_NOT_FINITE)
        if self.bits == 8:
            minimums, span, steps = None, np.maximum(-low, high), 127
        else:
            minimums = _float16_towards(low, -np.inf)
            span, steps = high - minimums.astype(np.float32), 15
        scales = _float16_towards(span / np.float32(steps), np.inf)
        if not np.isfinite(scales).all() or minimums is not None and not np.isfinite(minimums).all():
            raise UserError("holds values too large for float16 scales; set precision to fp32 or bf16")
        inverse = np.divide(1, scales, out=np.zeros(scales.shape, np.float32), where=scales != 0, dtype=np.float32)
        if minimums is None:
            codes = np.rint(groups * inverse[:, :, None])
            codes += 128
        else:
            codes = np.rint((groups - minimums.astype(np.float32)[:, :, None]) * inverse[:, :, None])
        codes = np.clip(codes, 0, 2**self.bits - 1).astype(np.uint8).reshape(rows, -1)
        return codes[:, : self.num_units * UNIT], scales, minimums

    def _quantize_float8(self, weight):
        """codes [O, I] uint8, scales [O, 1] float32, None."""
        largest = np.abs(weight).max(-1, keepdims=True)
        if not np.isfinite(largest).all():
            raise UserError(_NOT_FINITE)
        scales = largest / np.float32(LARGEST)
        scales[scales < _LEAST_SCALE] = 0
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        return to_float8(weight * inverse).view(np.uint8), scales, None

    def assemble(self, codes, scales, minimums, out=None) -> np.ndarray:
        """Lay codes, scales and minimums out.

        Args:
          codes: [O, I] or [O, 32 * num_units] uint8.
          scales: [O, G] of scale_dtype; minimums: the same, int4 only.
          out: uint8 array for the result; None makes one.
        Returns: uint8 [ceil(O / 16), block_bytes].
        """
        rows, num_blocks = len(codes), -(-len(codes) // BLOCK_ROWS)
        out = np.empty((num_blocks, self.block_bytes), np.uint8) if out is None else out
        padded = np.full((num_blocks * BLOCK_ROWS, self.num_units * UNIT), ZERO_CODES[self.kind], np.uint8)
        padded[:rows, : codes.shape[1]] = codes
        quads = padded.reshape(num_blocks, BLOCK_ROWS, self.num_units, 8, 4).transpose(0, 2, 3, 1, 4)
        if self.bits == 4:
            quads = quads[:, :, :4] | quads[:, :, 4:] << 4
        out[:, : self.code_bytes] = quads.reshape(num_blocks, -1)
        at = self.code_bytes
        for numbers in (scales,) if minimums is None else (scales, minimums):
            side_by_side = np.zeros((num_blocks * BLOCK_ROWS, self.num_groups), self.scale_dtype)
            side_by_side[:rows] = numbers
            side_by_side = side_by_side.reshape(num_blocks, BLOCK_ROWS, -1).transpose(0, 2, 1)
            out[:, at : at + self.scale_bytes] = side_by_side.reshape(num_blocks, -1).view(np.uint8)
            at += self.scale_bytes
        out[:, at:] = 0
        return out

    def split(self, packed: np.ndarray):
        """What `assemble` laid out: codes [O, 32 * num_units] uint8, scales [O, G], and minimums, the same or None."""
        num_blocks = len(packed)
        codes = packed[:, : self.code_bytes].reshape(num_blocks, self.num_units, -1, BLOCK_ROWS, 4)
        if self.bits == 4:
            codes = np.concatenate([codes & 15, codes >> 4], axis=2)
        codes = codes.transpose(0, 3, 1, 2, 4).reshape(num_blocks * BLOCK_ROWS, -1)[: self.out_features]
        numbers = []
        for part in range(2 if self.has_minimums else 1):
            at = self.code_bytes + part * self.scale_bytes
            groups = packed[:, at : at + self.scale_bytes].copy().view(self.scale_dtype).reshape(num_blocks, -1, BLOCK_ROWS)
            numbers.append(groups.transpose(0, 2, 1).reshape(num_blocks * BLOCK_ROWS, -1)[: self.out_features])
        return codes, numbers[0], numbers[1] if len(numbers) > 1 else None

    def can_take(self, cut) -> bool:
        """Whether no group of weights crosses the borders of a cut."""
        if cut.axis == 0 or self.group_size == WHOLE_ROW:  # each part of a row keeps the row's scale
            return True
        size = self.units_per_group * UNIT
        pieces = [piece for rank in cut.ranks for piece in rank if piece.stop > piece.begin]
        return all(
            piece.begin % size == 0 and piece.size % size == 0 and (piece.stop % size == 0 or piece.stop == self.in_features)
            for piece in pieces
        )

    def take(self, packed: np.ndarray, cut, rank: int) -> np.ndarray:
        """A rank's part of a whole packed matrix, its codes as they are; what fills up stands for zeros. Needs `can_take`."""
        codes, scales, minimums = self.split(packed)
        indices = cut.indices(rank)
        sizes = [self.out_features, self.in_features]
        sizes[cut.axis] = len(indices)
        local = dataclasses.replace(self, out_features=sizes[0], in_features=sizes[1])
        if cut.axis == 0:
            groups = indices
        elif self.group_size == WHOLE_ROW:
            groups = np.array([min(indices.max(initial=-1), 0)])
        else:
            groups = indices[:: self.group_size] // self.group_size
        codes = np.where(_mask(indices, cut.axis), ZERO_CODES[self.kind], np.take(codes, np.maximum(indices, 0), cut.axis))
        numbers = [None if numbers is None else take_or_zero(numbers, groups, cut.axis) for numbers in (scales, minimums)]
        return local.assemble(codes.astype(np.uint8), *numbers)

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The matrix [O, I] float32 that a packed array stands for."""
        return self.unpack_blocks(packed)[: self.out_features]

    def unpack_blocks(self, packed: np.ndarray) -> np.ndarray:
        """The rows [16 * n, I] float32 of n blocks, those past O included."""
        num_blocks = len(packed)
        codes = packed[:, : self.code_bytes].reshape(num_blocks, self.num_units, -1, BLOCK_ROWS, 4)
        if self.bits == 4:
            codes = np.concatenate([codes & 15, codes >> 4], axis=2)
        codes = codes.view(FLOAT8) if self.kind == "fp8" else codes
        codes = codes.astype(np.float32) - ZERO_CODES[self.kind]
        numbers = packed[:, self.code_bytes :].copy().view(self.scale_dtype).astype(np.float32)
        numbers = numbers[:, : numbers.shape[1] // BLOCK_ROWS * BLOCK_ROWS].reshape(num_blocks, -1, BLOCK_ROWS)
        group_of = np.arange(self.num_units) // self.units_per_group
        values = codes * numbers[:, group_of, None, :, None]
        if self.has_minimums:
            values += numbers[:, self.num_groups + group_of, None, :, None]
        values = values.transpose(0, 3, 1, 2, 4).reshape(num_blocks * BLOCK_ROWS, -1)
        return values[:, : self.in_features]

    def draw(self, seed: int) -> np.ndarray:
        """Random packed weights of about the deviation that random float weights have, for speed without a checkpoint."""
        generator = np.random.default_rng(seed)
        packed = np.frombuffer(generator.bytes(int(np.prod(self.shape))), np.uint8).reshape(self.shape).copy()
        span = 0.07  # of uniform values with a deviation of 0.02
        scale, at = span / (2**self.bits - 1), self.code_bytes
        if self.kind == "fp8":
            uniform = to_float8(np.linspace(-LARGEST, LARGEST, 256)).view(np.uint8)
            packed[:, :at], scale = uniform[packed[:, :at]], span / 2 / LARGEST
        for number in (scale, -span / 2) if self.has_minimums else (scale,):
            numbers = np.full(self.num_groups * BLOCK_ROWS, number, self.scale_dtype)
            packed[:, at : at + self.scale_bytes] = numbers.view(np.uint8)
            at += self.scale_bytes
        packed[:, at:] = 0
        return packed


_NOT_FINITE = "holds NaN or infinity, which cannot be quantised; set precision to fp32, bf16 or fp16"


def _mask(indices, axis):
    return (indices < 0)[:, None] if axis == 0 else (indices < 0)[None]


def _float16_towards(x, direction):
    """The float16 nearest to x that is not on its other side."""
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float16)
    wrong = (rounded > x) if direction < 0 else (rounded < x)
    return np.where(wrong, np.nextafter(rounded, np.float16(direction)), rounded)
