"""Our own kernels for the CPU: find the library that `make` builds, check it, register its handlers, call them.

Loading happens once per process, at the first call of load_cpu_library.
"""

import ctypes
import dataclasses
import math
import os
import pathlib
import re
import threading

import jax
import numpy as np

from poptransformer.errors import UserError

LIBRARY_VARIABLE = "POPTRANSFORMER_CUSTOM_OPS"
DEFAULT_LIBRARY = "custom_ops/build/libcustom_ops_cpu.so"
# Handler symbol and the version of its arguments, as POPTRANSFORMER_LIST_OP in custom_ops/<op>/<op>_ffi.cc has it.
OPS = {"attention": 4, "gather": 1, "linear": 2, "packed_linear": 2, "step_program": 1, "wkv": 1}
MAX_LINEAR_ROWS = 8  # kMaxLinearRows in custom_ops/linear/linear.h
PACKED_TILE_ROWS = 12  # kTileProductRows in custom_ops/packed_linear/packed_linear_cpu.cc

_WAY_OUT = "or set custom_ops: false for the plain XLA lowering"

_lock = threading.Lock()
_loaded = None


class MissingLibraryError(UserError):
    """The library has not been built; nothing is wrong with it."""


@dataclasses.dataclass(frozen=True)
class CpuLibrary:
    """The loaded library.

    Attributes:
      path: where it was found.
      ops: names of the registered ops.
      isa: the instruction set its kernels run, "avx512", "avx2" or "portable".
      num_threads: threads of its pool, the calling one included.
      has_tiles: whether it multiplies bfloat16 with the CPU's tile unit (AMX).
    """

    path: pathlib.Path
    ops: tuple
    isa: str
    num_threads: int
    has_tiles: bool
    _handle: ctypes.CDLL = dataclasses.field(repr=False, compare=False)

    @property
    def instructions(self):
        """What its kernels run, in words."""
        return f"{self.isa} and tiles" if self.has_tiles else self.isa

    def read_bandwidth_gb_per_s(self, num_bytes=512 << 20, num_repetitions=9):
        """Measure how fast all threads together read main memory, in GB/s (1e9 bytes), median of the repetitions.

        Args:
          num_bytes: size of the buffer that is read, well above the caches; rounded down to 4 MiB, and at least that.
        Raises: MemoryError if there is no room for the buffer.
        """
        measured = self._handle.poptransformer_read_bandwidth_gb_per_s(num_bytes, num_repetitions)
        if measured <= 0:
            raise MemoryError(f"no room for the {num_bytes} bytes that the bandwidth measurement reads")
        return measured

    def dot_peak_gop_per_s(self, kind):
        """Measure how fast all threads together multiply and add in registers, in Gop/s (1e9, a product and its sum are two).

        Args:
          kind: "fp32", "bf16", "int8" or "bf16 tiles", with the instructions of `isa`.
        Returns: 0 where `isa` has no instruction for that.
        """
        peak = self._handle.poptransformer_dot_peak_gop_per_s
        peak.restype, peak.argtypes = ctypes.c_double, (ctypes.c_char_p,)
        return peak(kind.encode())


def load_cpu_library():
    """Load the library and register its handlers with XLA under `poptransformer_<op>`, once per process.

    The path is the environment variable POPTRANSFORMER_CUSTOM_OPS, else custom_ops/build/libcustom_ops_cpu.so beside the
    package.

    Returns: CpuLibrary.
    Raises: UserError if the library is missing, cannot be loaded, is not ours or is out of date.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def target_name(op):
    """The name under which XLA knows the handler of an op."""
    return f"poptransformer_{op}"


def attention_isa(query, allow_bfloat16=False):
    """What `attention` runs for these queries: tiles, or the library's `isa`."""
    library = load_cpu_library()
    is_bfloat16 = allow_bfloat16 or query.dtype == jax.numpy.bfloat16
    return "tiles" if library.has_tiles and is_bfloat16 and query.shape[1] > 1 else library.isa


def attention(
    query, key, value, k_cache, v_cache, cache_len, num_tokens, scale, *,
    window=None, context_len=None, alibi_slopes=None, allow_bfloat16=False,
):  # fmt: skip
    """Append new keys and values to the caches and attend causally, in one kernel.

    Args:
      query: [B, T, N, H], float32, bfloat16 or float16.
      key, value: [B, T, K, H], dtype of query; K divides N, query head n reads key/value head n // (N // K).
      k_cache, v_cache: [B, K, S, H], one dtype of the same three, or as poptransformer/kv_cache.py has float8_e4m3fn and int8
        ones. Updated in place where XLA may reuse them (donated, or
        carried through a loop), else copied first.
      cache_len: [B], int32, positions that are in the cache already.
      num_tokens: [B], int32, how many of the T positions are real; the others give 0 and write nothing.
      scale: factor on the scores, a Python number.
      window, context_len, alibi_slopes: as in `poptransformer.ops.attention`: a Python number, [B] int32, [N] float32, each
        of them None for none.
      allow_bfloat16: whether prefill (T > 1) may round what it multiplies to bfloat16 where query has another dtype. That of
        bfloat16 always may, on a CPU with tiles.
    Returns: out [B, T, N, H] with the dtype of query, k_cache, v_cache.
    Raises: when run, an XLA error that names the row if cache_len + num_tokens > S or one is negative; nothing is written.
    """
    load_cpu_library()
    call = jax.ffi.ffi_call(
        target_name("attention"),
        (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype),
            jax.ShapeDtypeStruct(v_cache.shape, v_cache.dtype),
        ),
        input_output_aliases={3: 1, 4: 2},
    )
    context_len = np.zeros(0, np.int32) if context_len is None else context_len
    alibi_slopes = np.zeros(0, np.float32) if alibi_slopes is None else alibi_slopes
    return call(
        query, key, value, k_cache, v_cache, cache_len, num_tokens, context_len, alibi_slopes,
        scale=np.float32(scale), window=np.int64(min(window or 0, k_cache.shape[2])), allow_bfloat16=allow_bfloat16,
    )  # fmt: skip


def gather(table, indices):
    """Rows of a table [V, D] of any dtype: indices [...] int32 -> [..., D].

    Raises: when run, an XLA error naming an index outside 0 .. V - 1.
    """
    load_cpu_library()
    result = jax.ShapeDtypeStruct((indices.size, table.shape[1]), table.dtype)
    rows = jax.ffi.ffi_call(target_name("gather"), result)(table, indices.reshape(indices.size))
    return rows.reshape(*indices.shape, table.shape[1])


def linear_refusal(x, weight):
    """Why `linear` does not multiply these, in words: it takes few rows, or bfloat16 on a CPU with tiles; None if it does."""
    num_rows = math.prod(x.shape[:-1])
    is_bfloat16 = x.dtype == weight.dtype == jax.numpy.bfloat16
    if num_rows <= MAX_LINEAR_ROWS or is_bfloat16 and load_cpu_library().has_tiles:
        return None
    return f"{num_rows} rows in {weight.dtype.name}, the kernel takes up to {MAX_LINEAR_ROWS}"


def linear_isa(x):
    """What `linear` runs for these rows: tiles, or the library's `isa`."""
    library = load_cpu_library()
    return "tiles" if library.has_tiles and math.prod(x.shape[:-1]) > MAX_LINEAR_ROWS else library.isa


def packed_linear_isa(x):
    """What `packed_linear` runs for these rows: tiles, or the library's `isa`."""
    library = load_cpu_library()
    return "tiles" if library.has_tiles and math.prod(x.shape[:-1]) >= PACKED_TILE_ROWS else library.isa


def linear(x, weight, bias, out_dtype):
    """y = x W^T + b, bound by reading the weight once where rows are few.

    Args:
      x: [..., I], float32, bfloat16 or float16, of which `linear_refusal` says nothing.
      weight: [O, I], one of the same dtypes.
      bias: [O], dtype of x, or None.
      out_dtype: one of the same dtypes.
    Returns: [..., O]. Sums are float32; a row's result does not depend on the other rows.
    """
    load_cpu_library()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    bias = jax.numpy.zeros(0, x.dtype) if bias is None else bias.astype(x.dtype)
    result = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), out_dtype)
    return jax.ffi.ffi_call(target_name("linear"), result)(rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0])


def packed_linear(x, weight, bias, packing, out_dtype):
    """y = x W^T + b with a packed W, for any number of rows; beside integer codes x is quantised to 8 bits on the way.

    Args:
      x: [..., I], float32, bfloat16 or float16.
      weight: uint8 of packing.shape.
      bias: [O], dtype of x, or None.
      packing: poptransformer.packing.Packing.
      out_dtype: one of the same floating dtypes.
    Returns: [..., O]. A row's result does not depend on the other rows.
    """
    load_cpu_library()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    bias = jax.numpy.zeros(0, x.dtype) if bias is None else bias.astype(x.dtype)
    result = jax.ShapeDtypeStruct((rows.shape[0], packing.out_features), out_dtype)
    call = jax.ffi.ffi_call(target_name("packed_linear"), result)
    y = call(
        rows, weight, bias, bits=np.int64(packing.bits), group_size=np.int64(packing.group_size),
        is_float8=np.int64(packing.kind == "fp8"),
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], packing.out_features)


def step_program(arrays, results, numbers, aliases):
    """Run a program (poptransformer.backends.xla.step_program).

    Args:
      arrays: its arguments.
      results: Spec of each result.
      numbers: its steps, int64.
      aliases: argument -> result that is to take its memory: caches, updated in place where XLA may reuse them.
    Returns: tuple of the results.
    Raises: when run, an XLA error that names the step for numbers that do not fit the arrays, ids that a table does not have,
      or a row whose cache_len and num_tokens do not fit its cache; nothing but copies of caches is written then.
    """
    load_cpu_library()
    shapes = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    call = jax.ffi.ffi_call(target_name("step_program"), shapes, input_output_aliases=aliases)
    return tuple(call(*arrays, steps=numbers))


def wkv(key, value, time_decay, time_first, wkv_state, cache_len, num_tokens):
    """RWKV-4's recurrence over the new tokens of each row, in one pass.

    Args:
      key, value: [B, T, D], float32, bfloat16 or float16.
      time_decay, time_first: [D], float32.
      wkv_state: [B, 3, D], float32. Updated in place where XLA may reuse it (donated, or carried through a loop), else copied
        first.
      cache_len: [B], int32; rows with 0 begin without a token, whatever their state holds.
      num_tokens: [B], int32, how many of the T tokens are real; the others give 0 and change nothing.
    Returns: out [B, T, D] with the dtype of key, wkv_state.
    Raises: when run, an XLA error that names the row if num_tokens > T or a length is negative; nothing is written.
    """
    load_cpu_library()
    call = jax.ffi.ffi_call(
        target_name("wkv"),
        (jax.ShapeDtypeStruct(key.shape, key.dtype), jax.ShapeDtypeStruct(wkv_state.shape, wkv_state.dtype)),
        input_output_aliases={4: 1},
    )
    return call(key, value, time_decay, time_first, wkv_state, cache_len, num_tokens)


def _load():
    path, shown = _find()
    handle = _open(path, shown)
    _check_manifest(shown, handle.poptransformer_manifest().decode())
    handle.poptransformer_has_tiles.restype = ctypes.c_bool
    for op in OPS:
        jax.ffi.register_ffi_target(target_name(op), jax.ffi.pycapsule(getattr(handle, op)), platform="cpu")
    return CpuLibrary(
        path=path,
        ops=tuple(OPS),
        isa=handle.poptransformer_isa().decode(),
        num_threads=handle.poptransformer_num_threads(),
        has_tiles=handle.poptransformer_has_tiles(),
        _handle=handle,
    )


def _find():
    """The library's path, and how messages name it."""
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if chosen:
        if not os.path.isfile(chosen):
            raise UserError(f"{chosen}, named by {LIBRARY_VARIABLE}, not found; build it with `make`, {_WAY_OUT}")
        return pathlib.Path(chosen).resolve(), chosen
    path = pathlib.Path(__file__).resolve().parents[3] / DEFAULT_LIBRARY
    if not path.is_file():
        raise MissingLibraryError(f"{path} not found; build it with `make` in a checkout of the project, {_WAY_OUT}")
    return path, DEFAULT_LIBRARY


def _open(path, shown):
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(f"{shown} cannot be loaded ({error}); rebuild it with `make clean build`, {_WAY_OUT}") from error
    try:
        handle.poptransformer_manifest.restype = ctypes.c_char_p
        handle.poptransformer_isa.restype = ctypes.c_char_p
        handle.poptransformer_num_threads.restype = ctypes.c_int
        handle.poptransformer_read_bandwidth_gb_per_s.restype = ctypes.c_double
        handle.poptransformer_read_bandwidth_gb_per_s.argtypes = (ctypes.c_int64, ctypes.c_int)
    except AttributeError as error:
        raise UserError(
            f"{shown} is not a library of poptransformer's custom ops ({error}); build one with `make`, {_WAY_OUT}"
        ) from error
    return handle


def _check_manifest(shown, manifest):
    """Refuse a library whose manifest (see custom_ops/common/manifest.cc) does not fit the running jaxlib or this module."""
    entries = [line.split() for line in manifest.splitlines()]
    built_ffi = next(tuple(map(int, words[1:])) for words in entries if words[0] == "ffi")
    built_ops = {words[1]: int(words[2]) for words in entries if words[0] == "op"}
    problems = []
    if built_ffi != _running_ffi_version():
        problems.append(
            "it was built for XLA FFI {}.{}".format(*built_ffi)
            + ", and jaxlib {} has {}.{}".format(jax.lib.__version__, *_running_ffi_version())
        )
    lacking = [op for op in OPS if op not in built_ops]
    if lacking:
        problems.append(f"it lacks {', '.join(lacking)}")
    for op, version in OPS.items():
        if op in built_ops and built_ops[op] != version:
            problems.append(f"its {op} has version {built_ops[op]}, wanted {version}")
    if problems:
        raise UserError(f"{shown} is out of date: {'; '.join(problems)}; rebuild it with `make`, {_WAY_OUT}")


def _running_ffi_version():
    """(major, minor) of the FFI that the installed jaxlib speaks, read from the headers it ships."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    return tuple(int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", header)[1]) for part in ("MAJOR", "MINOR"))
