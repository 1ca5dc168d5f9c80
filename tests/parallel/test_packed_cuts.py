"""Packed matrices on ranks: no group of weights crosses a cut, codes taken out are those of the whole, fill-up is zeros."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel_cases import GOLDEN, build_model, open_session
from run_op import hypothesis_settings

from poptransformer.float8 import FLOAT8
from poptransformer.packing import GROUP_SIZES, Packing
from poptransformer.parallel import Cut, Piece, even_cut

FORMS = [(kind, size) for kind in ("int8", "int4") for size in GROUP_SIZES] + [("fp8", -1)]


def matrix(shape):
    return (np.random.default_rng(0).standard_normal(shape) * 0.05 + 0.01).astype(np.float32)


@pytest.mark.parametrize(("kind", "group_size"), FORMS)
def test_split_takes_apart_what_assemble_laid_out(kind, group_size):
    packing = Packing(kind, group_size, 37, 141)
    packed = packing.pack(matrix((37, 141)))
    codes, scales, minimums = packing.split(packed)
    assert codes.shape == (37, 160) and scales.shape == (37, packing.num_groups)
    assert (minimums is None) == (kind != "int4")
    assert np.array_equal(packing.assemble(codes, scales, minimums), packed)
    width = 141 if group_size == -1 else group_size
    scales = np.repeat(scales.astype(np.float32), width, 1)[:, :141]
    codes = codes[:, :141]
    if kind == "int8":
        values = (codes - np.float32(128)) * scales
    elif kind == "int4":
        values = codes * scales + np.repeat(minimums.astype(np.float32), width, 1)[:, :141]
    else:
        values = codes.view(FLOAT8).astype(np.float32) * scales
    np.testing.assert_allclose(values, packing.unpack(packed), atol=1e-6)


@given(st.sampled_from(FORMS), st.integers(1, 40), st.integers(1, 300), st.integers(1, 9), st.integers(0, 1))
@hypothesis_settings(150)
def test_even_cuts_are_taken_code_by_code(form, rows, columns, world_size, axis):
    """Cuts as layers make them, along outputs or inputs: the parts' values joined are the whole's."""
    kind, group_size = form
    packing, align = Packing(kind, group_size, rows, columns), 32 if group_size == -1 else group_size
    cut = even_cut(axis, (rows, columns)[axis], world_size, align)
    assert packing.can_take(cut)
    packed, parts = packing.pack(matrix((rows, columns))), []
    for rank in range(world_size):
        sizes = {("out_features", "in_features")[axis]: cut.local_size}
        local = dataclasses.replace(packing, **sizes)
        part = packing.take(packed, cut, rank)
        assert part.shape == local.shape and part.dtype == np.uint8
        values = np.moveaxis(local.unpack(part), axis, 0)
        is_empty = cut.indices(rank) < 0
        if axis == 1 and kind == "int4":  # a short group is filled up with its smallest value, and reads inputs that are zeros
            size = len(is_empty) if group_size == -1 else group_size
            is_empty &= np.repeat([group.all() for group in np.split(is_empty, np.arange(size, len(is_empty), size))], size)
        assert not values[is_empty].any()
        parts.append(values[cut.indices(rank) >= 0])
    assert np.array_equal(np.moveaxis(np.concatenate(parts), 0, axis), packing.unpack(packed))


@pytest.mark.parametrize("kind", ["int8", "int4"])
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
    assert Packing(kind, -1, 20, 150).can_take(cut)  # one scale a row goes with each part of it


@pytest.mark.parametrize("family", ["gpt2", "llama", "chatglm2", "rwkv"])
@pytest.mark.parametrize(("precision", "group_size"), [("int8", 32), ("int8", -1), ("int4", 64), ("int4", 128), ("fp8", None)])
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


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_saved_models_are_cut_as_they_are(precision, tmp_path):
    """What one device has packed and saved goes to ranks with its values, but where a head's border crosses a group."""
    with open_session("llama", backend="reference", precision=precision) as session:
        session.save_quantized(tmp_path)
    whole = build_model(tmp_path, 1, precision).named_parameters()
    num_crossed = 0
    for name, parameter in build_model(tmp_path, 3, precision).named_parameters().items():
        one = whole[name].packing.unpack(whole[name].load(0)) if parameter.packing else whole[name].load(0)
        crosses = parameter.packing and not parameter.whole_packing.can_take(parameter.cut)
        num_crossed += bool(crosses)
        for rank in range(3):
            part = parameter.load(rank)
            assert (part.shape, part.dtype) == (parameter.spec.shape, parameter.spec.dtype)
            part = parameter.packing.unpack(part) if parameter.packing else part
            wanted = parameter.cut.take(one, rank) if parameter.cut else one
            if parameter.cut:
                there = parameter.cut.indices(rank) >= 0  # what fills a group up may be its smallest value
                part, wanted = (np.compress(there, array, parameter.cut.axis) for array in (part, wanted))
            tolerance = float(np.abs(wanted).max(initial=0)) / (127 if precision == "int8" else 7) if crosses else 0
            np.testing.assert_allclose(part, wanted, rtol=0, atol=tolerance)
    assert num_crossed == (0 if precision == "fp8" else 2), "the output projections of two layers, heads of 10"
