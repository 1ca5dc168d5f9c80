"""REGISTER: what is fixed while one model is built (precision, world_size, batch_size, ...).

Layers and models read it in their constructors, never at import. Values live in a scope and in the thread (or task) that
opened it, so two Sessions with different settings can be built at the same moment:

    with REGISTER.scope(batch_size=4, dtype=np.float32):
        model = GPT2(config)
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from poptransformer.errors import UserError, near_miss


class Register:
    """A set of declared keys whose values are scoped; see the module's docstring."""

    def __init__(self):
        self._meanings: dict[str, str] = {}
        self._values: contextvars.ContextVar[dict | None] = contextvars.ContextVar("register", default=None)

    def declare(self, key: str, meaning: str) -> None:
        """Add a key. Declaring one twice is an error: two parts of the project would mean different things by it."""
        if key in self._meanings:
            raise UserError(f"register key {key!r} is already declared: {self._meanings[key]}")
        self._meanings[key] = meaning

    @contextlib.contextmanager
    def scope(self, **values) -> Iterator[Register]:
        """Set keys for the code inside the `with` block; the values before it come back afterwards."""
        for key in values:
            self._check(key)
        token = self._values.set({**(self._values.get() or {}), **values})
        try:
            yield self
        finally:
            self._values.reset(token)

    def __getattr__(self, key: str):
        if key.startswith("_"):
            raise AttributeError(key)
        self._check(key)
        values = self._values.get() or {}
        if key not in values:
            raise UserError(f"register key {key!r} has no value here; set it with REGISTER.scope({key}=...)")
        return values[key]

    def _check(self, key):
        if key not in self._meanings:
            raise UserError(f"unknown register key {key!r}{near_miss(key, self._meanings)}; keys: {', '.join(self._meanings)}")


REGISTER = Register()
REGISTER.declare("batch_size", "rows that run side by side, B")
REGISTER.declare("max_length", "positions of a row's cache, prompt and new tokens together, S")
REGISTER.declare("weight_dtype", "numpy dtype of matrices and embeddings")
REGISTER.declare("packing", "how matrices are packed, (kind, group_size) as in Packing, or None for plain ones")
REGISTER.declare("dtype", "numpy dtype of activations, norms and biases")
REGISTER.declare("cache_dtype", "numpy dtype of the KV cache")
REGISTER.declare("world_size", "tensor-parallel ranks, R")
