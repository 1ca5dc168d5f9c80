"""GGUF files: one file with configuration, tokenizer and weights, mostly quantised.

Weights appear under Hugging Face's names, in its shapes and its order of rows. Quantised ones are turned into float32 block
by block as they are read, by the gguf package's NumPy code, and cast at once to the dtype that is wanted: the quantised
file takes no memory of its own beside the result.
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np

from poptransformer.checkpoint.gguf_codes import CODE_TYPES, GROUP_SIZE, split_blocks
from poptransformer.checkpoint.gguf_config import check_architecture, read_config
from poptransformer.checkpoint.gguf_header import GGUFHeader, gguf_module
from poptransformer.checkpoint.gguf_tensors import ROPE_FACTORS, place_of, stored_rows
from poptransformer.checkpoint.tensor_file import MIN_SKIP_BYTES, TRANSPOSE_ROWS, TensorEntry, TensorFile, place
from poptransformer.errors import UnsupportedError, UserError
from poptransformer.packing import BLOCK_ROWS

FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Values dequantised in one go. Their float32 and what NumPy holds on the way stay in the second-level cache: 64k make 230 to
# 1000 million values a second on one core, as the type is.
BLOCK_VALUES = 64 << 10

SHOWN = 3  # names of each type that a message lists


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFEntry(TensorEntry):
    """A tensor of a GGUF file.

    Attributes:
      type: how it is stored: "F32", "Q4_K".
      num_heads: the heads that its rows belong to, where a file of architecture "llama" has the rows of each in an order of
        its own; else None.
    """

    type: str = "F32"
    num_heads: int | None = None


class GGUFFile(TensorFile):
    """A GGUF file.

    Attributes:
      header: its GGUFHeader, with all metadata.
    """

    readable = (*FLOATS, *QUANTISED)

    def _read_entries(self):
        self.header = GGUFHeader(self.path, self._fd)
        architecture = check_architecture(self.header)
        num_heads, num_kv_heads = (
            self._num_heads(f"{architecture}.attention.{key}") for key in ("head_count", "head_count_kv")
        )
        entries = {}
        for name, tensor in self.header.tensors.items():
            if name == ROPE_FACTORS:
                continue
            held = place_of(architecture, name, num_heads, num_kv_heads or num_heads)
            if held.name in entries:
                raise UserError(f"{self.path}: has {held.name} twice, once as {name}")
            entries[held.name] = self._entry(name, tensor, held)
        return entries

    def _num_heads(self, key):
        """A count of heads; a file that has one for each layer is refused when its configuration is read."""
        count = self.header.get(key, int) if self.header.item_kind(key) is None else None
        if count is not None and count < 1:
            raise UserError(f"{self.path}: metadata: {key} is {count}; at least 1 is wanted")
        return count

    def _entry(self, name, tensor, held):
        num_heads = held.num_heads
        if num_heads and tensor.shape[0] % (2 * num_heads):
            raise UserError(
                f"{self.path}: {name} has {tensor.shape[0]} rows, which do not make {num_heads} heads of an even size; "
                "is the metadata of another model?"
            )
        dtype = FLOATS.get(tensor.type, np.dtype(np.float32) if tensor.type in QUANTISED else None)
        shape, strides = tensor.shape, None
        if held.is_transposed and len(shape) == 2:
            shape, strides = shape[::-1], (1, shape[1])
        return GGUFEntry(
            shape, dtype, tensor.type if dtype is None else str(dtype), tensor.begin, tensor.num_bytes or 0, strides,
            type=tensor.type, num_heads=num_heads,
        )  # fmt: skip

    def check_weights(self):
        """Raises: UnsupportedError that names every type without a reader, if the file has weights of such types."""
        refused = {}
        for name, entry in self._entries.items():
            if entry.dtype is None:
                refused.setdefault(entry.type, []).append(name)
        if refused:
            listed = "; ".join(
                f"{kind}: {', '.join(names[:SHOWN])}" + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
                for kind, names in refused.items()
            )
            raise UnsupportedError(
                f"{self.path}: has weights in types without a reader ({listed}); {', '.join(self.readable)} have one: fetch "
                "the model in one of those, or make it with llama-quantize"
            )

    @functools.cached_property
    def config(self):
        """What config.json would say. Raises: as read_config."""
        factors = None
        if ROPE_FACTORS in self.header.tensors:
            tensor = self.header.tensors[ROPE_FACTORS]
            if tensor.type != "F32" or len(tensor.shape) != 1:
                raise UserError(f"{self.path}: {ROPE_FACTORS} is {tensor.type} of shape {tensor.shape}; a row of F32 is wanted")
            values = np.empty(tensor.shape, np.float32)
            self._pread(ROPE_FACTORS, values.view(np.uint8), tensor.begin)
            factors = values.tolist()
        return read_config(self.header, factors)

    # ---- reading

    def read_packed(self, name, packing, transpose=False, cut=None, rank=0):
        """As TensorFile.read_packed: for Q8_0 as int8, Q4_0 and Q4_1 as int4, all in groups of 32."""
        entry = self._entries[name]
        kind, block_bytes = CODE_TYPES.get(entry.type, (None, None))
        if (kind, GROUP_SIZE) != (packing.kind, packing.group_size) or transpose != (entry.strides is not None):
            return None
        if cut is not None and not packing.can_take(cut):
            return None
        num_rows, num_groups = packing.out_features, packing.in_features // GROUP_SIZE
        all_rows, groups = np.arange(num_rows), np.arange(num_groups)
        if cut is not None and cut.axis == 0:
            all_rows = cut.indices(rank)
        elif cut is not None:
            groups = cut.indices(rank)[::GROUP_SIZE] // GROUP_SIZE
        local = dataclasses.replace(packing, out_features=len(all_rows), in_features=len(groups) * GROUP_SIZE)
        packed = np.empty(local.shape, np.uint8)
        height = BLOCK_VALUES // packing.in_features // BLOCK_ROWS * BLOCK_ROWS or BLOCK_ROWS
        for start in range(0, len(all_rows), height):
            rows = all_rows[start : start + height]
            is_there = rows >= 0
            stored = rows[is_there] if entry.num_heads is None else stored_rows(rows[is_there], num_rows, entry.num_heads)
            data = np.zeros((len(rows), len(groups), block_bytes), np.uint8)  # zeros stand for zeros, what fills a rank up
            if len(stored):
                data[is_there] = self._read_blocks(name, entry, (num_rows, num_groups, block_bytes), stored, groups)
            blocks = slice(start // BLOCK_ROWS, -(-(start + len(rows)) // BLOCK_ROWS))
            local.assemble(*split_blocks(data.reshape(len(rows), -1), entry.type), out=packed[blocks])
        return packed

    def _read_blocks(self, name, entry, shape, rows, groups):
        """Blocks of bytes of a matrix of that shape, [rows, groups, bytes]; a group that is not there, -1, is zeros."""
        begin, end = int(rows.min()), int(rows.max()) + 1
        result = np.zeros((len(rows), len(groups), shape[2]), np.uint8)
        there = groups >= 0
        if not there.any():
            return result
        first, last = int(groups[there].min()), int(groups[there].max()) + 1
        if (shape[1] - (last - first)) * shape[2] <= MIN_SKIP_BYTES:  # then the columns between two runs are read and dropped
            data = np.empty((end - begin, *shape[1:]), np.uint8)
            self._pread(name, data.reshape(-1), entry.begin + begin * shape[1] * shape[2])
            data = data[rows - begin, first:last]
        else:
            data = np.empty((len(rows), last - first, shape[2]), np.uint8)
            for row, place in zip(data, rows.tolist(), strict=True):
                self._pread(name, row.reshape(-1), entry.begin + (place * shape[1] + first) * shape[2])
        result[:, there] = data[:, groups[there] - first]
        return result

    def _fill(self, name, entry, stored, bounds, target):
        if target.size == 0:
            return
        if entry.type in FLOATS and entry.num_heads is None:
            super()._fill(name, entry, stored, bounds, target)
            return
        if entry.strides is not None:
            bounds, target = bounds[::-1], target.T
        shape = entry.shape if entry.strides is None else entry.shape[::-1]
        if len(shape) > 2:
            raise UnsupportedError(
                f"{self._where(name)}: {entry.type} of shape {shape} has no reader; vectors and matrices have"
            )
        if len(shape) == 1:
            if entry.num_heads is not None:  # a bias: a matrix with rows of one value
                shape, bounds, target = (*shape, 1), [*bounds, (0, 1)], target[:, None]
            else:
                shape, bounds, target = (1, *shape), [(0, 1), *bounds], target[None]
        self._fill_rows(name, entry, shape, bounds, target)

    def _fill_rows(self, name, entry, shape, bounds, target):
        """Read rows and columns of a matrix of that shape in the file, block by block, into target, strided as it may be."""
        (first, last), columns = bounds[0], slice(*bounds[1])
        height = max(1, BLOCK_VALUES // shape[1])
        if not target.flags.c_contiguous:
            height = max(height, TRANSPOSE_ROWS)  # so that whole cache lines are written
        row_bytes = entry.num_bytes // shape[0]
        for start in range(first, last, height):
            rows = np.arange(start, min(start + height, last))
            if entry.num_heads is not None:
                rows = stored_rows(rows, shape[0], entry.num_heads)
            begin, end = int(rows.min()), int(rows.max()) + 1
            data = np.empty((end - begin, row_bytes), np.uint8)
            self._pread(name, data.reshape(-1), entry.begin + begin * row_bytes)
            values = _dequantise(data, entry.type)
            if entry.num_heads is not None:
                values = values[rows - begin]
            place(target[start - first : start - first + len(rows)], values[:, columns])


def _dequantise(data, kind):
    """Turn rows of bytes, [rows, bytes of a row], into values, [rows, values of a row]."""
    if kind in FLOATS:
        return data.view(FLOATS[kind])
    quants = getattr(gguf_module("quants"), kind)
    with np.errstate(all="ignore"):  # a scale that is no number gives values that are none, as it should
        values = quants.dequantize_blocks(data.reshape(-1, quants.type_size))
    return values.reshape(len(data), -1)
