"""One safetensors file: against the safetensors library where it is right, and files that are broken."""

import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poptransformer.checkpoint import tensor_file
from poptransformer.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from poptransformer.checkpoint.tensor_file import aligned_empty
from poptransformer.errors import UnsupportedError, UserError

library = pytest.importorskip("safetensors.numpy")

ROOT = pathlib.Path(__file__).parents[2]
POCKET = ROOT / "examples" / "gpt2" / "gpt2-pocket" / "model.safetensors"


def write(path, header, data=b"", header_bytes=None):
    """Write a file from a header (a dict, or raw bytes) and the data behind it, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if header_bytes is None else header_bytes).to_bytes(8, "little") + raw + data)
    return path


def floats(*shape, scale=1.0, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, np.float32)


def assert_same(got, wanted):
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert got.tobytes() == np.ascontiguousarray(wanted).tobytes()


def is_ours(array):
    return array.flags.c_contiguous and array.flags.writeable and (array.size == 0 or array.ctypes.data % 64 == 0)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 bytes, so that small tensors are read in many."""
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)
    monkeypatch.setattr(tensor_file, "TRANSPOSE_ROWS", 4)
    monkeypatch.setattr(tensor_file, "MIN_SKIP_BYTES", 24)


def test_pocket_model_as_the_library():
    wanted = library.load_file(POCKET)
    with SafetensorsFile(POCKET) as file:
        assert set(file.names()) == set(wanted)
        for name in file.names():
            assert file.shape(name) == wanted[name].shape
            assert file.dtype(name) == wanted[name].dtype == np.float16
            assert file.num_bytes(name) == wanted[name].nbytes
            got = file.read(name)
            assert_same(got, wanted[name])
            assert is_ours(got)


@pytest.mark.parametrize("key", DTYPES)
def test_every_dtype(tmp_path, key):
    dtype = DTYPES[key]
    values = np.arange(15).reshape(3, 5).astype(dtype)
    path = write(
        tmp_path / "x.safetensors",
        {"x": {"dtype": key, "shape": [3, 5], "data_offsets": [0, values.nbytes]}},
        values.tobytes(),
    )
    with SafetensorsFile(path) as file:
        assert file.dtype("x") == dtype
        assert_same(file.read("x"), values)
        assert_same(file.read("x", transpose=True), values.T)


def test_bfloat16_of_the_library(tmp_path):
    values = floats(7, 9).astype(ml_dtypes.bfloat16)
    library.save_file({"x": values}, tmp_path / "x.safetensors")
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert_same(file.read("x"), values)


FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("stored", "dtype"), list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_cast_and_transposition(tmp_path, stored, dtype, transpose):
    values = floats(300, 257).astype(stored)
    library.save_file({"x": values}, tmp_path / "x.safetensors")
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        got = file.read("x", dtype=dtype, transpose=transpose)
    wanted = values.astype(dtype)
    assert_same(got, wanted.T if transpose else wanted)
    assert is_ours(got)


def test_dtype_by_name(tmp_path):
    library.save_file({"x": floats(3)}, tmp_path / "x.safetensors")
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.read("x", dtype="bfloat16").dtype == ml_dtypes.bfloat16


@pytest.mark.usefixtures("small_blocks")
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_part_in_any_layout(tmp_path_factory, data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4)))
    if len(shape) == 2:
        shape = data.draw(st.sampled_from([shape, (shape[0], 61), (61, shape[1]), (13, 67)]))
    stored, dtype = (data.draw(st.sampled_from(FLOATS)) for _ in range(2))
    axes = data.draw(st.integers(0, len(shape)))
    limits = st.one_of(st.none(), st.integers(-12, 80))
    index = tuple(slice(data.draw(limits), data.draw(limits)) for _ in range(axes))
    transpose = len(shape) == 2 and data.draw(st.booleans())
    values = floats(*shape).astype(stored)
    path = tmp_path_factory.mktemp("part") / "x.safetensors"
    library.save_file({"before": floats(3), "x": values}, path)
    with SafetensorsFile(path) as file:
        got = file.read("x", dtype=dtype, transpose=transpose, index=index or None)
    wanted = np.asarray(values[index]).astype(dtype)
    assert_same(got, wanted.T if transpose else wanted)
    assert is_ours(got)


@pytest.mark.parametrize("shape", [(200, 9000), (9000, 200), (3, 40000), (1, 300000), (300000, 1)])
def test_sizes_above_a_block(tmp_path, shape):
    values = floats(*shape)
    library.save_file({"x": values}, tmp_path / "x.safetensors")
    rows, columns = slice(1, shape[0] - 1 or 1), slice(shape[1] // 3, shape[1] - 1 or 1)
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        for index in (None, (rows,), (slice(None), columns), (rows, columns)):
            part = values if index is None else values[index]
            assert_same(file.read("x", index=index), part)
            assert_same(file.read("x", np.float16, True, index), part.T.astype(np.float16))


def test_scalar_and_empty(tmp_path):
    library.save_file({"scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 4), np.float16)}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        assert_same(file.read("scalar", dtype=np.float16), np.array(3.5, np.float16))
        assert_same(file.read("empty", transpose=True), np.zeros((4, 0), np.float16))


def test_values_that_casts_must_keep(tmp_path):
    values = np.array([np.inf, -np.inf, np.nan, -0.0, 65504, 1e-8, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    library.save_file({"x": values}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        np.testing.assert_array_equal(file.read("x", dtype=np.float16), values.astype(np.float16))
        got = file.read("x", dtype=ml_dtypes.bfloat16).astype(np.float32)
    assert got[-2:].tolist() == [1.0, 1 + 4 * 2**-8]  # halves go to the even neighbour
    assert np.isnan(got[2]) and math.copysign(1, got[3]) == -1


def test_arrays_outlive_the_file(tmp_path):
    library.save_file({"x": floats(100, 100)}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        got = file.read("x")
    os.truncate(tmp_path / "x", 0)
    file.close()
    assert_same(got, floats(100, 100))


def test_threads():
    with SafetensorsFile(POCKET) as file, concurrent.futures.ThreadPoolExecutor(8) as pool:
        names = file.names() * 4
        for name, got in zip(names, pool.map(lambda name: file.read(name, np.float32), names), strict=True):
            assert_same(got, file.read(name, np.float32))


def test_metadata(tmp_path):
    library.save_file({"x": floats(1)}, tmp_path / "x", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "x") as file:
        assert file.metadata == {"format": "pt"}
        assert file.names() == ["x"]


def test_aligned_empty():
    for size in (0, 1, 7, 1000):
        array = aligned_empty((size, 3), np.float16)
        assert array.shape == (size, 3) and is_ours(array)


def test_jax_takes_the_array_without_a_copy(tmp_path):
    jax = pytest.importorskip("jax")
    library.save_file({"x": floats(257, 129)}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        array = file.read("x", transpose=True)
    on_device = jax.device_put(array, jax.devices("cpu")[0], may_alias=True)
    assert on_device.unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc/self/status (Linux)")
@pytest.mark.parametrize(
    ("shape", "dtype", "transpose"),
    [((2048, 2048), "float32", False), ((2048, 2048), "bfloat16", True), ((64, 65536), "float32", True)],
)
def test_peak_memory_is_the_result(tmp_path, shape, dtype, transpose):
    names = [f"x{i}" for i in range(4)]
    library.save_file({name: floats(*shape) for name in names}, tmp_path / "x")  # 64 MB
    code = f"""
import pathlib
from poptransformer.checkpoint.safetensors_file import SafetensorsFile
def peak_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
with SafetensorsFile({str(tmp_path / "x")!r}) as file:
    before, kept = peak_bytes(), [file.read(name, {dtype!r}, {transpose}) for name in file.names()]
    extra = peak_bytes() - before - sum(array.nbytes for array in kept)
assert extra < 8 << 20, extra
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Errors


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "bad safetensors header: Expecting"),
        (b"[]", b"", "bad safetensors header: not a JSON object"),
        (b"\xff\xfe{}", b"", "bad safetensors header: "),
        (b'{"x": 1}', b"", "bad safetensors header: x is not described by an object"),
        (b'{"x": {}, "x": {}}', b"", "bad safetensors header: x is there twice"),
        ({"x": {"dtype": "F32"}}, b"", "bad safetensors header: x lacks a valid dtype, shape or data_offsets"),
        ({"x": entry(shape=[-1])}, b"", "bad safetensors header: x lacks a valid dtype, shape or data_offsets"),
        ({"x": entry(offsets=[0, 8, 9])}, b"", "bad safetensors header: x lacks a valid dtype, shape"),
        (
            {"x": entry(shape=[3])},
            bytes(8),
            "bad safetensors header: x takes bytes 0 to 8, but F32 of shape (3,) needs 12",
        ),
        ({"x": entry(offsets=[8, 0])}, bytes(8), "bad safetensors header: x takes bytes 8 to 0"),
        (
            {"x": entry(), "y": entry(offsets=[4, 12])},
            bytes(12),
            "bad safetensors header: y overlaps x, which ends at byte 8",
        ),
        ({"x": entry(), "y": entry(offsets=[12, 20])}, bytes(20), "bytes 8 to 12, before y, are no tensor's"),
        ({"x": entry(offsets=[800, 808])}, bytes(8), "bytes 0 to 800, before x, are no tensor's"),
    ],
)
def test_bad_header(tmp_path, header, data, message):
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(UserError, match=re.escape(f"{path}: ") + ".*" + re.escape(message)):
        SafetensorsFile(path)


def test_truncated(tmp_path):
    path = tmp_path / "x.safetensors"
    library.save_file({"x": floats(100)}, path)
    size = path.stat().st_size
    for left, message in (
        (size - 1, f"truncated: its header describes {size} bytes, the file has {size - 1}; fetch it again"),
        (20, f"truncated: the header needs {size - 400} bytes, the file has 20"),
        (5, "truncated: 5 bytes, but a safetensors file starts with 8 bytes of header length"),
        (0, "truncated: 0 bytes, but"),
    ):
        os.truncate(path, left)
        with pytest.raises(UserError, match=re.escape(f"{path}: {message}")):
            SafetensorsFile(path)


def test_longer_than_its_header_says(tmp_path):
    path = write(tmp_path / "x.safetensors", {"x": entry()}, bytes(9))
    size = path.stat().st_size
    with pytest.raises(UserError, match=f"its header describes {size - 1} bytes, but the file has {size}"):
        SafetensorsFile(path)


def test_not_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(UserError, match="x.safetensors: not a safetensors file: its first 8 bytes give a header of"):
        SafetensorsFile(path)
    path.write_text("version git-lfs/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(UserError, match="x.safetensors: is a Git LFS pointer, not the weights; fetch them with `git lfs"):
        SafetensorsFile(path)
    with pytest.raises(UserError, match=r"none.safetensors: cannot be opened \(No such file"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        SafetensorsFile(tmp_path)


def test_unknown_dtype_is_refused_when_read(tmp_path):
    header = {"x": entry(), "y": entry("F8_E4M3", [3], [8, 11])}
    with SafetensorsFile(write(tmp_path / "x.safetensors", header, bytes(11))) as file:
        assert file.shape("y") == (3,)
        file.read("x")
        for ask in (file.dtype, file.read):
            with pytest.raises(UnsupportedError, match=r"x.safetensors: y: no reader for dtype F8_E4M3 \(has F64, F32, F"):
                ask("y")


def test_shrunk_while_open(tmp_path):
    path = tmp_path / "x.safetensors"
    library.save_file({"x": floats(1000)}, path)
    with SafetensorsFile(path) as file:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(UserError, match=r"x: the file ends at byte \d+, 100 bytes too early; it has shrunk"):
            file.read("x")


def test_wrong_requests(tmp_path):
    library.save_file({"x": floats(4, 4, scale=1e6), "y": floats(2, 2, 2)}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        with pytest.raises(UserError, match="x: has float32 values beyond the range of float16; set precision: bf16 or fp32"):
            file.read("x", dtype=np.float16)
        with pytest.raises(UnsupportedError, match="x: float32 is not read as int8; ask for a float dtype"):
            file.read("x", dtype=np.int8)
        with pytest.raises(UserError, match=r"y: only a matrix can be transposed, and the shape is \(2, 2, 2\)"):
            file.read("y", transpose=True)
        with pytest.raises(UserError, match=r"x: 3 slices for shape \(4, 4\)"):
            file.read("x", index=(slice(None),) * 3)
        with pytest.raises(UserError, match="x: slices have step 1, not 2"):
            file.read("x", index=(slice(None, None, 2),))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("stored", "value", "dtype", "remedy"),
    [
        (ml_dtypes.bfloat16, -70000, np.float16, "set precision: bf16 or fp32"),
        (np.float32, 70000, np.float16, "set precision: bf16 or fp32"),
        (np.float32, np.finfo(np.float32).max, ml_dtypes.bfloat16, "set precision: fp32"),
        (np.float32, np.finfo(np.float32).max, np.float16, "set precision: fp32"),
        (np.float64, -1e300, np.float32, "-1e+300 fits in no precision"),
        (np.float64, 1e300, ml_dtypes.bfloat16, "1e+300 fits in no precision"),
        (np.float64, 1e300, np.float16, "1e+300 fits in no precision"),
    ],
)
def test_values_beyond_the_range(tmp_path, stored, value, dtype, remedy, transpose):
    values = floats(13, 67).astype(stored)
    values[0, 0] = np.inf  # infinite in the file, and stays so
    values[11, 60] = value
    data = values.tobytes()
    key = next(key for key, held in DTYPES.items() if held == values.dtype)
    path = write(tmp_path / "x", {"x": entry(key, values.shape, (0, len(data)))}, data)
    message = f"x: has {values.dtype} values beyond the range of {np.dtype(dtype)}; {remedy}"
    with SafetensorsFile(path) as file:
        for index in (None, (slice(5, 13), slice(50, 61))):
            with pytest.raises(UserError, match=re.escape(message) + "$"):
                file.read("x", dtype, transpose, index)
        got = file.read("x", dtype, transpose, (slice(0, 11),))
    wanted = values[:11].astype(dtype)
    assert_same(got, wanted.T if transpose else wanted)


@pytest.mark.parametrize("key", [key for key in DTYPES if DTYPES[key].kind in "iub"])
def test_integers_are_not_read_as_floats(tmp_path, key):
    size = DTYPES[key].itemsize
    message = f"x: stored as {DTYPES[key]}: a quantised checkpoint; this version reads float32, float16 and bfloat16"
    with SafetensorsFile(write(tmp_path / "x", {"x": entry(key, [1], [0, size])}, bytes(size))) as file:
        assert file.stored_dtype("x") == DTYPES[key].name
        assert file.read("x").dtype == DTYPES[key]
        for dtype in ("float32", "float16", "bfloat16"):
            with pytest.raises(UnsupportedError, match=message):
                file.read("x", dtype)
