"""Packed matrices on ranks: no group of weights crosses a cut, codes taken out are those of the whole, fill-up is zeros."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel_cases import GOLDEN, build_model
from run_op import hypothesis_settings

from poptransformer.packing import GROUP_SIZES, Packing
from poptransformer.parallel import Cut, Piece, even_cut

EACH_KIND = pytest.mark.parametrize("kind", ["int8", "int4"])


def matrix(shape):
    return (np.random.default_rng(0).standard_normal(shape) * 0.05 + 0.01).astype(np.float32)


@EACH_KIND
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_split_takes_apart_what_assemble_laid_out(kind, group_size):
    packing = Packing(kind, group_size, 37, 141)
    packed = packing.pack(matrix((37, 141)))
    codes, scales, minimums = packing.split(packed)
    assert codes.shape == (37, 160) and scales.shape == (37, packing.num_groups)
    assert (minimums is None) == (kind == "int8")
    assert np.array_equal(packing.assemble(codes, scales, minimums), packed)
    width = 141 if group_size == -1 else group_size
    values = codes[:, :141] * np.repeat(scales.astype(np.float32), width, 1)[:, :141]
    if kind == "int8":
        values -= 128 * np.repeat(scales.astype(np.float32), width, 1)[:, :141]
    else:
        values += np.repeat(minimums.astype(np.float32), width, 1)[:, :141]
    np.testing.assert_allclose(values, packing.unpack(packed), atol=1e-6)


@given(
    st.sampled_from(["int8", "int4"]), st.sampled_from(GROUP_SIZES), st.integers(1, 40), st.integers(1, 300),
    st.integers(1, 9), st.integers(0, 1),
)  # fmt: skip
@hypothesis_settings(150)
def test_even_cuts_are_taken_code_by_code(kind, group_size, rows, columns, world_size, axis):
    """Cuts as layers make them, along outputs or inputs: the parts' values joined are the whole's."""
    packing, align = Packing(kind, group_size, rows, columns), 32 if group_size == -1 else group_size
    cut = even_cut(axis, (rows, columns)[axis], world_size, align)
    if not packing.can_take(cut):
        # One group for the whole row: only a rank that has all of it.
        assert axis == 1 and group_size == -1 and columns > cut.local_size
        return
    packed, parts = packing.pack(matrix((rows, columns))), []
    for rank in range(world_size):
        sizes = {("out_features", "in_features")[axis]: cut.local_size}
        local = dataclasses.replace(packing, **sizes)
        part = packing.take(packed, cut, rank)
        assert part.shape == local.shape and part.dtype == np.uint8
        values = np.moveaxis(local.unpack(part), axis, 0)
        is_empty = cut.indices(rank) < 0
        if axis == 1:  # a short last group is filled up with its smallest value, and reads inputs that are zeros
            is_empty &= np.repeat([group.all() for group in np.split(is_empty, np.arange(align, len(is_empty), align))], align)
        assert not values[is_empty].any()
        parts.append(values[cut.indices(rank) >= 0])
    assert np.array_equal(np.moveaxis(np.concatenate(parts), 0, axis), packing.unpack(packed))


@EACH_KIND
@pytest.mark.parametrize(
    ("pieces", "can"),
    [
        ((Piece(0, 64, 64), Piece(64, 150, 96)), True),  # a short last group
        ((Piece(0, 64, 64), Piece(64, 128, 64)), True),
        ((Piece(0, 48, 96), Piece(48, 96, 96)), False),  # begins inside a group
        ((Piece(0, 40, 64), Piece(64, 128, 64)), False),  # ends inside one
        ((Piece(0, 32, 48), Piece(32, 64, 48)), False),  # what comes after the piece would not begin a group
        ((Piece(150, 150, 33), Piece(0, 32, 32)), True),  # nothing but zeros
    ],
)
def test_what_can_be_taken(kind, pieces, can):
    packing = Packing(kind, 32, 20, 150)
    size = max(piece.size for piece in pieces)
    cut = Cut(1, 150, tuple((piece, Piece(150, 150, size - piece.size)) for piece in pieces))
    assert packing.can_take(cut) == can
    assert packing.can_take(even_cut(0, 20, 3))  # rows always


@pytest.mark.parametrize("family", ["gpt2", "llama", "chatglm2", "rwkv"])
@pytest.mark.parametrize(("precision", "group_size"), [("int8", 32), ("int8", -1), ("int4", 64), ("int4", 128)])
def test_ranks_pack_their_own_parts(family, precision, group_size):
    """Each part packed by itself is the part of the float weights: off by half a scale of its own groups at most."""
    floats = build_model(GOLDEN / family, 1).named_parameters()
    for world_size in (2, 3):
        for name, parameter in build_model(GOLDEN / family, world_size, precision, group_size).named_parameters().items():
            if parameter.packing is None:
                continue
            whole = floats[name].load(0)
            for rank in range(world_size):
                wanted = parameter.cut.take(whole, rank) if parameter.cut else whole
                part = parameter.load(rank)
                assert part.shape == parameter.shape and wanted.shape == (
                    parameter.packing.out_features, parameter.packing.in_features,
                )  # fmt: skip
                assert np.array_equal(part, parameter.packing.pack(wanted))
