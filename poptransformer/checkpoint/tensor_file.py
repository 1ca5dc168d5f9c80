"""What files of tensors share: names, shapes and dtypes when opened, then tensors read one at a time, wherever they lie.

Tensors are read with ``preadv`` into arrays of our own instead of being handed out as views of a mapped file: pages of
a mapping count as this process's memory until they are given back one by one, and a file that shrinks under a mapping
kills the process, where a short read is an error with a name. (`map` is for files that this project wrote, whole and to stay.)
Measured on 471 MB of float32: the safetensors library's
NumPy reader peaks at 972 MB of RSS (copies and mapping together) and takes 0.26 s; this one peaks at 503 MB and takes
0.15 s, or 0.4 s with a transposition.
"""

import dataclasses
import math
import mmap
import os
import pathlib
import weakref

import ml_dtypes
import numpy as np

from poptransformer.errors import UnsupportedError, UserError

# XLA on the CPU takes a NumPy array without copying it if it starts at such an address.
ALIGNMENT_BYTES = 64
# What is read, cast and put in place in one go: small enough for the second-level cache.
BLOCK_BYTES = 1 << 20
# Rows of the file in one block of a transposition: each makes 64 contiguous values in the result.
TRANSPOSE_ROWS = 64
# Skipping this many bytes between two runs costs about as much as a call to preadv.
MIN_SKIP_BYTES = 16 << 10

# Casts that overflow without a floating-point flag, those of ml_dtypes: (stored, wanted) -> bits of the wanted infinity.
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SILENT_CASTS = {
    (_BFLOAT16, np.dtype(np.float16)): 0x7C00,
    (np.dtype(np.float32), _BFLOAT16): 0x7F80,
    (np.dtype(np.float64), _BFLOAT16): 0x7F80,
}

MAX_AXES = 64  # NumPy's limit
MAX_TENSOR_BYTES = 1 << 62  # beyond it NumPy's own sizes overflow


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in its file, and how.

    Attributes:
      shape: its shape.
      dtype: NumPy's, or None where it has none for it.
      stored_dtype: its name: NumPy's, or the file's own where NumPy has none.
      begin: where its first element starts, in bytes from the start of the file.
      num_bytes: what it takes of the file.
      strides: steps between elements along each axis, counted in elements; None for rows that follow one another (C order).
    """

    shape: tuple[int, ...]
    dtype: np.dtype | None
    stored_dtype: str
    begin: int
    num_bytes: int
    strides: tuple[int, ...] | None = None


class TensorFile:
    """One open file; safe to read from several threads. A format is a subclass that says where the tensors lie.

    Attributes:
      path: the file's.
      readable: names of the dtypes that the format and NumPy share, as the format calls them.
      config: what the file itself says about the model, in the form of a config.json; None for formats that say nothing.
    """

    readable = ()
    config = None

    def __init__(self, path):
        """Open a file and check what it says about its tensors against its size.

        Raises: UserError, naming the file, if it is missing, truncated or not sound.
        """
        self.path = pathlib.Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise UserError(f"{self.path}: cannot be opened ({error.strerror})") from error
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            self._size = os.fstat(self._fd).st_size
            if os.pread(self._fd, 8, 0) == b"version ":
                raise UserError(f"{self.path}: is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            self._mapping = None
            self._entries = self._read_entries()
            for name, entry in self._entries.items():
                if len(entry.shape) > MAX_AXES or math.prod(max(size, 1) for size in entry.shape) > MAX_TENSOR_BYTES // 8:
                    raise UserError(f"{self._where(name)}: no array has the shape {_shortened(entry.shape)}")
        except OSError as error:
            self.close()
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from error
        except BaseException:
            self.close()
            raise

    def _read_entries(self):
        """Return a dict of name -> TensorEntry in the file's order. Raises: UserError, naming the file, if it is not sound."""
        raise NotImplementedError

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Close the file; arrays that were read stay."""
        self._close()

    def check_weights(self):
        """Raises: UnsupportedError if the format wants all of a file's tensors to be readable, and some are not."""

    def names(self):
        """Return the names of the tensors, in the file's order."""
        return list(self._entries)

    def shape(self, name):
        """Return a tensor's shape as a tuple."""
        return self._entries[name].shape

    def dtype(self, name):
        """Return a tensor's NumPy dtype. Raises: UnsupportedError if NumPy has none for it."""
        entry = self._entries[name]
        if entry.dtype is None:
            raise UnsupportedError(
                f"{self._where(name)}: no reader for dtype {entry.stored_dtype} (has {', '.join(self.readable)})"
            )
        return entry.dtype

    def stored_dtype(self, name):
        """Return the name of a tensor's dtype: NumPy's, or the file's where there is no reader."""
        return self._entries[name].stored_dtype

    def num_bytes(self, name):
        """Return how many bytes of the file a tensor takes."""
        return self._entries[name].num_bytes

    def read_packed(self, name, packing, transpose=False, cut=None, rank=0):
        """Read a matrix, or a tensor-parallel rank's part of it, that the file holds in codes as packed weights have them,
        without quantising anew.

        Args:
          packing: the Packing that is wanted, of the whole matrix; its shape is the matrix's, after transposition.
          transpose: as for read.
          cut: how ranks share the matrix; None takes all of it.
          rank: whose part.
        Returns: uint8 of packing.shape, or of a rank's part; None if the file holds this matrix in another way, or the cut
          goes through a group.
        """
        return None

    def map(self, name):
        """Return a tensor where it lies in a mapping of the file, without reading it; a copy if it does not begin at a multiple
        of 64 bytes there.

        Its pages are read when they are used, once for all processes, and the system may drop and read them again. The file
        must stay as it is: if another program makes it shorter, using the array ends the process.

        Returns: C-contiguous array that cannot be written to, or a new one.
        Raises: UserError if the file has become shorter; UnsupportedError if NumPy has no such dtype.
        """
        entry, dtype = self._entries[name], self.dtype(name)
        if entry.begin % ALIGNMENT_BYTES or entry.strides is not None or not entry.num_bytes:
            return self.read(name)
        if os.fstat(self._fd).st_size < self._size:
            raise UserError(f"{self.path}: has become shorter since it was opened; save or fetch it again")
        if self._mapping is None:
            self._mapping = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        values = np.frombuffer(self._mapping, np.uint8, entry.num_bytes, entry.begin)
        return values.view(dtype).reshape(entry.shape)

    def read(self, name, dtype=None, transpose=False, index=None):
        """Read a tensor, or a part of it, into a new array that starts at a multiple of 64 bytes.

        Cast and transposition happen block by block: beside the result only about 1 MB is held.

        Args:
          name: one of names().
          dtype: NumPy dtype of the result; None keeps the file's.
          transpose: True swaps the axes of a matrix (after index has been taken).
          index: tuple of slices with step 1, one for each leading axis, in the file's own layout; None takes all.
        Returns: C-contiguous array.
        Raises: UserError if the file has become shorter, or a value is out of the dtype's range;
          UnsupportedError if integers are asked for as floats, or floats as integers.
        """
        entry = self._entries[name]
        stored = self.dtype(name)
        dtype = stored if dtype is None else np.dtype(dtype)
        if dtype.kind in "iub" and stored.kind not in "iub":
            raise UnsupportedError(f"{self._where(name)}: {stored} is not read as {dtype}; ask for a float dtype")
        if stored.kind in "iub" and dtype.kind not in "iub":
            raise UnsupportedError(
                f"{self._where(name)}: stored as {stored}: a quantised checkpoint; this version reads float32, float16 and "
                "bfloat16"
            )
        if transpose and len(entry.shape) != 2:
            raise UserError(f"{self._where(name)}: only a matrix can be transposed, and the shape is {entry.shape}")
        bounds = self._bounds(name, entry.shape, index)
        shape = tuple(stop - start for start, stop in bounds)
        result = aligned_empty(shape[::-1] if transpose else shape, dtype)
        try:
            with np.errstate(over="raise"):
                self._fill(name, entry, stored, bounds, result.T if transpose else result)
        except _OutOfRange as error:
            raise UserError(f"{self._where(name)}: has {stored} values beyond the range of {dtype}; {error.remedy}") from None
        return result

    def _where(self, name):
        return f"{self.path}: {name}"

    def _bounds(self, name, shape, index):
        """Return (start, stop) for each axis."""
        index = () if index is None else index
        if len(index) > len(shape):
            raise UserError(f"{self._where(name)}: {len(index)} slices for shape {shape}")
        bounds = [(0, size) for size in shape]
        for axis, part in enumerate(index):
            start, stop, step = part.indices(shape[axis])
            if step != 1:
                raise UserError(f"{self._where(name)}: slices have step 1, not {step}")
            bounds[axis] = (start, max(start, stop))
        return bounds

    def _fill(self, name, entry, stored, bounds, target):
        """Read the values within bounds into target, which has their shape and any strides."""
        if target.size == 0:
            return
        if entry.strides is not None:
            self._fill_strided(name, entry, stored, bounds, target)
            return
        # Trailing axes that are taken whole make one run of the file with the last axis that is not.
        cut = len(bounds)
        while cut and bounds[cut - 1] == (0, entry.shape[cut - 1]):
            cut -= 1
        if target.flags.c_contiguous and cut <= 1:
            first = bounds[0][0] * math.prod(entry.shape[1:]) if bounds else 0
            self._fill_flat(name, entry.begin + first * stored.itemsize, stored, target.reshape(-1))
            return
        rows, columns = entry.shape[0], math.prod(entry.shape[1:])
        if len(bounds) > 2 and cut > 2:  # a part of the third axis or later: matrix by matrix
            for row in range(*bounds[0]):
                begin = entry.begin + row * columns * stored.itemsize
                part = dataclasses.replace(entry, shape=entry.shape[1:], begin=begin, num_bytes=columns * stored.itemsize)
                self._fill(name, part, stored, bounds[1:], target[row - bounds[0][0]])
            return
        inner = math.prod(entry.shape[2:])
        taken = (bounds[1][0] * inner, bounds[1][1] * inner)
        self._fill_matrix(name, entry.begin, stored, (rows, columns), bounds[0], taken, target.reshape(target.shape[0], -1))

    def _fill_flat(self, name, begin, stored, target):
        """Read consecutive values into a contiguous one-dimensional array."""
        if target.dtype == stored:
            self._pread(name, target.view(np.uint8), begin)
            return
        block = np.empty(min(target.size, BLOCK_BYTES // stored.itemsize), stored)
        for start in range(0, target.size, block.size):
            values = block[: target.size - start]
            self._pread(name, values.view(np.uint8), begin + start * stored.itemsize)
            _cast(target[start : start + values.size], values)

    def _fill_matrix(self, name, begin, stored, shape, rows, columns, target):
        """Read rows and columns, each a (start, stop), of a matrix of that shape into target, strided as it may be."""
        width = columns[1] - columns[0]
        is_transposed = not target.flags.c_contiguous
        if is_transposed:
            # Many rows in a block, so that whole cache lines are written; wide ones are cut by columns as well.
            tile = BLOCK_BYTES // (TRANSPOSE_ROWS * stored.itemsize)
            if width > 2 * tile:
                for start in range(columns[0], columns[1], tile):
                    part = (start, min(start + tile, columns[1]))
                    into = target[:, part[0] - columns[0] : part[1] - columns[0]]
                    self._fill_matrix(name, begin, stored, shape, rows, part, into)
                return
        skip_bytes = (shape[1] - width) * stored.itemsize
        is_whole = skip_bytes <= MIN_SKIP_BYTES  # then the columns between two runs are read and dropped
        read_width = shape[1] if is_whole else width
        read_from = 0 if is_whole else columns[0]
        height = max(1, BLOCK_BYTES // (read_width * stored.itemsize))
        if is_transposed:
            height = max(height, TRANSPOSE_ROWS)
        height = min(height, rows[1] - rows[0])
        block = np.empty((height, read_width), stored)
        for start in range(rows[0], rows[1], height):
            count = min(height, rows[1] - start)
            values = block[:count]
            at = begin + (start * shape[1] + read_from) * stored.itemsize
            if is_whole:
                self._pread(name, values.reshape(-1).view(np.uint8), at)
                values = values[:, columns[0] : columns[1]]
            else:
                for row in range(count):
                    self._pread(name, values[row].view(np.uint8), at + row * shape[1] * stored.itemsize)
            place(target[start - rows[0] : start - rows[0] + count], values)

    def _fill_strided(self, name, entry, stored, bounds, target):
        """Like _fill, for a tensor that has strides."""
        order = sorted(range(len(bounds)), key=lambda axis: entry.strides[axis], reverse=True)
        shape, strides, bounds = ([values[axis] for axis in order] for values in (entry.shape, entry.strides, bounds))
        target = target.transpose(order)
        if len(shape) == 2 and strides == [shape[1], 1]:  # a matrix that was transposed
            self._fill(name, dataclasses.replace(entry, shape=tuple(shape), strides=None), stored, bounds, target)
            return
        skipped = sum(start * stride for (start, _), stride in zip(bounds, strides, strict=True))
        self._fill_pieces(name, entry.begin + skipped * stored.itemsize, stored, strides, target)

    def _fill_pieces(self, name, begin, stored, strides, target):
        """Read a target whose axes go from the widest stride to the narrowest, in pieces of about a block."""
        block = BLOCK_BYTES // stored.itemsize
        spans = [(size - 1) * stride for size, stride in zip(target.shape, strides, strict=True)]
        span = 1 + sum(spans)  # elements from the first to the last
        if span <= block:
            values = np.empty(span, stored)
            self._pread(name, values.view(np.uint8), begin)
            strides = [stride * stored.itemsize for stride in strides]
            _cast(target, np.lib.stride_tricks.as_strided(values, target.shape, strides, writeable=False))
            return
        inner = span - spans[0]
        if inner > block:
            for row in range(target.shape[0]):
                self._fill_pieces(name, begin + row * strides[0] * stored.itemsize, stored, strides[1:], target[row])
            return
        count = (block - inner) // strides[0] + 1
        for row in range(0, target.shape[0], count):
            at = begin + row * strides[0] * stored.itemsize
            self._fill_pieces(name, at, stored, strides, target[row : row + count])

    def _pread(self, name, buffer, offset):
        """Fill a byte buffer from an offset into the file."""
        view = memoryview(buffer)
        while view:
            count = os.preadv(self._fd, [view], offset)
            if count == 0:
                raise UserError(
                    f"{self._where(name)}: the file ends at byte {offset}, {len(view)} bytes too early; "
                    "it has shrunk since it was opened"
                )
            view = view[count:]
            offset += count


def aligned_empty(shape, dtype):
    """Return an uninitialised C-contiguous array that starts at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
    shift = -buffer.ctypes.data % ALIGNMENT_BYTES
    return buffer[shift : shift + num_bytes].view(dtype).reshape(shape)


class _OutOfRange(Exception):
    """A finite value that the wanted dtype makes infinite."""

    def __init__(self, value):
        super().__init__(value)
        if abs(value) <= float(ml_dtypes.finfo(ml_dtypes.bfloat16).max):
            self.remedy = "set precision: bf16 or fp32"
        elif abs(value) <= float(np.finfo(np.float32).max):
            self.remedy = "set precision: fp32"
        else:
            self.remedy = f"{value:g} fits in no precision"


def _cast(target, values):
    """Copy a block, casting if the dtypes differ. Raises: _OutOfRange if a finite value becomes infinite."""
    try:
        np.copyto(target, values, casting="unsafe")
    except FloatingPointError:
        pass  # NumPy's own casts, under errstate(over="raise")
    else:
        # Looking at the bits takes a seventh of the time of the cast from float32 to bfloat16, np.isinf more than all of it.
        infinity = _SILENT_CASTS.get((values.dtype, target.dtype))
        if infinity is None or not ((target.view(np.uint16) & 0x7FFF) == infinity).any():
            return
    with np.errstate(over="ignore"):
        np.copyto(target, values, casting="unsafe")
        at = np.isinf(target) & np.isfinite(values)
    if at.any():
        raise _OutOfRange(max(values[at].astype(np.float64).tolist(), key=abs))


def place(target, values):
    """Copy a block of rows, casting if the dtypes differ; a transposed target is filled in tiles."""
    if target.strides[0] >= target.strides[1]:
        _cast(target, values)
        return
    if target.dtype != values.dtype:
        contiguous = np.empty(values.shape, target.dtype)  # NumPy's strided casts are several times slower than both steps
        _cast(contiguous, values)
        values = contiguous
    for row in range(0, len(values), TRANSPOSE_ROWS):
        rows = slice(row, row + TRANSPOSE_ROWS)
        np.copyto(target[rows].T, values[rows].T)


def _shortened(shape):
    text = str(shape[:8])[:-1]
    return f"{text}, ...) with {len(shape)} axes" if len(shape) > 8 else f"{text})"
