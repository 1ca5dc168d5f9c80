"""How weights are cut over tensor-parallel ranks.

A `Cut` says, for each rank, which rows (or columns) of a whole weight it holds, and where zeros stand in for what is not
there: every rank has the same shape, whatever the counts of heads, tokens or features. Zeros change nothing: a padded head's
output meets zero columns of the output projection, and a padded token's logit is dropped.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Piece:
    """Indices begin .. stop - 1 of an axis, followed by zeros up to `size`."""

    begin: int
    stop: int
    size: int

    def shifted(self, offset: int) -> Piece:
        return Piece(self.begin + offset, self.stop + offset, self.size)

    def scaled(self, factor: int) -> Piece:
        return Piece(self.begin * factor, self.stop * factor, self.size * factor)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one axis of a weight is cut.

    Attributes:
      axis: 0 (outputs, rows) or 1 (inputs, columns), of the weight as [out_features, in_features].
      whole_size: the axis's size in the whole weight.
      ranks: for each rank its pieces, which lie one after the other; all ranks have the same local size.
    """

    axis: int
    whole_size: int
    ranks: tuple[tuple[Piece, ...], ...]

    def __post_init__(self):
        sizes = {sum(piece.size for piece in pieces) for pieces in self.ranks}
        assert len(sizes) == 1, f"ranks of different sizes: {sizes}"

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def local_size(self) -> int:
        """The axis's size on one rank, zeros included."""
        return sum(piece.size for piece in self.ranks[0])

    def indices(self, rank: int) -> np.ndarray:
        """Where each local row comes from: int64 [local_size], -1 for zeros."""
        parts = [
            np.concatenate([np.arange(piece.begin, piece.stop), np.full(piece.size - piece.stop + piece.begin, -1)])
            for piece in self.ranks[rank]
        ]
        return np.concatenate(parts)

    def take(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """A rank's part of a whole weight."""
        return take_or_zero(whole, self.indices(rank), min(self.axis, whole.ndim - 1))

    def of_bias(self) -> Cut:
        """The same cut for the bias of a matrix whose outputs are cut."""
        assert self.axis == 0
        return self


def take_or_zero(array: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    """Rows (or columns) of an array by index; zeros where the index is -1."""
    taken = np.take(array, np.maximum(indices, 0), axis=axis)
    mask = (indices < 0).reshape((-1,) + (1,) * (array.ndim - 1 - axis))
    return np.where(mask, np.zeros((), array.dtype), taken) if mask.any() else taken


def even_pieces(size: int, world_size: int, align: int = 1) -> tuple[Piece, ...]:
    """Cut an axis into equal parts, one for each rank; the last ones may be short or empty and are filled with zeros.

    Args:
      align: every border is a multiple of this (a group of packed weights).
    """
    local = -(-size // (world_size * align)) * align
    return tuple(Piece(min(r * local, size), min((r + 1) * local, size), local) for r in range(world_size))


def even_cut(axis: int, size: int, world_size: int, align: int = 1) -> Cut:
    """A Cut of `even_pieces`."""
    return Cut(axis, size, tuple((piece,) for piece in even_pieces(size, world_size, align)))


def joined_cut(axis: int, sizes, pieces_of_parts) -> Cut:
    """A Cut of a fused weight whose parts follow each other: each rank has its piece of every part.

    Args:
      sizes: size of each part.
      pieces_of_parts: for each part, a Piece for each rank.
    """
    offsets = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    by_part = [
        [piece.shifted(offset) for piece in pieces] for offset, pieces in zip(offsets[:-1], pieces_of_parts, strict=True)
    ]
    return Cut(axis, offsets[-1], tuple(zip(*by_part, strict=True)))


@dataclasses.dataclass(frozen=True)
class HeadCut:
    """Which attention heads each rank has.

    Every rank has `num_heads` query heads and `num_kv_heads` key/value heads, the last ones zeros where the counts do not
    divide; the queries of a rank read its own keys in equal groups. With fewer key/value heads than ranks each of them is
    held by several ranks, which share its queries.

    Attributes:
      num_heads, num_kv_heads: of one rank.
      query, kv: a Piece of heads for each rank.
    """

    num_heads: int
    num_kv_heads: int
    query: tuple[Piece, ...]
    kv: tuple[Piece, ...]


def cut_heads(num_heads: int, num_kv_heads: int, world_size: int) -> HeadCut:
    """Spread heads over ranks; num_heads is a multiple of num_kv_heads, world_size any number."""
    group = num_heads // num_kv_heads
    if num_kv_heads >= world_size:
        kv = even_pieces(num_kv_heads, world_size)
        return HeadCut(kv[0].size * group, kv[0].size, tuple(piece.scaled(group) for piece in kv), kv)
    held = [rank * num_kv_heads // world_size for rank in range(world_size)]  # the kv head of each rank
    shares = -(-group // min(held.count(head) for head in range(num_kv_heads)))  # queries of a rank
    query = []
    for rank, head in enumerate(held):
        begin = head * group + (rank - held.index(head)) * shares
        stop = (head + 1) * group
        query.append(Piece(min(begin, stop), min(begin + shares, stop), shares))
    return HeadCut(shares, 1, tuple(query), tuple(Piece(head, head + 1, 1) for head in held))
