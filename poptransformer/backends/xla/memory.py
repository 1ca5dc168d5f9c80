"""Memory of the host that nobody needs, given back to the system: on Linux; elsewhere these functions do nothing."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

_MADV_DONTNEED = 4  # Linux's number


def trim() -> None:
    """Give back what malloc keeps after frees.

    XLA's compiler leaves 30 to 90 MB behind, which would stay beside all that comes later. Takes 1 to 15 ms.
    """
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):  # glibc's alone
        libc.malloc_trim(0)


def drop_zeros(array) -> None:
    """Give back the pages of a jax.Array in the CPU's memory that holds nothing but zeros.

    A page that is read or written again is there again, full of zeros, as anonymous memory is; so a KV cache takes the memory
    of the positions that have been used, and not of all there is room for.
    """
    libc = _libc()
    if libc is None:
        return
    for shard in array.block_until_ready().addressable_shards:
        begin = shard.data.unsafe_buffer_pointer()
        end = (begin + shard.data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > begin:
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)  # refused: then it stays


@functools.cache
def _libc():
    return ctypes.CDLL(None) if sys.platform == "linux" else None
