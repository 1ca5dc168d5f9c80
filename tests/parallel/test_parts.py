"""What each rank reads of a checkpoint: joined it is all of it, and nobody reads what is not its own."""

import re

import numpy as np
import parity
import pytest
from gguf_cases import random_blocks
from gguf_cases import write as write_gguf
from parallel_cases import FAMILIES, GOLDEN, build_model, bytes_read, join  # noqa: F401  bytes_read is a fixture
from tolerance import assert_close

WORLD_SIZES = (1, 2, 3, 4, 8)
# Tables of positions are small and looked up; RWKV's gate is multiplied by what all ranks have added up.
WHOLE = r"\.wpe\.|\.embed_positions\.|\.feed_forward\.receptance\."


def parts_of(parameter, world_size):
    return [parameter.load(rank) for rank in range(world_size)]


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_join_to_the_checkpoint(family):
    """Exactly, whatever the number of ranks; all parts have the shape that the graph says."""
    whole = {name: parameter.load(0) for name, parameter in build_model(GOLDEN / family).named_parameters().items()}
    for world_size in WORLD_SIZES:
        parameters = build_model(GOLDEN / family, world_size).named_parameters()
        assert parameters.keys() == whole.keys()
        for name, parameter in parameters.items():
            parts = parts_of(parameter, world_size)
            assert {(part.shape, part.dtype) for part in parts} == {(parameter.spec.shape, parameter.spec.dtype)}
            assert np.array_equal(join(parameter, parts), whole[name]), (name, world_size)
        is_cut = {name: parameter.cut is not None for name, parameter in parameters.items() if whole[name].ndim == 2}
        if world_size == 1:
            assert not any(is_cut.values())
        else:
            assert {name for name in is_cut if not is_cut[name]} == {name for name in is_cut if re.search(WHOLE, name)}


def real_bytes(parameter, rank, item_bytes):
    """Bytes of a rank's part, what fills it up not counted."""
    if parameter.cut is None:
        return int(np.prod(parameter.logical_shape)) * item_bytes
    shape = list(parameter.logical_shape)
    shape[parameter.cut.axis] = int((parameter.cut.indices(rank) >= 0).sum())
    return int(np.prod(shape)) * item_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_rank_reads_its_part_alone(family, precision, bytes_read):  # noqa: F811
    """Byte by byte: rows, columns, the rows of its heads, transposed or sorted; also where the part is packed afterwards."""
    model = build_model(GOLDEN / family, 3, precision)
    for name, parameter in model.named_parameters().items():
        checkpoint, key = parameter.load.args[:2]
        for rank in range(3):
            bytes_read.clear()
            parameter.load(rank)
            assert sum(bytes_read) == real_bytes(parameter, rank, checkpoint.dtype(key).itemsize), (name, rank)


def test_gguf_codes_are_cut_as_they_are(tmp_path, bytes_read):  # noqa: F811
    """A rank's part of a matrix in codes has the codes of the whole; of a block of codes it reads no more than its own."""
    hidden_size, intermediate_size, vocab_size = 128, 224, 67
    shapes = {
        "token_embd": (vocab_size, hidden_size), "output": (vocab_size, hidden_size),
        "blk.0.attn_q": (128, 128), "blk.0.attn_k": (64, 128), "blk.0.attn_v": (64, 128), "blk.0.attn_output": (128, 128),
        "blk.0.ffn_gate": (intermediate_size, 128), "blk.0.ffn_up": (intermediate_size, 128),
        "blk.0.ffn_down": (128, intermediate_size),
    }  # fmt: skip
    metadata = {f"llama.{key}": value for key, value in {
        "context_length": 64, "embedding_length": hidden_size, "block_count": 1, "feed_forward_length": intermediate_size,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": vocab_size,
    }.items()}  # fmt: skip
    for kind, precision, block_bytes in (("Q8_0", "int8", 34), ("Q4_0", "int4", 18), ("Q4_1", "int4", 20)):
        tensors = {
            f"{name}.weight": (random_blocks(kind if name != "output" else "Q8_0", *shape, seed=seed),
                               kind if name != "output" else "Q8_0")
            for seed, (name, shape) in enumerate(shapes.items())
        }  # fmt: skip
        tensors |= {f"{name}.weight": np.ones(128, np.float32) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
        path = write_gguf(tmp_path / f"{kind}.gguf", metadata=metadata, tensors=tensors)
        whole = {n: p for n, p in build_model(path, 1, precision).named_parameters().items() if p.packing}
        assert len(whole) == 8  # all but the embedding
        for world_size in (2, 3, 4):
            parameters = build_model(path, world_size, precision).named_parameters()
            for name, one in whole.items():
                cut, packed, local = parameters[name].cut, one.load(0), parameters[name].packing
                can_take = one.packing.can_take(cut)
                assert can_take == (cut.axis == 0 or not re.search("o_proj", name) or world_size != 8)
                for rank in range(world_size):
                    bytes_read.clear()
                    part = parameters[name].load(rank)
                    num_bytes = 34 if "lm_head" in name else block_bytes
                    wanted = local.split(one.packing.take(packed, cut, rank))
                    same = [np.array_equal(mine, theirs) for mine, theirs in zip(local.split(part), wanted, strict=True)]
                    assert all(same), (name, world_size, rank)
                    # Rows of a head lie in an order of their own, all within the head.
                    assert sum(bytes_read) * 32 == real_bytes(parameters[name], rank, 1) * num_bytes, (name, world_size, rank)


def test_a_cut_through_groups_of_codes_packs_anew(tmp_path):
    """Heads of 48 features: the output projection's cut crosses groups of 32 codes, so that parts are packed from floats."""
    shape = (96, 96)
    blocks = random_blocks("Q8_0", *shape)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors = {f"blk.0.{name}.weight": (blocks, "Q8_0") for name in names} | {"token_embd.weight": (blocks[:67], "Q8_0")}
    tensors |= {f"{name}.weight": np.ones(96, np.float32) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
    metadata = {f"llama.{key}": value for key, value in {
        "context_length": 64, "embedding_length": 96, "block_count": 1, "feed_forward_length": 96, "vocab_size": 67,
        "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }.items()}  # fmt: skip
    path = write_gguf(tmp_path / "odd.gguf", metadata=metadata, tensors=tensors)
    one, two = (build_model(path, world_size, "int8").named_parameters() for world_size in (1, 2))
    name = next(name for name in one if "o_proj" in name)
    whole, cut = one[name].packing.unpack(one[name].load(0)), two[name].cut
    assert not one[name].packing.can_take(cut)
    for rank in range(2):
        part = two[name].packing.unpack(two[name].load(rank))
        # Values of a group whose largest lies on the other rank have another scale: half a code of the largest, 127 codes.
        assert_close(part, cut.take(whole, rank), rtol=0, atol=float(np.abs(whole).max()) / 127)


def test_rewritten_checkpoints_with_biases_of_their_own(tmp_path):
    """Biases are cut as the rows of their matrix, and those that are added once are on every rank."""
    folder = parity.rewrite("phi", tmp_path)
    parameters = build_model(folder, 4).named_parameters()
    for name, parameter in parameters.items():
        if name.endswith(".bias") and name.replace(".bias", ".weight") in parameters:
            weight = parameters[name.replace(".bias", ".weight")]
            if parameter.cut is not None:
                assert [parameter.cut.indices(r).tolist() for r in range(4)] == [
                    weight.cut.indices(r).tolist() for r in range(4)
                ]
            else:
                assert weight.cut is None or weight.cut.axis == 1
