"""Weights in the CPU's huge pages, one behind the other.

A decode step reads every weight once. In pages of 4 KiB each page costs a walk through the page tables, in a virtual machine
a long one: measured on one core there, 13 GB/s instead of 19.
"""

from __future__ import annotations

import mmap

import jax
import numpy as np

_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 64 << 20  # asked of the system at a time; what is not written takes no memory
_ALIGN = 64  # what XLA wants of memory that it does not copy


class HugePages:
    """Memory for arrays that stay. Its chunks live as long as the arrays in them."""

    def __init__(self):
        self._chunk = np.empty(0, np.uint8)  # what is left of the newest

    def place(self, array, device):
        """Copy an array here.

        Args:
          array: NumPy or JAX array of the host.
          device: a JAX device of the CPU.
        Returns: jax.Array on the device that reads the copy where it lies; where the system has no huge pages to ask for, what
          JAX makes of the array.
        """
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return jax.device_put(array, device)
        array = np.asarray(array)
        copy = self._take(array.nbytes).view(array.dtype).reshape(array.shape)
        copy[...] = array
        return jax.device_put(copy, device, may_alias=True)

    def _take(self, num_bytes):
        wanted = -(-num_bytes // _ALIGN) * _ALIGN
        if wanted > self._chunk.size:
            self._chunk = _chunk(max(wanted, _CHUNK_BYTES))
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[wanted:]
        return taken


def _chunk(num_bytes):
    """Zeros that begin with a huge page, if the system has some."""
    # Private: shared memory, which is mmap's default, gets huge pages only where the system is set up for it.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them: pages of the usual size serve as well, more slowly
    bytes_ = np.frombuffer(memory, np.uint8)
    begin = -bytes_.ctypes.data % _HUGE_PAGE
    return bytes_[begin : begin + num_bytes]
