"""The head of a GGUF file: metadata (keys with values) and where the tensors lie.

Layout, little-endian: "GGUF", version, number of tensors, number of keys; for each key its name, type and value; for each
tensor its name, sizes (the fastest axis first), type and offset; then, aligned, the data. Strings have 8 bytes of length
in front.

Read by this module and not by the gguf package's GGUFReader, which makes NumPy views of every string and number: for
SmolLM2-135M (49,152 tokens) that takes 1.6 s and 150 MB, this here 0.03 s and 1 MB; and one wrong count in a damaged file
has it make views until memory ends. What the types are called and how many bytes they take does come from the package.

Source: the GGUF specification in the ggml project, docs/gguf.md.
"""

import dataclasses
import math
import os
import pathlib
import reprlib
import struct

import numpy as np

from poptransformer.errors import UnsupportedError, UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_AXES = 4
MAX_NAME_BYTES = 65535  # of a key, as the format says
MAX_SHOWN = 80  # characters of a name that a message shows
WINDOW_BYTES = 1 << 20  # read in one go

# Type of a value in the file -> letter of struct and NumPy.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFTensor:
    """What the head says about one tensor.

    Attributes:
      shape: as NumPy has it, the slowest axis first.
      type: the name of how it is stored: "F32", "Q4_K".
      begin, num_bytes: where it lies in the file; None for num_bytes of a type that is not known.
    """

    shape: tuple[int, ...]
    type: str
    begin: int
    num_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """Where a value lies: of a string its bytes, of an array its elements."""

    type: int
    item_type: int | None
    count: int
    begin: int
    end: int


class GGUFHeader:
    """Metadata and tensors of one file. Values stay in the file until they are asked for.

    Attributes:
      path: the file.
      tensors: name -> GGUFTensor, in the file's order.
    """

    def __init__(self, path, fd=None):
        """Read and check the head.

        Args:
          path: the file.
          fd: a descriptor that is open already; None opens the file, for this call and for each value later on.
        Raises: UserError, naming the file, if it is missing, truncated or damaged; UnsupportedError for a version or a byte
          order without a reader.
        """
        self.path = pathlib.Path(path)
        with self._opened(fd) as file:
            walk = _Walk(self.path, file)
            num_tensors, num_values = _read_counts(walk)
            self._values = _read_values(walk, num_values)
            self.tensors = _read_tensors(walk, num_tensors, self.get("general.alignment", int, DEFAULT_ALIGNMENT, file))

    def _opened(self, fd):
        return _Descriptor(self.path, fd)

    def __contains__(self, key):
        return key in self._values

    def keys(self):
        """Return the names of all values."""
        return self._values.keys()

    def get(self, key, kind, default=None, fd=None):
        """Return a value of the metadata.

        Args:
          key: its name, such as "general.architecture".
          kind: what it must be: str, int, float or bool, list for an array (of whatever the file has there), or None for
            anything. Whole numbers pass as float.
          default: what stands for a key that is not there.
        Raises: UserError, naming file and key, if it is something else or no valid text.
        """
        value = self._values.get(key)
        if value is None:
            return default
        if value.type == ARRAY and kind not in (list, None):
            raise self._wrong(key, kind, f"an array of {value.count}")
        held = self._read(key, value, fd)
        if kind is float and type(held) is int:
            held = float(held)
        if kind is not None and type(held) is not kind:
            raise self._wrong(key, kind, reprlib.repr(held))
        return held

    def item_kind(self, key):
        """Return what an array holds: str, int, float or bool; None if there is no such array."""
        value = self._values.get(key)
        if value is None or value.type != ARRAY:
            return None
        return str if value.item_type == STRING else {"f": float, "d": float, "?": bool}.get(SCALARS[value.item_type], int)

    def _wrong(self, key, kind, what):
        wanted = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "an array"}[kind]
        return UserError(f"{self.path}: metadata: {key} is {what}; {wanted} is wanted")

    def _read(self, key, value, fd):
        with self._opened(fd) as file:
            data = _pread(self.path, file, value.end - value.begin, value.begin)
        if value.type == STRING:
            return self._text(key, data)
        if value.type != ARRAY:
            return struct.unpack("<" + SCALARS[value.type], data)[0]
        if value.item_type != STRING:
            return np.frombuffer(data, np.dtype(SCALARS[value.item_type]).newbyteorder("<")).tolist()
        texts, at, unpack = [], 0, struct.Struct("<Q").unpack_from
        for _ in range(value.count):
            end = at + 8 + unpack(data, at)[0]
            texts.append(self._text(key, data[at + 8 : end]))
            at = end
        return texts

    def _text(self, key, data):
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: metadata: {key}: {reprlib.repr(data)} is not valid UTF-8; is it damaged?") from None


class _Descriptor:
    """A file's descriptor: one that is open already, or its own for the time of a with block."""

    def __init__(self, path, fd):
        self._path, self._fd, self._is_own = path, fd, fd is None

    def __enter__(self):
        if self._is_own:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                raise UserError(f"{self._path}: cannot be opened ({error.strerror})") from error
        return self._fd

    def __exit__(self, *_):
        if self._is_own:
            os.close(self._fd)


def _pread(path, fd, count, offset):
    try:
        data = os.pread(fd, count, offset)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) < count:
        raise UserError(f"{path}: the file ends at byte {offset + len(data)}, {count - len(data)} bytes too early")
    return data


class _Walk:
    """Goes through the head from front to back, with a window of it in memory.

    Attributes:
      at: the next byte, from the start of the file.
      what: what is read right now, for messages.
    """

    def __init__(self, path, fd):
        self.path, self._fd = path, fd
        self.at, self.what = 0, "the head"
        self.size = os.fstat(fd).st_size
        self._window, self._begin = b"", 0

    def error(self, problem):
        return UserError(f"{self.path}: damaged GGUF file: {self.what} {problem}")

    def skip(self, count):
        """Step over bytes and return where they begin; they must be there."""
        begin = self.at
        if count > self.size - begin:
            raise UserError(
                f"{self.path}: truncated or damaged GGUF file: {self.what} ends beyond byte {self.size}, where the file ends"
            )
        self.at += count
        return begin

    def take(self, count):
        begin = self.skip(count)
        start = begin - self._begin
        if start < 0 or start + count > len(self._window):
            self._window = _pread(self.path, self._fd, min(max(count, WINDOW_BYTES), self.size - begin), begin)
            self._begin, start = begin, 0
        return self._window[start : start + count]

    def number(self, letter):
        return struct.unpack("<" + letter, self.take(struct.calcsize(letter)))[0]

    def name(self):
        length = self.number("Q")
        if not 0 < length <= MAX_NAME_BYTES:
            raise self.error(f"has a name of {length} bytes")
        data = bytes(self.take(length))
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = ""
        if not name.isprintable() or not name:
            raise self.error(f"has the name {reprlib.repr(data)}, which is no text")
        self.what += f" ({name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + '...'})"
        return name

    def skip_strings(self, count):
        if count * 8 > self.size - self.at:
            self.skip(count * 8)  # says so
        unpack = struct.Struct("<Q").unpack_from
        while count:
            self.take(8)
            self.at -= 8
            # Within the window without a call for each string: there are hundreds of thousands.
            window, at, last = self._window, self.at - self._begin, len(self._window) - 8
            while count and at <= last:
                at += 8 + unpack(window, at)[0]
                count -= 1
            self.skip(self._begin + at - self.at)


def _read_counts(walk):
    """Check magic and version; return how many tensors and values there are."""
    path = walk.path
    magic = walk.take(min(4, walk.size))
    if magic != MAGIC:
        if magic == MAGIC[::-1]:
            raise UnsupportedError(f"{path}: a big-endian GGUF file; convert it to little-endian (gguf-convert-endian)")
        if MAGIC.startswith(magic):
            raise UserError(f"{path}: truncated: {walk.size} bytes, but a GGUF file starts with a head of 24")
        raise UserError(f"{path}: not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
    version = walk.number("I")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedError(f"{path}: a big-endian GGUF file; convert it to little-endian (gguf-convert-endian)")
    if version not in VERSIONS:
        raise UnsupportedError(
            f"{path}: GGUF version {version} has no reader ({' and '.join(map(str, VERSIONS))} have); convert the model anew"
        )
    return walk.number("Q"), walk.number("Q")


def _read_values(walk, count):
    values = {}
    for index in range(count):
        walk.what = f"key {index + 1} of {count}"
        key = walk.name()
        if key in values:
            raise walk.error("is there twice")
        kind = walk.number("I")
        if kind in SCALARS:
            length = struct.calcsize(SCALARS[kind])
            values[key] = _Value(kind, None, 1, walk.skip(length), walk.at)
        elif kind == STRING:
            length = walk.number("Q")
            values[key] = _Value(kind, None, 1, walk.skip(length), walk.at)
        elif kind == ARRAY:
            item, length = walk.number("I"), walk.number("Q")
            begin = walk.at
            if item == STRING:
                walk.skip_strings(length)
            elif item in SCALARS:
                walk.skip(length * struct.calcsize(SCALARS[item]))
            else:
                raise walk.error(f"is an array of type {item}; texts and numbers are known")
            values[key] = _Value(kind, item, length, begin, walk.at)
        else:
            raise walk.error(f"has type {kind}; 0 to 12 are known")
    return values


def _read_tensors(walk, count, alignment):
    """Return name -> GGUFTensor, all of them within the file."""
    if alignment < 1 or alignment & (alignment - 1):
        raise UserError(f"{walk.path}: general.alignment={alignment} is not a power of two; is the file damaged?")
    found = {}
    for index in range(count):
        walk.what = f"tensor {index + 1} of {count}"
        name = walk.name()
        if name in found:
            raise walk.error("is there twice")
        num_axes = walk.number("I")
        if not 1 <= num_axes <= MAX_AXES:
            raise walk.error(f"has {num_axes} axes; there are 1 to {MAX_AXES}")
        shape = tuple(walk.number("Q") for _ in range(num_axes))[::-1]
        found[name] = shape, walk.number("I"), walk.number("Q")

    data_start = walk.at + -walk.at % alignment
    tensors = {name: _tensor(walk, name, *fields, data_start, alignment) for name, fields in found.items()}
    end, previous = data_start, None
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
        if tensor.begin < end:
            raise UserError(f"{walk.path}: damaged GGUF file: tensor {name} overlaps {previous}")
        end, previous = tensor.begin + (tensor.num_bytes or 0), name
    if end > walk.size:
        raise UserError(f"{walk.path}: truncated: its head describes {end} bytes, the file has {walk.size}; fetch it again")
    return tensors


def _tensor(walk, name, shape, type_number, offset, data_start, alignment):
    walk.what = f"tensor {name}"
    if offset % alignment:
        raise walk.error(f"is at byte {offset} of the data, not at a multiple of {alignment}")
    if math.prod(shape) > 1 << 62 or 0 in shape:
        raise walk.error(f"has the shape {shape}")
    kinds = storage_types()
    if type_number not in kinds:
        return GGUFTensor(shape, f"type {type_number}", data_start + offset, None)
    kind, block_size, block_bytes = kinds[type_number]
    if shape[-1] % block_size:
        raise walk.error(f"has rows of {shape[-1]} values, which {kind} cannot hold: it takes {block_size} at a time")
    return GGUFTensor(shape, kind, data_start + offset, math.prod(shape) // block_size * block_bytes)


def storage_types():
    """Return number -> (name, values in a block, bytes of a block) of the types that the gguf package knows."""
    constants = gguf_module("constants")
    return {int(kind): (kind.name, *sizes) for kind, sizes in constants.GGML_QUANT_SIZES.items()}


def gguf_module(name):
    """Import a module of the gguf package (0.1 s). Raises: UserError if it is not installed."""
    import importlib

    try:
        return importlib.import_module(f"gguf.{name}")
    except ImportError as error:
        raise UserError(f"GGUF files need the gguf package ({error}); install it: pip install gguf") from error
