"""Backends: what compiles and runs a graph. Each is imported only when it is asked for."""

from __future__ import annotations

from poptransformer.errors import UnsupportedError

BACKENDS = ("xla", "reference")


def make_engine(
    backend="xla", platform="auto", custom_ops="auto", execution_cache_dir=None, world_size=1, num_stages=1
):  # fmt: skip
    """Make the engine of a backend; the arguments are Session's.

    Raises: UnsupportedError for an unknown backend; UserError for a platform or custom op that is not there.
    """
    if not isinstance(backend, str):
        raise UnsupportedError(f"backend={backend!r} is not supported; this version has {', '.join(BACKENDS)}")
    if backend == "xla":
        from poptransformer.backends.xla.engine import XlaEngine

        return XlaEngine(platform, custom_ops, execution_cache_dir, world_size, num_stages)
    if backend == "reference":
        from poptransformer.backends.reference.engine import ReferenceEngine

        return ReferenceEngine(world_size=world_size)
    raise UnsupportedError(f"backend={backend!r} is not supported; this version has {', '.join(BACKENDS)}")
