"""Weights in huge pages: where they lie, that they are right, and that their memory goes when they do."""

import gc
import mmap
import pathlib
import re
import weakref

import jax
import numpy as np
import pytest
from run_op import normal

from poptransformer.backends.xla import huge_pages
from poptransformer.graph import bfloat16

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")


def address(array):
    return array.unsafe_buffer_pointer()


def test_arrays_lie_one_behind_the_other():
    pages, device = huge_pages.HugePages(), jax.devices("cpu")[0]
    arrays = [normal((3, 5)), np.arange(7, dtype=np.uint8), normal((), bfloat16), normal((0, 4)), normal((33,), bfloat16)]
    placed = [pages.place(array, device) for array in arrays]
    for array, there in zip(arrays, placed, strict=True):
        assert there.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(there), array)
    first = address(placed[0])
    assert first % (2 << 20) == 0
    assert [address(there) - first for there in (placed[1], placed[2], placed[4])] == [64, 128, 192]


def test_what_does_not_fit_gets_a_chunk_of_its_own(monkeypatch):
    monkeypatch.setattr(huge_pages, "_CHUNK_BYTES", 4096)
    pages, device = huge_pages.HugePages(), jax.devices("cpu")[0]
    small, large, last = (pages.place(normal(n, seed=n), device) for n in (10, 5000, 20))
    for n, there in ((10, small), (5000, large), (20, last)):
        np.testing.assert_array_equal(np.asarray(there), normal(n, seed=n))
    assert address(large) % (2 << 20) == 0


def test_memory_goes_with_the_last_array():
    pages, device = huge_pages.HugePages(), jax.devices("cpu")[0]
    there = pages.place(normal(100), device)
    chunk = weakref.ref(pages._chunk.base if pages._chunk.base is not None else pages._chunk)
    del pages
    gc.collect()
    assert chunk() is not None
    there.block_until_ready().delete()
    del there
    gc.collect()
    assert chunk() is None


def test_a_system_without_them(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    there = huge_pages.HugePages().place(normal((2, 3)), jax.devices("cpu")[0])
    np.testing.assert_array_equal(np.asarray(there), normal((2, 3)))


def test_the_system_is_asked_for_huge_pages():
    """Of private memory: of shared memory it gives none, unless it is set up to."""
    begin = address(huge_pages.HugePages().place(normal((300_000,)), jax.devices("cpu")[0]))
    smaps = pathlib.Path("/proc/self/smaps").read_text(encoding="utf-8")
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (\S+).*?^VmFlags: (.*?)$", smaps, re.M | re.S)
    if not areas:
        pytest.skip("this kernel does not tell what was asked of it")
    ((permissions, flags),) = [area[2:] for area in areas if int(area[0], 16) <= begin < int(area[1], 16)]
    assert permissions == "rw-p"
    assert "hg" in flags.split()
