"""Backends: what compiles and runs a graph. Each is imported only when it is asked for."""

from __future__ import annotations

from poptransformer.errors import UnsupportedError

BACKENDS = ("xla", "reference")


def make_engine(
    backend="xla", platform="auto", custom_ops="auto", execution_cache_dir=None, world_size=1, num_stages=1, cluster=None
):  # fmt: skip
    """Make the engine of a backend; the arguments are Session's.

    Args:
      cluster: the Cluster that this process has joined, or None.
    Raises: UnsupportedError for an unknown backend; UserError for a platform or custom op that is not there.
    """
    if backend == "xla":
        from poptransformer.backends.xla.engine import XlaEngine

        arguments = (platform, custom_ops, execution_cache_dir, world_size, num_stages)
        if cluster is None or not cluster.leads:
            return XlaEngine(*arguments, cluster=cluster)
        from poptransformer.backends.xla.leading_engine import LeadingEngine

        return LeadingEngine(*arguments, cluster=cluster)
    if backend == "reference":
        from poptransformer.backends.reference.engine import ReferenceEngine

        return ReferenceEngine(world_size=world_size)
    raise UnsupportedError(f"backend={backend!r} is not supported; this version has {', '.join(BACKENDS)}")


def join_cluster(backend, distributed):
    """Join the processes of session.distributed; None for none. Raises: UserError, UnsupportedError."""
    if distributed is None:
        return None
    if backend != "xla":
        raise UnsupportedError(f"distributed goes with backend xla, not with {backend!r}")
    from poptransformer.backends.xla import cluster

    return cluster.join_cluster(distributed)
