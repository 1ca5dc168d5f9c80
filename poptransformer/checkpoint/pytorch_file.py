"""One file of torch.save: a pickle that says where each tensor lies, then tensors read one at a time; torch is not needed.

Layouts:
  zip (torch 1.6 and later): ``<archive>/data.pkl``, the pickle, and ``<archive>/data/<key>``, one member for each storage,
    uncompressed, so that a tensor's bytes are at a known place of the file;
  legacy: five pickles (a magic number, a version, a description of the machine, the values, the keys of the storages), then
    each storage as its length (int64, elements) and its elements, in the order of the keys.
In both a tensor is a call of ``torch._utils._rebuild_tensor_v2`` with a storage, which is a persistent id ("storage", type,
key, device, elements), an offset, a shape and strides, these two in elements.

Source: torch/serialization.py and torch/_utils.py, for the names and the order of arguments.
"""

import dataclasses
import io
import logging
import math
import os
import zipfile

import ml_dtypes
import numpy as np

from poptransformer.checkpoint.inert_pickle import MAX_BYTES, Function, Pairs, PickleReader
from poptransformer.checkpoint.tensor_file import MAX_AXES, TensorEntry, TensorFile
from poptransformer.errors import UnsupportedError, UserError

logger = logging.getLogger(__name__)

# Type of a storage -> dtype of its elements. NumPy's complex numbers are no weights, so those have a size only.
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
DTYPES = {
    name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    for name in STORAGES.values()
    if not name.startswith("complex")
}

# Names that other tensors than plain ones need.
UNREAD = {
    "torch._utils _rebuild_tensor_v3": "tensors of a newer dtype, such as float8 or uint16",
    "torch._utils _rebuild_qtensor": "tensors that torch has quantised",
    "torch._utils _rebuild_sparse_tensor": "sparse tensors",
    "torch._utils _rebuild_sparse_csr_tensor": "sparse tensors",
    "torch._utils _rebuild_nested_tensor": "nested tensors",
    "torch._utils _rebuild_meta_tensor_no_storage": "tensors without values",
    "torch._utils _rebuild_wrapper_subclass": "tensors of a class of their own",
    "torch._utils _rebuild_parameter_with_state": "parameters with a state of their own",
    "torch._tensor _rebuild_from_type_v2": "tensors with a state of their own",
    "torch.storage UntypedStorage": "storages without a dtype",
    "torch.storage _load_from_bytes": "tensors that were pickled without torch.save",
}

# Keys under which programs that train keep the weights beside their own state.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")

MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001

MAX_DIRECTORY_BYTES = 16 << 20  # of a zip file's list of members; one takes about 100
MAX_SIZE = 1 << 62  # of one axis, of one offset, of one storage
# A tensor with a stride of 0 may have more elements than its storage; without a limit a few bytes make one of any size.
MAX_REPEATED_BYTES = 64 << 20
MAX_NAME = 500  # characters

_LOCAL_HEADER_BYTES = 30


@dataclasses.dataclass(frozen=True, slots=True)
class _Storage:
    """What a persistent id says: elements of a dtype, kept under a key."""

    dtype_name: str
    key: str
    size: int

    @property
    def itemsize(self):
        return np.dtype(DTYPES.get(self.dtype_name, self.dtype_name)).itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """What stands for a tensor; offset and strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _StorageType:
    dtype_name: str


class PytorchFile(TensorFile):
    """A file of torch.save with a dict of tensors, read as weights only: nothing in it is ever executed."""

    readable = tuple(DTYPES)

    def _read_entries(self):
        head = os.pread(self._fd, 4, 0)
        if head == b"PK\x03\x04":
            value, place = self._read_zip()
        elif head[:1] == b"\x80":
            value, place = self._read_legacy()
        elif self._size == 0:
            raise UserError(f"{self.path}: is empty; fetch it again")
        else:
            raise UserError(f"{self.path}: not a file of torch.save: it starts with {head!r}")
        begin_of, entries = {}, {}
        for name, tensor in self._weights(value).items():
            storage = tensor.storage
            if storage not in begin_of:
                begin_of[storage] = place(storage)
            entries[name] = self._entry(name, tensor, begin_of[storage])
        return entries

    # ---- the zip layout

    def _read_zip(self):
        """Return the pickle's value, and a function that says where a storage starts."""
        try:
            with zipfile.ZipFile(_Directory(self._fd, self._size)) as archive:
                members = archive.infolist()
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        except Exception as error:  # zipfile's own, or struct's, or any that comes of numbers out of range
            raise UserError(f"{self.path}: truncated or damaged: its zip directory cannot be read; fetch it again") from error
        by_name = {member.filename: member for member in members}
        if len(by_name) < len(members):
            raise UserError(f"{self.path}: damaged: a member of its zip directory is there twice")
        roots = [name.removesuffix("data.pkl") for name in by_name if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1:
            raise UserError(f"{self.path}: not a file of torch.save: a zip file with {len(roots)} data.pkl in it")
        root = roots[0]
        if f"{root}constants.pkl" in by_name:
            raise UnsupportedError(f"{self.path}: is a TorchScript program; save its state_dict() with torch.save")
        if (order := by_name.get(f"{root}byteorder")) is not None:
            self._check_byte_order(self._read_member(order, 16).strip().decode("latin-1"))

        def place(storage):
            member = by_name.get(f"{root}data/{storage.key}")
            if member is None:
                raise UserError(f"{self.path}: damaged: it has no data for storage {storage.key[:MAX_NAME]!a}; fetch it again")
            wanted = storage.size * storage.itemsize
            if member.file_size < wanted:
                raise UserError(
                    f"{self.path}: damaged: storage {storage.key[:MAX_NAME]!a} has {member.file_size} bytes, its tensors need "
                    f"{wanted}; fetch it again"
                )
            return self._begin(member)

        pickle = self._read_member(by_name[f"{root}data.pkl"], MAX_BYTES)
        reader = PickleReader(
            self.path, io.BytesIO(pickle), NAMES, lambda reader, value: _load_storage(reader, value, 5), UNREAD
        )
        return reader.read(), place

    def _begin(self, member):
        """Return where in the file the bytes of a zip member start, after checking that they are all there."""
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.compress_size != member.file_size:
            raise UnsupportedError(
                f"{self.path}: {member.filename[:MAX_NAME]!a} is compressed or encrypted, which torch.save does not do; unpack "
                "the zip file and pack it again without compression (zip -0)"
            )
        is_inside = 0 <= member.header_offset < self._size
        header = os.pread(self._fd, _LOCAL_HEADER_BYTES, member.header_offset) if is_inside else b""
        if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
            raise UserError(f"{self.path}: damaged: {member.filename[:MAX_NAME]!a} is not where its zip directory says")
        begin = (
            member.header_offset + _LOCAL_HEADER_BYTES + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        )
        if begin + member.file_size > self._size:
            raise UserError(
                f"{self.path}: truncated: {member.filename[:MAX_NAME]!a} ends at byte {begin + member.file_size}, the file has "
                f"{self._size}; fetch it again"
            )
        return begin

    def _read_member(self, member, limit):
        if member.file_size > limit:
            raise UserError(
                f"{self.path}: {member.filename[:MAX_NAME]!a} has {member.file_size} bytes, more than the {limit} that weights "
                "need there"
            )
        return os.pread(self._fd, member.file_size, self._begin(member))

    def _check_byte_order(self, order):
        if order != "little":
            raise UnsupportedError(
                f"{self.path}: its numbers are stored as {order!a}-endian; only little-endian is read. Load and save it with "
                "torch on a little-endian machine"
            )

    # ---- the legacy layout

    def _read_legacy(self):
        """Return the pickle's value, and a function that says where a storage starts."""
        file, storages = io.BytesIO(os.pread(self._fd, min(self._size, MAX_BYTES), 0)), {}

        def load(reader, value):
            storage = _load_storage(reader, value, 6)
            if storages.setdefault(storage.key, storage) != storage:
                raise reader.damaged("two storages have the same key")
            return storage

        reader = PickleReader(self.path, file, NAMES, load, UNREAD)
        if reader.read() != MAGIC:
            raise UserError(f"{self.path}: not a file of torch.save: a pickle without its magic number")
        version, system = reader.read(), reader.read()
        if version != LEGACY_VERSION or not isinstance(system, Pairs):
            raise UserError(f"{self.path}: not a file of torch.save: its version is not {LEGACY_VERSION}")
        is_little = system.named().get("little_endian")
        self._check_byte_order("little" if is_little is True else "big" if is_little is False else "unknown")
        value, keys = reader.read(), reader.read()
        if type(keys) is not list or not all(type(key) is str and key in storages for key in keys):
            raise reader.damaged("its list of storages is not sound")
        begin_of, at = {}, file.tell()
        for key in keys:
            storage = storages[key]
            size = int.from_bytes(os.pread(self._fd, 8, at), "little")
            begin_of[key] = at + 8
            at += 8 + storage.size * storage.itemsize
            if at > self._size:
                raise UserError(
                    f"{self.path}: truncated: storage {key[:MAX_NAME]!a} ends at byte {at}, the file has {self._size}; "
                    "fetch it again"
                )
            if size != storage.size:
                raise UserError(
                    f"{self.path}: damaged: storage {key[:MAX_NAME]!a} has {size} elements, its tensors need {storage.size}; "
                    "fetch it again"
                )

        def place(storage):
            if storage.key not in begin_of:
                raise UserError(f"{self.path}: damaged: it has no data for storage {storage.key[:MAX_NAME]!a}; fetch it again")
            return begin_of[storage.key]

        return value, place

    # ---- from values to weights

    def _weights(self, value):
        """Return the tensors by name of a dict that was saved, or of the one dict in it that has the weights."""
        if not isinstance(value, Pairs):
            what = "one tensor" if isinstance(value, _Tensor) else f"a {type(value).__name__}"
            raise UserError(f"{self.path}: holds {what}, not a dict of weights; save model.state_dict()")
        values = value.named()
        held = {key: inner.named() for key in WRAPPERS if isinstance(inner := values.get(key), Pairs)}
        held = {key: inner for key, inner in held.items() if any(isinstance(each, _Tensor) for each in inner.values())}
        if len(held) > 1:
            raise UserError(
                f"{self.path}: has weights under {', '.join(held)}, and nothing says which are wanted; save the one alone"
            )
        for key, inner in held.items():
            beside = [name for name, each in values.items() if isinstance(each, _Tensor)]
            logger.info("%s: reading the weights under %r%s", self.path, key, f", not {_listing(beside)}" if beside else "")
            values = inner
        tensors = {name: each for name, each in values.items() if isinstance(each, _Tensor)}
        if not tensors:
            raise UserError(
                f"{self.path}: has no tensors by name; its keys are {_listing(values)}. Save model.state_dict() alone"
            )
        if len(tensors) < len(values):
            left = _listing([name for name in values if name not in tensors])
            logger.debug("%s: ignoring what is no tensor: %s", self.path, left)
        for name in tensors:
            if len(name) > MAX_NAME or not name.isprintable():
                raise UserError(f"{self.path}: damaged: a tensor is called {name[:MAX_NAME]!a}")
        return tensors

    def _entry(self, name, tensor, begin):
        storage, shape, strides = tensor.storage, tensor.shape, tensor.strides
        count, itemsize = math.prod(shape), storage.itemsize
        last = tensor.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if count and last >= storage.size:
            raise UserError(
                f"{self.path}: damaged: {name} reaches to element {last} of a storage that has {storage.size}; fetch it again"
            )
        if count > storage.size and count * itemsize > MAX_REPEATED_BYTES:
            raise UserError(f"{self.path}: {name} repeats {storage.size} elements up to {count}, more than weights do")
        step, is_contiguous = 1, True
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            is_contiguous &= size == 1 or stride == step
            step *= size
        return TensorEntry(
            shape,
            DTYPES.get(storage.dtype_name),
            storage.dtype_name,
            begin + tensor.offset * itemsize,
            count * itemsize,
            None if is_contiguous or not count else strides,
        )


class _Directory(io.RawIOBase):
    """The file as zipfile sees it: whatever it asks for, only so many bytes at a time are read."""

    def __init__(self, fd, size):
        self._fd, self._size, self._at = fd, size, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self._at

    def seek(self, offset, whence=os.SEEK_SET):
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if self._at < 0:
            raise ValueError("before the start of the file")
        return self._at

    def read(self, count=-1):
        left = max(self._size - self._at, 0)
        count = left if count is None or count < 0 else min(count, left)
        if count > MAX_DIRECTORY_BYTES:
            raise UserError(f"its zip directory has {count} bytes, more than the {MAX_DIRECTORY_BYTES} that weights need")
        data = os.pread(self._fd, count, self._at)
        self._at += len(data)
        return data


# ---- what the pickles may mention


def _is_count(value):
    return type(value) is int and 0 <= value < MAX_SIZE


def _are_counts(values):
    return type(values) is tuple and len(values) <= MAX_AXES and all(map(_is_count, values))


def _load_storage(reader, value, num_fields):
    """Return the _Storage of a persistent id; in the legacy layout it has a sixth field, for views, which is None."""
    if (
        type(value) is not tuple
        or len(value) != num_fields
        or value[0] != "storage"
        or any(item is not None for item in value[5:])
    ):
        raise reader.odd("a persistent id that is no storage")
    _, kind, key, _, size = value[:5]
    if not isinstance(kind, _StorageType) or type(key) is not str or not _is_count(size):
        raise reader.odd("a persistent id that is no storage")
    return _Storage(kind.dtype_name, key, size)


def _is_empty(value):
    return value is None or value is False or isinstance(value, Pairs) and not value.pairs


def _rebuild_tensor(reader, arguments):
    """Read (storage, offset, shape, strides)."""
    if len(arguments) != 4:
        raise reader.odd("a tensor of other arguments than torch.save gives")
    storage, offset, shape, strides = arguments
    if (
        not isinstance(storage, _Storage)
        or not _is_count(offset)
        or not _are_counts(shape)
        or not _are_counts(strides)
        or len(shape) != len(strides)
    ):
        raise reader.odd("a tensor of other arguments than torch.save gives")
    return _Tensor(storage, offset, shape, strides)


def _rebuild_tensor_v2(reader, arguments):
    """Read (storage, offset, shape, strides, requires_grad, backward_hooks) and perhaps metadata, such as a conjugation."""
    if not 6 <= len(arguments) <= 7 or not all(map(_is_empty, arguments[5:])):
        raise reader.odd("a tensor with hooks or metadata")
    return _rebuild_tensor(reader, arguments[:4])


def _rebuild_parameter(reader, arguments):
    """Read (tensor, requires_grad, backward_hooks)."""
    if len(arguments) != 3 or not isinstance(arguments[0], _Tensor) or not _is_empty(arguments[2]):
        raise reader.odd("a parameter of other arguments than torch.save gives")
    return arguments[0]


def _make_size(reader, arguments):
    if len(arguments) != 1 or not _are_counts(arguments[0]):
        raise reader.odd("a torch.Size of other arguments than torch.save gives")
    return arguments[0]


NAMES = {
    "collections OrderedDict": Function(PickleReader.read_ordered_dict),
    "torch Size": Function(_make_size),
    "torch._utils _rebuild_tensor": Function(_rebuild_tensor),
    "torch._utils _rebuild_tensor_v2": Function(_rebuild_tensor_v2),
    "torch._utils _rebuild_parameter": Function(_rebuild_parameter),
    **{f"torch {kind}": _StorageType(dtype_name) for kind, dtype_name in STORAGES.items()},
    **{f"torch {dtype_name}": dtype_name for dtype_name in STORAGES.values()},
}


def _listing(names, limit=8):
    names = [ascii(name[:MAX_NAME])[1:-1] for name in names]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
