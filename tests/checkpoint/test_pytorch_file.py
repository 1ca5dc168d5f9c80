"""One file of torch.save: against torch where it is right, and files that are broken or made to do harm.

Files that torch would not write are put together here, so those tests need no torch.
"""

import logging
import math
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poptransformer.checkpoint import inert_pickle, pytorch_file, tensor_file
from poptransformer.checkpoint.pytorch_file import DTYPES, PytorchFile
from poptransformer.errors import UnsupportedError, UserError

ROOT = pathlib.Path(__file__).parents[2]

zip_and_legacy = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


def save(torch, value, path, is_zip=True, **settings):
    torch.save(value, path, _use_new_zipfile_serialization=is_zip, **settings)
    return path


def as_numpy(tensor):
    tensor = tensor.detach().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.float().numpy().astype(ml_dtypes.bfloat16)  # exact, there and back
    return tensor.numpy()


def assert_same(got, wanted):
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert got.tobytes() == np.ascontiguousarray(wanted).tobytes()
    assert got.flags.c_contiguous and got.flags.writeable and (got.size == 0 or got.ctypes.data % 64 == 0)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 bytes, so that small tensors are read in many."""
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr(tensor_file, "TRANSPOSE_ROWS", 4)
    monkeypatch.setattr(tensor_file, "MIN_SKIP_BYTES", 24)


# Against torch


def layouts(torch):
    """Tensors that lie in their storages in every way."""
    base = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    cube = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    return {
        "plain": base,
        "tied": base,
        "rows": base[2:5],
        "row": base[3],
        "columns": base[:, 3:7],
        "column": base[:, 4],
        "steps": base[::2, 1::3],
        "transposed": base.T,
        "part of transposed": base.T[2:7, 1:],
        "cube": cube,
        "turned cube": cube.permute(2, 0, 1),
        "part of turned cube": cube.permute(2, 0, 1)[1:4, :, ::2],
        "expanded": base[0].expand(4, 10),
        "expanded inside": base[:, :1].expand(6, 7),
        "number": torch.tensor(3.5),
        "number of many": base[2, 3],
        "one": base[2:3, 3:4],
        "empty": base[:0],
        "empty in the middle": torch.zeros(3, 0, 4).permute(1, 0, 2),
        "parameter": torch.nn.Parameter(base[1:3]),
        "buffer": torch.nn.Parameter(cube, requires_grad=False),
    }


@pytest.fixture(scope="module")
def saved(torch, tmp_path_factory):
    """Paths of the layouts saved in both ways, and what torch reads from them."""
    folder = tmp_path_factory.mktemp("layouts")
    tensors = layouts(torch)
    paths = [save(torch, tensors, folder / f"{is_zip}.bin", is_zip) for is_zip in (True, False)]
    loaded = [torch.load(path, weights_only=True) for path in paths]
    return [(path, {name: as_numpy(tensor) for name, tensor in each.items()}) for path, each in zip(paths, loaded, strict=True)]


def test_layouts_as_torch_reads_them(saved):
    for path, wanted in saved:
        with PytorchFile(path) as file:
            assert file.names() == list(wanted)
            for name in wanted:
                assert file.shape(name) == wanted[name].shape
                assert file.dtype(name) == np.float32 and file.stored_dtype(name) == "float32"
                assert file.num_bytes(name) == wanted[name].nbytes
                assert_same(file.read(name), wanted[name])


@pytest.mark.usefixtures("small_blocks")
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_part_of_any_layout(saved, data):
    path, arrays = saved[0]
    name = data.draw(st.sampled_from(list(arrays)))
    limits = st.one_of(st.none(), st.integers(-12, 12))
    axes = data.draw(st.integers(0, arrays[name].ndim))
    index = tuple(slice(data.draw(limits), data.draw(limits)) for _ in range(axes))
    dtype = data.draw(st.sampled_from([np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]))
    transpose = arrays[name].ndim == 2 and data.draw(st.booleans())
    with PytorchFile(path) as file:
        got = file.read(name, dtype=dtype, transpose=transpose, index=index)
    wanted = np.asarray(arrays[name][index]).astype(dtype)
    assert_same(got, wanted.T if transpose else wanted)


@zip_and_legacy
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(torch, tmp_path, name, is_zip):
    tensor = (torch.arange(15).reshape(3, 5) - 7).to(getattr(torch, name))
    path = save(torch, {"x": tensor, "t": tensor.T}, tmp_path / "x.bin", is_zip)
    with PytorchFile(path) as file:
        assert file.stored_dtype("x") == name and file.dtype("x") == DTYPES[name]
        assert_same(file.read("x"), as_numpy(tensor))
        assert_same(file.read("t"), as_numpy(tensor.T))


@pytest.mark.parametrize("shape", [(200, 9000), (9000, 200), (3, 40000)])
def test_sizes_above_a_block(torch, tmp_path, shape):
    tensor = torch.randn(shape[0], shape[1] + 5, generator=torch.Generator().manual_seed(0))
    views = {"whole": tensor, "columns": tensor[:, 5:], "transposed": tensor.T, "cut": tensor.T[5:, 1:]}
    path = save(torch, views, tmp_path / "x.bin")
    with PytorchFile(path) as file:
        for name, view in views.items():
            wanted = as_numpy(view)
            assert_same(file.read(name), wanted)
            assert_same(file.read(name, np.float16, transpose=True), wanted.T.astype(np.float16))


@zip_and_legacy
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(torch, tmp_path, is_zip, protocol):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    path = save(torch, model.state_dict(), tmp_path / "x.pth", is_zip, pickle_protocol=protocol)
    with PytorchFile(path) as file:
        assert file.names() == ["0.weight", "0.bias", "1.weight", "1.bias"]
        for name, tensor in model.state_dict().items():
            assert_same(file.read(name), as_numpy(tensor))


def test_the_names_torch_has_for_what_is_refused(torch, tmp_path):
    """Names and dtypes without a reader are those that torch writes."""
    for value, message in (
        ({"x": torch.zeros(3, dtype=torch.uint16)}, "holds tensors of a newer dtype, such as float8 or uint16"),
        ({"x": torch.zeros(3).to(torch.float8_e4m3fn)}, "holds tensors of a newer dtype, such as float8 or uint16"),
        ({"x": torch.eye(3).to_sparse()}, "holds sparse tensors"),
        ({"x": torch.empty(3, device="meta")}, "holds tensors without values"),
    ):
        path = save(torch, value, tmp_path / "x.bin")
        with pytest.raises(UnsupportedError, match=re.escape(f"{path}: {message}") + r" \(torch\._utils\._rebuild_"):
            PytorchFile(path)
    path.write_bytes(pickle.dumps(torch.zeros(3), 2))
    with pytest.raises(
        UnsupportedError, match=r"holds tensors that were pickled without torch.save \(torch.storage._load_from"
    ):
        PytorchFile(path)
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    with pytest.raises(UserError, match="its pickle has a tensor with hooks or metadata"):
        PytorchFile(save(torch, {"x": conjugate}, path))
    with PytorchFile(save(torch, {"x": torch.zeros(2, dtype=torch.complex64)}, path)) as file:
        assert file.stored_dtype("x") == "complex64" and file.shape("x") == (2,)
        for ask in (file.dtype, file.read):
            with pytest.raises(UnsupportedError, match=r"x: no reader for dtype complex64 \(has float64, float32, "):
                ask("x")
    with pytest.raises(UserError, match="needs torch.nn.modules.linear.Linear, which weights do not; such a file can run"):
        PytorchFile(save(torch, torch.nn.Linear(2, 2), path))


def test_saved_without_checksums(torch, tmp_path):
    old = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save(torch, {"x": torch.ones(3)}, tmp_path / "x.bin")
    finally:
        torch.serialization.set_crc32_options(old)
    with PytorchFile(path) as file:
        assert_same(file.read("x"), np.ones(3, np.float32))


def arrays_of_torch(torch, path):
    """Return what torch reads as arrays by name, or None where it refuses."""
    try:
        value = torch.load(path, weights_only=True)
    except Exception:  # whatever a damaged file makes it raise
        return None
    tensors = value.items() if isinstance(value, dict) else ()
    return {name: as_numpy(each) for name, each in tensors if isinstance(name, str) and isinstance(each, torch.Tensor)}


@zip_and_legacy
@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:invalid escape sequence")
def test_flipped_bytes(torch, tmp_path_factory, is_zip):
    """A damaged file ends in a UserError, or in what torch reads in it where torch reads it at all."""
    folder = tmp_path_factory.mktemp("flipped")
    tensors = {
        "weight": torch.arange(12.0).reshape(3, 4),
        "t": torch.arange(6).reshape(2, 3).T,
        "step": 3,
        "n": {"k": [1, None]},
    }
    path = save(torch, tensors, folder / "x.bin", is_zip)
    whole, undamaged = path.read_bytes(), arrays_of_torch(torch, path)

    @settings(deadline=None, max_examples=400)
    @given(flips=st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), min_size=1, max_size=3))
    def check(flips):
        data = bytearray(whole)
        for at, value in flips:
            data[at] = value
        path.write_bytes(data)
        try:
            with PytorchFile(path) as file:
                got = {name: file.read(name) for name in file.names()}
        except UserError as error:
            assert str(error).startswith(str(path))
            return
        theirs = arrays_of_torch(torch, path)
        if theirs is None:
            return
        assert set(got) == set(theirs)
        for name in got:
            # Where the zip directory is damaged, torch may hand out memory that it has not filled.
            is_unharmed = name in undamaged and got[name].tobytes() == undamaged[name].tobytes()
            assert_same(got[name], undamaged[name] if is_unharmed else theirs[name])

    check()


@zip_and_legacy
def test_truncated(torch, tmp_path, is_zip):
    path = save(torch, {"a": torch.arange(200.0), "b": torch.ones(3, 4)}, tmp_path / "x.bin", is_zip)
    size = path.stat().st_size
    for left in sorted({*range(0, size, 100), *range(4), size - 1}, reverse=True):
        os.truncate(path, left)
        with pytest.raises(UserError, match=re.escape(f"{path}: ") + "(truncated|damaged|is empty|not a file of torch.save)"):
            PytorchFile(path)


# Files put together here


def tensor(key="0", size=6, offset=0, shape=(2, 3), strides=None, kind="FloatStorage", persistent=None):
    """Return the instructions that make a tensor."""
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))) if strides is None else strides
    device = b"U\x03cpu"
    if persistent is None:
        persistent = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + device + number(size) + b"tQ"
    numbers = b"".join(b"(" + b"".join(map(number, each)) + b"t" for each in (shape, strides))
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + number(offset) + numbers + b"\x89" + hooks + b"tR"


def number(value):
    return pickle.dumps(value, 2)[2:-1]


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def pairs(**values):
    return b"}(" + b"".join(text(name) + value for name, value in values.items()) + b"u"


DATA = np.arange(6, dtype=np.float32)


def write_zip(path, value, root="x/", compression=zipfile.ZIP_STORED, **members):
    """Write a file of the zip layout; members None are left out."""
    content = {"data.pkl": b"\x80\x02" + value + b".", "byteorder": b"little", "data/0": DATA.tobytes()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in (content | members).items():
            if data is not None:
                archive.writestr(root + name, data)
    return path


LITTLE = pairs(protocol_version=number(1001), little_endian=b"\x88")
MAGIC, VERSION = number(0x1950A86A20F9469CFC6C), number(1001)


def write_legacy(path, value, magic=MAGIC, version=VERSION, system=LITTLE, keys=b"](U\x010e", size=6):
    """Write a file of the legacy layout."""
    pickles = b"".join(b"\x80\x02" + each + b"." for each in (magic, version, system, value, keys))
    path.write_bytes(pickles + struct.pack("<q", size) + DATA.tobytes())
    return path


def legacy_tensor(last=b"N", **fields):
    key, size = text(fields.pop("key", "0")), number(fields.get("size", 6))
    kind = fields.pop("kind", "FloatStorage").encode()
    return tensor(
        persistent=b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + key + b"U\x03cpu" + size + last + b"tQ", **fields
    )


def error(path, kind=UserError):
    with pytest.raises(UserError) as caught:
        PytorchFile(path)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value)) < len(str(path)) + 1000
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.bin"


def test_files_put_together_here_are_right(path):
    for write, one in ((write_zip, tensor), (write_legacy, legacy_tensor)):
        with PytorchFile(write(path, pairs(a=one(), b=one(shape=(3, 2), strides=(1, 3))))) as file:
            assert_same(file.read("a"), DATA.reshape(2, 3))
            assert_same(file.read("b"), DATA.reshape(2, 3).T)


def test_an_older_call(path):
    old = tensor().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor").replace(b"\x89ccollections\nOrderedDict\n)RtR", b"tR")
    with PytorchFile(write_zip(path, pairs(a=old), byteorder=None)) as file:  # neither did older versions tell the byte order
        assert_same(file.read("a"), DATA.reshape(2, 3))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(), "holds one tensor, not a dict of weights; save model.state_dict()"),
        (b"](" + tensor() + b"e", "holds a list, not a dict of weights"),
        (b"K\x05", "holds a int, not a dict of weights"),
        (b"}", "has no tensors by name; its keys are . Save model.state_dict() alone"),
        (pairs(epoch=b"K\x05", net=pairs(a=tensor())), "has no tensors by name; its keys are epoch, net. Save"),
        (b"}K\x01" + tensor() + b"s", "has no tensors by name; its keys are . Save"),
        (
            pairs(model=pairs(a=tensor()), state_dict=pairs(a=tensor())),
            "has weights under state_dict, model, and nothing says which are wanted; save the one alone",
        ),
        (b"}" + text("x" * 501) + tensor() + b"s", "damaged: a tensor is called 'xxx"),
        (b"}" + text("a\x1b[2J") + tensor() + b"s", "damaged: a tensor is called 'a\\x1b[2J'"),
        (b"}X\x04\0\0\0a\xed\xa0\x80" + tensor() + b"s", "damaged: a tensor is called 'a\\ud800'"),
        # Storages
        (pairs(a=tensor(size=7)), "damaged: storage '0' has 24 bytes, its tensors need 28; fetch it again"),
        (pairs(a=tensor(key="1")), "damaged: it has no data for storage '1'; fetch it again"),
        (pairs(a=tensor(key="../x")), "damaged: it has no data for storage '../x'"),
        (pairs(a=tensor(kind="DoubleStorage")), "damaged: storage '0' has 24 bytes, its tensors need 48"),
        (pairs(a=tensor(size=1 << 61)), "damaged: storage '0' has 24 bytes, its tensors need 9223372036854775808"),
        (pairs(a=tensor(size=-1)), "its pickle has a persistent id that is no storage, which weights have not"),
        (pairs(a=tensor(size=1 << 3000)), "its pickle has a persistent id that is no storage"),
        (pairs(a=tensor(size=True)), "its pickle has a persistent id that is no storage"),
        (pairs(a=tensor(kind="float32")), "its pickle has a persistent id that is no storage"),
        (pairs(a=tensor(kind="Size")), "its pickle has a persistent id that is no storage"),
        (pairs(a=tensor(kind="QInt8Storage")), "needs torch.QInt8Storage, which weights do not"),
        (pairs(a=tensor(kind="os\nsystem")), "needs torch.os, which weights do not"),
        (pairs(a=tensor(persistent=b"K\x05Q")), "its pickle has a persistent id that is no storage"),
        (pairs(a=tensor(persistent=b"(tQ")), "its pickle has a persistent id that is no storage"),
        (pairs(a=tensor(persistent=b"(U\x06modulecos\nsystem\nNNtQ")), "needs os.system, which weights do not"),
        (pairs(a=tensor(persistent=b"(U\x06moduleNNNNtQ")), "its pickle has a persistent id that is no storage"),
        (pairs(a=tensor(persistent=b"(]NNNNtQ")), "its pickle has a persistent id that is no storage"),
        (pairs(a=tensor(persistent=b"(U\x07storagectorch\nFloatStorage\n]U\x03cpuK\x06tQ")), "a persistent id that is no"),
        (pairs(a=legacy_tensor()), "its pickle has a persistent id that is no storage"),
        # Tensors
        (pairs(a=tensor(offset=1)), "damaged: a reaches to element 6 of a storage that has 6; fetch it again"),
        (pairs(a=tensor(shape=(3, 3))), "damaged: a reaches to element 8 of a storage that has 6"),
        (pairs(a=tensor(strides=(1 << 61, 1))), "damaged: a reaches to element 2305843009213693954 of a storage that"),
        (pairs(a=tensor(strides=(-3, 1))), "its pickle has a tensor of other arguments than torch.save gives"),
        (pairs(a=tensor(shape=(-1, 3))), "its pickle has a tensor of other arguments than torch.save gives"),
        (pairs(a=tensor(shape=(1 << 62, 3))), "its pickle has a tensor of other arguments than torch.save gives"),
        (pairs(a=tensor(shape=(2.0, 3), strides=(3, 1))), "its pickle has a tensor of other arguments"),
        (pairs(a=tensor(strides=(3, 1, 1))), "its pickle has a tensor of other arguments than torch.save gives"),
        (pairs(a=tensor(shape=(1,) * 65)), "its pickle has a tensor of other arguments than torch.save gives"),
        (pairs(a=tensor(persistent=b"N")), "its pickle has a tensor of other arguments than torch.save gives"),
        (pairs(a=b"ctorch._utils\n_rebuild_tensor\n)R"), "its pickle has a tensor of other arguments"),
        (pairs(a=b"ctorch._utils\n_rebuild_tensor_v2\n)R"), "its pickle has a tensor with hooks or metadata"),
        (pairs(a=tensor().replace(b")RtR", b")RU\x01aNstR")), "its pickle has a tensor with hooks or metadata"),
        (pairs(a=b"ctorch._utils\n_rebuild_parameter\n)R"), "its pickle has a parameter of other arguments"),
        (pairs(a=b"ctorch._utils\n_rebuild_parameter\n(N\x88NtR"), "its pickle has a parameter of other arguments"),
        (pairs(a=b"ctorch\nSize\n)R"), "its pickle has a torch.Size of other arguments"),
        (pairs(a=b"ctorch\nSize\n(]tR"), "its pickle has a torch.Size of other arguments"),
        (
            pairs(a=tensor(shape=(1 << 40, 1), strides=(0, 0))),
            "a repeats 6 elements up to 1099511627776, more than weights do",
        ),
        (pairs(a=tensor(shape=(2,) * 64, strides=(0,) * 64)), "a repeats 6 elements up to 18446744073709551616, more"),
        (pairs(a=tensor(shape=(0, 1 << 61))), "a: no array has the shape (0, 2305843009213693952)"),
        (pairs(a=tensor(shape=(0, *((1 << 61,) * 20)), strides=(0,) * 21)), "2305843009213693952, ...) with 21 axes"),
        # The pickle itself
        (b"cos\nsystem\n(S'touch pwned'\ntR", "needs os.system, which weights do not; such a file can run code, so it is"),
        (pairs(a=tensor(), b=b"cbuiltins\neval\nU\x0911 + 3000\x85R"), "needs builtins.eval, which weights do not"),
        (b"0", "damaged: its pickle cannot be read"),
    ],
)
def test_zip_with_a_pickle_that_is_wrong(path, monkeypatch, value, message):
    monkeypatch.chdir(path.parent)
    assert message in error(write_zip(path, value))
    assert os.listdir(path.parent) == ["x.bin"]


def test_a_damaged_zip(path):
    value = pairs(a=tensor())
    assert "not a file of torch.save: a zip file with 0 data.pkl in it" in error(write_zip(path, value, root=""))
    assert "a zip file with 0 data.pkl in it" in error(write_zip(path, value, root="x/y/"))
    with zipfile.ZipFile(write_zip(path, value), "a") as archive:
        archive.writestr("y/data.pkl", b"\x80\x02}.")
    assert "a zip file with 2 data.pkl in it" in error(path)
    assert "is a TorchScript program; save its state_dict() with torch.save" in error(
        write_zip(path, value, **{"constants.pkl": b"\x80\x02)."}), UnsupportedError
    )
    for order in (b"big", b"", b"middle\n"):
        message = error(write_zip(path, value, byteorder=order), UnsupportedError)
        assert message.startswith(f"its numbers are stored as {order.strip().decode()!a}-endian; only little-endian is read")
    assert "'x/byteorder' has 17 bytes, more than the 16 that" in error(write_zip(path, value, byteorder=b"l" * 17))
    assert "'x/data.pkl' is compressed or encrypted, which" in error(
        write_zip(path, value, compression=zipfile.ZIP_DEFLATED, byteorder=None), UnsupportedError
    )
    assert "it has no data for storage '0'" in error(write_zip(path, value, **{"data/0": None}))
    with zipfile.ZipFile(write_zip(path, value), "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("x/data/0", bytes(24))
    assert "a member of its zip directory is there twice" in error(path)


def test_a_member_that_is_not_where_the_directory_says(path):
    whole = write_zip(path, pairs(a=tensor())).read_bytes()
    directory = whole.index(b"PK\x01\x02")
    at = whole.index(b"x/data/0", directory) - 4  # the member's offset, before its name
    for offset, message in ((1, "is not where its zip directory says"), (1 << 31, "is not where its zip directory says")):
        path.write_bytes(whole[:at] + struct.pack("<I", offset) + whole[at + 4 :])
        assert f"damaged: 'x/data/0' {message}" in error(path)
    sizes = whole.index(b"x/data/0", directory) - 26
    path.write_bytes(whole[:sizes] + struct.pack("<II", 5000, 5000) + whole[sizes + 8 :])
    assert re.search(rf"truncated: 'x/data/0' ends at byte \d+, the file has {len(whole)}; fetch it again", error(path))
    path.write_bytes(whole[:sizes] + struct.pack("<II", 24, 5000) + whole[sizes + 8 :])
    assert "'x/data/0' is compressed or encrypted" in error(path, UnsupportedError)
    flags = whole.index(b"x/data/0", directory) - 38
    path.write_bytes(whole[:flags] + b"\x01\0" + whole[flags + 2 :])
    assert "'x/data/0' is compressed or encrypted" in error(path, UnsupportedError)


def test_a_pickle_or_directory_too_large(path, monkeypatch):
    monkeypatch.setattr(pytorch_file, "MAX_BYTES", 1000)
    assert "'x/data.pkl' has 1003 bytes, more than the 1000 that weights need there" in error(write_zip(path, b"N" * 1000))
    monkeypatch.setattr(pytorch_file, "MAX_DIRECTORY_BYTES", 100)
    assert "its zip directory has" in error(write_zip(path, b"N"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"K\x05"}, "not a file of torch.save: a pickle without its magic number"),
        ({"magic": b"cos\nsystem\n(S'touch pwned'\ntR"}, "needs os.system, which weights do not"),
        ({"version": b"K\x05"}, "not a file of torch.save: its version is not 1001"),
        ({"version": b"]"}, "not a file of torch.save: its version is not 1001"),
        ({"system": b"K\x05"}, "not a file of torch.save: its version is not 1001"),
        ({"system": pairs(little_endian=b"\x89")}, "its numbers are stored as 'big'-endian; only little-endian is read"),
        ({"system": pairs()}, "its numbers are stored as 'unknown'-endian"),
        ({"system": pairs(little_endian=b"]")}, "its numbers are stored as 'unknown'-endian"),
        ({"keys": b"]"}, "damaged: it has no data for storage '0'; fetch it again"),
        ({"keys": b"N"}, "damaged: its pickle cannot be read (its list of storages is not sound)"),
        ({"keys": b"](U\x011e"}, "damaged: its pickle cannot be read (its list of storages is not sound)"),
        ({"keys": b"](K\x01e"}, "damaged: its pickle cannot be read (its list of storages is not sound)"),
        ({"keys": b"](U\x010U\x010e"}, "truncated: storage '0' ends at byte"),
        ({"size": 5}, "damaged: storage '0' has 5 elements, its tensors need 6; fetch it again"),
        ({"size": -1}, "damaged: storage '0' has 18446744073709551615 elements, its tensors need 6"),
        ({"value": pairs(a=legacy_tensor(size=1 << 61))}, "truncated: storage '0' ends at byte"),
        ({"value": pairs(a=legacy_tensor(), b=legacy_tensor(kind="IntStorage"))}, "two storages have the same key"),
        ({"value": pairs(a=legacy_tensor(), b=legacy_tensor(size=5))}, "two storages have the same key"),
        ({"value": pairs(a=legacy_tensor(last=b"(U\x01vK\x00K\x06t"))}, "its pickle has a persistent id that is no storage"),
        ({"value": pairs(a=tensor())}, "its pickle has a persistent id that is no storage"),
        ({"value": pairs(a=legacy_tensor(offset=1))}, "damaged: a reaches to element 6 of a storage that has 6"),
    ],
)
def test_legacy_that_is_wrong(path, monkeypatch, changes, message):
    monkeypatch.chdir(path.parent)
    fields = {"value": pairs(a=legacy_tensor())} | changes
    kind = UnsupportedError if "endian" in message else UserError
    assert message in error(write_legacy(path, **fields), kind)
    assert os.listdir(path.parent) == ["x.bin"]


def test_not_of_torch(path):
    for content, message in (
        (b"", "is empty; fetch it again"),
        (b"GGUF\x03\0\0\0", "not a file of torch.save: it starts with b'GGUF'"),
        (b"<!DOCTYPE html>", "not a file of torch.save: it starts with b'<!DO'"),
        (b"version https://git-lfs", "is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"),
        (b"PK\x03\x04" + bytes(100), "truncated or damaged: its zip directory cannot be read; fetch it again"),
        (b"\x80\x02.", "damaged: its pickle cannot be read (a value is missing)"),
        (pickle.dumps({"a": 1}), "not a file of torch.save: a pickle without its magic number"),
    ):
        path.write_bytes(content)
        assert message in error(path)
    path.unlink()
    assert error(path) == "cannot be opened (No such file or directory)"


def test_a_pickle_that_takes_many_steps(path, monkeypatch):
    monkeypatch.setattr(inert_pickle, "MAX_STEPS", 1000)
    assert "its pickle takes more than 1000 steps, which weights do not" in error(write_zip(path, b"]" * 2000))


def test_what_lies_beside_the_weights(path, caplog):
    value = pairs(
        a=tensor(), epoch=b"K\x05", args=pairs(lr=b"K\x01"), size=b"ctorch\nSize\n((K\x01ttR", dtype=b"ctorch\nfloat16\n"
    )
    with caplog.at_level(logging.DEBUG), PytorchFile(write_zip(path, value)) as file:
        assert file.names() == ["a"]
    assert caplog.messages == [f"{path}: ignoring what is no tensor: epoch, args, size, dtype"]


@pytest.mark.parametrize("wrapper", pytorch_file.WRAPPERS)
def test_weights_inside_a_dict(path, caplog, wrapper):
    value = pairs(epoch=b"K\x05", loss=tensor(shape=()), optimizer=pairs(a=tensor()), **{wrapper: pairs(a=tensor())})
    with caplog.at_level(logging.INFO), PytorchFile(write_zip(path, value)) as file:
        assert file.names() == ["a"] and file.shape("a") == (2, 3)
    assert caplog.messages == [f"{path}: reading the weights under {wrapper!r}, not loss"]
    caplog.clear()
    with (
        caplog.at_level(logging.INFO),
        PytorchFile(write_zip(path, pairs(b=tensor(), **{wrapper: pairs(lr=b"K\x05")}))) as file,
    ):
        assert file.names() == ["b"]
    assert not caplog.messages


def test_a_file_of_more_than_4_gib(path):
    """Places beyond 32 bits, in a file that is mostly a hole."""
    gap = 5 << 30
    with open(path, "wb") as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + pairs(a=tensor()) + b".")
        file.seek(gap)
        archive.start_dir = file.tell()
        archive.writestr("x/data/0", DATA.tobytes())
    with PytorchFile(path) as file:
        assert_same(file.read("a"), DATA.reshape(2, 3))


def test_an_unsound_file_is_closed(path, monkeypatch):
    closed = []
    close = os.close
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), close(fd)))
    error(write_zip(path, b"N"))
    assert len(closed) >= 1


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc/self/status (Linux)")
@zip_and_legacy
def test_peak_memory_is_the_result(torch, tmp_path, is_zip):
    matrices = {f"x{i}": torch.ones(2048, 2048) for i in range(3)}
    matrices |= {"t": matrices["x0"].T, "columns": matrices["x1"][:, 100:]}
    path = save(torch, matrices, tmp_path / "x.bin", is_zip)
    code = f"""
import pathlib
from poptransformer.checkpoint.pytorch_file import PytorchFile
def peak_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
with PytorchFile({str(path)!r}) as file:
    before, kept = peak_bytes(), [file.read(name, dtype) for name in file.names() for dtype in ("bfloat16", "float32")]
    extra = peak_bytes() - before - sum(array.nbytes for array in kept)
assert extra < 8 << 20, extra
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
