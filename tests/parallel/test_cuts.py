"""How axes are cut over ranks: any number of heads, key/value heads, features and ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_op import hypothesis_settings

from poptransformer.parallel import Cut, Piece, cut_heads, even_cut, even_pieces, joined_cut

sizes, world_sizes = st.integers(1, 70), st.integers(1, 17)


def held(pieces):
    """What the pieces of all ranks hold, one after the other."""
    return [index for piece in pieces for index in range(piece.begin, piece.stop)]


@given(st.integers(1, 12), st.integers(1, 12), world_sizes)
@hypothesis_settings(300)
def test_heads(group, num_kv_heads, world_size):
    """Each query head is on one rank, and reads there the key/value head that it reads in the whole model."""
    num_heads = group * num_kv_heads
    cut = cut_heads(num_heads, num_kv_heads, world_size)
    assert len(cut.query) == len(cut.kv) == world_size
    assert held(cut.query) == list(range(num_heads))
    assert set(held(cut.kv)) == set(range(num_kv_heads))
    assert {piece.size for piece in cut.query} == {cut.num_heads} and {piece.size for piece in cut.kv} == {cut.num_kv_heads}
    assert cut.num_heads % cut.num_kv_heads == 0
    for query, kv in zip(cut.query, cut.kv, strict=True):
        assert 0 <= query.stop - query.begin <= query.size and 0 <= kv.stop - kv.begin <= kv.size
        for place, head in enumerate(range(query.begin, query.stop)):
            local_kv = place // (cut.num_heads // cut.num_kv_heads)
            assert kv.begin + local_kv == head // group and local_kv < kv.stop - kv.begin
    if num_kv_heads >= world_size:
        assert held(cut.kv) == list(range(num_kv_heads)), "a head that need not be on two ranks is on one"
    assert cut.num_heads <= num_heads
    # A rank that held less would leave some other rank more than this.
    assert cut.num_kv_heads == -(-num_kv_heads // world_size)


@pytest.mark.parametrize(
    ("counts", "world_size", "queries", "kv"),
    [
        ((25, 25), 2, [(0, 13), (13, 25)], [(0, 13), (13, 25)]),  # gpt2-xl: one head of zeros on the last rank
        ((25, 25), 4, [(0, 7), (7, 14), (14, 21), (21, 25)], [(0, 7), (7, 14), (14, 21), (21, 25)]),
        ((32, 2), 4, [(0, 8), (8, 16), (16, 24), (24, 32)], [(0, 1), (0, 1), (1, 2), (1, 2)]),  # ChatGLM2
        ((32, 8), 4, [(0, 8), (8, 16), (16, 24), (24, 32)], [(0, 2), (2, 4), (4, 6), (6, 8)]),  # Llama 3
        ((8, 1), 3, [(0, 3), (3, 6), (6, 8)], [(0, 1)] * 3),  # Gemma
        ((3, 3), 4, [(0, 1), (1, 1), (1, 2), (2, 3)], [(0, 1), (0, 1), (1, 2), (2, 3)]),  # the second rank has no query
    ],
)
def test_heads_of_known_models(counts, world_size, queries, kv):
    cut = cut_heads(*counts, world_size)
    assert [(piece.begin, piece.stop) for piece in cut.query] == queries
    assert [(piece.begin, piece.stop) for piece in cut.kv] == kv


@given(sizes, world_sizes, st.sampled_from([1, 2, 5, 32]))
@hypothesis_settings(200)
def test_even_pieces(size, world_size, align):
    """Equal shares in order, the last ones short or empty, no border inside a group."""
    pieces = even_pieces(size, world_size, align)
    assert held(pieces) == list(range(size)) and len(pieces) == world_size
    (local,) = {piece.size for piece in pieces}
    assert local % align == 0 and (local - align) * world_size < size <= local * world_size
    assert all(piece.begin % align == 0 or piece.begin == size for piece in pieces)
    cut = even_cut(1, size, world_size, align)
    assert (cut.axis, cut.whole_size, cut.local_size, cut.world_size) == (1, size, local, world_size)


@given(st.lists(sizes, min_size=1, max_size=4), world_sizes)
@hypothesis_settings(200)
def test_joined_cuts(parts, world_size):
    """Every rank has its piece of each part of a fused weight, in the order of the parts; joined they are the whole."""
    cut = joined_cut(0, parts, [even_pieces(size, world_size) for size in parts])
    whole = np.arange(1, sum(parts) + 1)
    taken = [cut.take(whole, rank) for rank in range(world_size)]
    assert {len(part) for part in taken} == {cut.local_size} == {sum(-(-size // world_size) for size in parts)}
    ends = np.cumsum(parts)
    for rank, part in enumerate(taken):
        kinds = np.searchsorted(ends, part[part > 0] - 1, side="right")
        assert (np.diff(kinds) >= 0).all()
        assert np.array_equal(part, np.where(cut.indices(rank) < 0, 0, whole[cut.indices(rank)]))
    assert sorted(np.concatenate(taken)[np.concatenate(taken) > 0].tolist()) == whole.tolist()


@pytest.mark.parametrize("axis", [0, 1])
def test_take(axis):
    whole = np.arange(1, 36, dtype=np.float16).reshape(5, 7)
    cut = Cut(axis, whole.shape[axis], ((Piece(3, 5, 3), Piece(0, 1, 1)), (Piece(1, 1, 2), Piece(2, 4, 2))))
    rows = whole if axis == 0 else whole.T
    zeros = np.zeros(len(rows[0]), np.float16)
    for rank, wanted in enumerate(([rows[3], rows[4], zeros, rows[0]], [zeros, zeros, rows[2], rows[3]])):
        part = cut.take(whole, rank)
        assert part.dtype == np.float16 and np.array_equal(part if axis == 0 else part.T, np.stack(wanted))
    bias = Cut(0, 5, cut.ranks)
    assert bias.take(np.arange(1, 6), 1).tolist() == [0, 0, 3, 4]


def test_ranks_have_one_shape():
    with pytest.raises(AssertionError, match="ranks of different sizes"):
        Cut(0, 5, ((Piece(0, 3, 3),), (Piece(3, 5, 2),)))
