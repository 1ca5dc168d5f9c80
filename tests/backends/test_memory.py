"""Memory that is given back to the system: caches that have not been written, and what compiling leaves."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poptransformer.backends.xla.memory import drop_zeros, trim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is counted on Linux only")


def resident_bytes():
    """Memory of this process that no file stands for."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) << 10


def zeros(size):
    device = jax.local_devices(backend="cpu")[0]
    return jnp.zeros(size, jnp.uint8, device=device).block_until_ready()


def test_zeros_take_no_memory_until_they_are_written():
    size = 64 << 20
    zeros(size).delete()  # whatever the first of its kind needs beside it
    before = resident_bytes()
    array = zeros(size)
    assert resident_bytes() - before > size // 2
    drop_zeros(array)
    assert resident_bytes() - before < size // 8
    write = jax.jit(lambda x, at: jax.lax.dynamic_update_slice(x, jnp.ones(100, jnp.uint8), (at,)), donate_argnums=0)
    address = array.unsafe_buffer_pointer()
    array = write(array, size // 2)
    assert array.unsafe_buffer_pointer() == address
    assert resident_bytes() - before < size // 8
    values = np.asarray(array)
    assert values.sum() == 100 and values[size // 2 : size // 2 + 100].all()


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 5000, 3 * 4096 + 1])
def test_small_ones_stay_zero(size):
    array = zeros(size)
    drop_zeros(array)
    assert not np.asarray(array).any()


def test_trim():
    blocks = [np.ones(100_000, np.uint8) for _ in range(500)]  # below malloc's threshold for mappings of their own
    before = resident_bytes()
    del blocks
    trim()
    assert resident_bytes() < before - 25_000_000
