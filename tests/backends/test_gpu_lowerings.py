"""What XLA is given on GPUs only: run here on the CPU, beside the references. tests/backends/test_cuda.py runs it on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_op import normal
from tolerance import assert_close

from poptransformer.backends.xla import packed_linear_gpu, packed_rows
from poptransformer.backends.xla.compiler_options import OPTIONS, compiler_options
from poptransformer.backends.xla.engine import _gpu_kernels
from poptransformer.backends.xla.linear import _parts_of_row
from poptransformer.backends.xla.lowering import LOWERINGS, Context
from poptransformer.ops.layer_norm import layer_norm_reference
from poptransformer.packing import Packing

GPU = Context("gpu", frozenset(("packed_linear",)))
f32 = np.float32


def rounded(x):
    """x [B, I] as the kernel has it: 8 bits, a step for each 32 inputs."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    step = np.abs(padded).max(-1, keepdims=True) / 127
    codes = np.rint(np.divide(padded, step, out=np.zeros_like(padded), where=step > 0))
    return (codes * step).reshape(len(x), -1)[:, : x.shape[1]]


KERNEL_CASES = {  # kind -> group_size, outputs, inputs, rows: part of a chunk of words, and more chunks than are unrolled
    "int8": [(32, 9, 4224, 1), (-1, 5, 33, 3)],
    "int4": [(128, 9, 8320, 1), (64, 17, 100, 3)],
}


@pytest.mark.parametrize("kind", KERNEL_CASES)
def test_packed_kernel_multiplies_rounded_rows(kind):
    for group_size, num_outputs, num_inputs, num_rows in KERNEL_CASES[kind]:
        packing = Packing(kind, group_size, num_outputs, num_inputs)
        packed = packing.pack(normal((num_outputs, num_inputs), f32, 1))
        x = normal((num_rows, num_inputs), f32, 2)
        x[:, :20] *= 1000
        rows = packed_rows.rearrange(jnp.asarray(packed), packing)
        y = packed_linear_gpu.few_rows_product(jnp.asarray(x), rows, packing, interpret=True)
        wanted = (rounded(x).astype(np.float64) @ packing.unpack(packed).astype(np.float64).T).astype(f32)
        assert_close(y, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_packed_kernel_hides_nothing_that_is_not_finite():
    packing = Packing("int8", 32, 4, 96)
    rows = packed_rows.rearrange(jnp.asarray(packing.pack(normal((4, 96), f32))), packing)
    x = np.tile(normal((1, 96), f32), (4, 1))
    x[0, 5], x[1, 40], x[2, 95], x[3] = np.nan, np.inf, -np.inf, 0
    y = np.asarray(packed_linear_gpu.few_rows_product(jnp.asarray(x), rows, packing, interpret=True))
    assert not np.isfinite(y[:3]).any() and (y[3] == 0).all()


def test_rearranged_weights_are_the_same():
    for packing in (Packing("int8", 64, 33, 130), Packing("int4", 32, 17, 100), Packing("fp8", -1, 5, 70)):
        packed = packing.pack(normal((packing.out_features, packing.in_features), f32))
        rows = packed_rows.rearrange(jnp.asarray(packed), packing)
        for array, spec in zip(rows, packed_rows.packed_specs(packing), strict=True):
            assert array is None and spec is None or (array.shape, array.dtype) == (spec.shape, spec.dtype)
        assert_close(packed_rows.unpack(rows, packing), packing.unpack(packed))


@pytest.mark.parametrize(("num_inputs", "parts"), [(4096, 1), (11008, 2), (16384, 1), (22016, 4), (33, 1), (100000, 1)])
def test_one_row_is_added_up_in_parts(num_inputs, parts):
    assert _parts_of_row(num_inputs) == parts
    x, weight, bias = normal((1, 1, num_inputs), f32), normal((5, num_inputs), f32), normal(5, f32)
    wanted = (x.astype(np.float64) @ weight.T.astype(np.float64) + bias).astype(f32)
    y = LOWERINGS["linear"](GPU, *map(jnp.asarray, (x, weight, bias)), np.dtype(f32))
    assert_close(y, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_layer_norm_in_one_pass():
    """A mean far from 0, where squares less the mean's square would have no digits left."""
    x = normal((2, 3, 1600), f32) + 300
    weight, bias = normal(1600, f32), normal(1600, f32)
    (wanted,) = layer_norm_reference(x, weight, bias, 1e-5)
    y = LOWERINGS["layer_norm"](GPU, *map(jnp.asarray, (x, weight, bias)), 1e-5)
    assert_close(y, wanted, atol=2e-3)  # float32 has steps of 3e-5 at 300, and the CPU joins one number after the other


def test_this_xla_knows_the_compiler_options(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_force_host_platform_device_count=2")
    assert compiler_options("gpu").keys() == OPTIONS["gpu"].keys() - {"xla_gpu_enable_command_buffer"}
    monkeypatch.delenv("XLA_FLAGS")
    assert compiler_options("cpu") is None
    double = jax.jit(lambda x: 2 * x).lower(f32(1)).compile(compiler_options("gpu"))
    assert double(f32(4)) == 8


def test_kernels_on_gpus_can_be_left_out():
    assert _gpu_kernels("gpu", "auto") == _gpu_kernels("gpu", True) == ("packed_linear",)
    assert not _gpu_kernels("gpu", False) and not _gpu_kernels("cpu", True)
