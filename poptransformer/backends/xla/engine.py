"""The XLA backend: walks a graph once under `jax.jit`, keeps weights and states on one device, runs compiled programs."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import logging
import os
import threading
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from poptransformer.backends.engine import DeviceInfo, Engine, random_weight
from poptransformer.backends.xla.devices import cpu_name, pick_device, use_compile_cache
from poptransformer.backends.xla.lowering import LOWERINGS, Context
from poptransformer.backends.xla.memory import drop_zeros, trim
from poptransformer.errors import UnsupportedError, UserError

_FAMILIES = (
    "attention", "elementwise", "layer_norm", "linear", "loop", "packed_linear", "reduce", "rms_norm", "rope", "sample",
    "shape", "softmax", "token_shift", "wkv",
)  # fmt: skip
for _family in _FAMILIES:
    importlib.import_module(f"poptransformer.backends.xla.{_family}")  # enters its ops into LOWERINGS

logger = logging.getLogger(__name__)


class XlaEngine(Engine):
    """Runs graphs on one JAX device.

    Args:
      platform: "cpu", "cuda", "tpu", or "auto" for JAX's default.
      custom_ops: "auto" uses the project's kernels where they are built for the device, True demands them, False never.
      execution_cache_dir: folder of the persistent compile cache; None for the user's cache folder, "" for no cache.
    """

    def __init__(self, platform="auto", custom_ops="auto", execution_cache_dir=None):
        super().__init__()
        _refuse_forked_process()
        use_compile_cache(execution_cache_dir)
        self.device = pick_device(platform)
        self._library, self._no_custom_ops = _custom_op_library(self.device.platform, custom_ops)
        self._parameters, self._states, self._programs = {}, {}, {}

    @property
    def device_info(self):
        library = self._library
        kernels = (
            f"{', '.join(library.ops)} ({library.instructions}, {library.num_threads} threads)"
            if library
            else "none (plain XLA)"
        )
        platform = "cuda" if self.device.platform == "gpu" else self.device.platform
        return DeviceInfo(platform, cpu_name() if platform == "cpu" else self.device.device_kind, kernels)

    def memory_bandwidth_gb_per_s(self):
        if self.device.platform == "cpu":
            return self._library.read_bandwidth_gb_per_s() if self._library else None
        return _copy_bandwidth_gb_per_s(self.device)

    def _free(self):
        for array in (*self._parameters.values(), *self._states.values()):
            if not array.is_deleted():
                array.delete()
        self._parameters, self._states, self._programs = {}, {}, {}

    def _check_process(self):
        _refuse_forked_process()

    def _load_one(self, parameter):
        if parameter.load:
            array = jax.device_put(parameter.load(), self.device)
        else:
            array = self._random(parameter)
        self._parameters[parameter.name] = array.block_until_ready()

    def _random(self, parameter):
        if parameter.packing:
            return jax.device_put(random_weight(parameter), self.device)
        with jax.default_device(self.device):
            key = jax.random.key(zlib.crc32(parameter.name.encode()))
            return _draw(key, parameter.shape, jnp.dtype(parameter.dtype), parameter.init)

    def _compile_one(self, name, graph):
        """Trace and compile ahead of the first run: XLA then knows every shape and which buffers it may overwrite."""
        _refuse_64_bits(graph)
        library = self._library
        context = Context(
            self.device.platform, frozenset(library.ops if library else ()), library.isa if library else "", self._no_custom_ops
        )

        def program(parameters, updated, kept, inputs):
            values = {value: jnp.asarray(array) for value, array in graph.constants.items()}
            values |= {value: parameters[key] for key, (_, value) in graph.parameters.items()}
            values |= {value: (updated | kept)[key] for key, (_, value) in graph.states.items()}
            context.evaluate = functools.partial(_evaluate, context, values)
            outputs = dict(zip(graph.outputs, context.evaluate(graph, inputs), strict=True))
            return outputs, {key: values[value] for key, value in graph.state_updates.items()}

        sharding = jax.sharding.SingleDeviceSharding(self.device)

        def abstract(spec):
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

        parameters = {key: abstract(parameter.spec) for key, (parameter, _) in graph.parameters.items()}
        states = {key: abstract(state.spec) for key, (state, _) in graph.states.items()}
        inputs = {key: abstract(value.spec) for key, value in graph.inputs.items()}
        updated = {key: spec for key, spec in states.items() if key in graph.state_updates}
        kept = {key: spec for key, spec in states.items() if key not in graph.state_updates}
        jitted = jax.jit(program, donate_argnums=1, keep_unused=True)
        trim()
        self._programs[name] = _uninterrupted(jitted.lower(parameters, updated, kept, inputs).compile)
        trim()
        return [choice for choice in context.choices.values() if choice.op != "loop"]

    def _create_states(self, states):
        for state in states:
            self._states[state.name] = jnp.zeros(state.shape, state.dtype, device=self.device)
            if self.device.platform == "cpu":
                drop_zeros(self._states[state.name])

    def _run_one(self, name, inputs):
        graph = self.graphs[name]
        parameters = {key: self._parameters[key] for key in graph.parameters}
        updated = {key: self._states[key] for key in graph.states if key in graph.state_updates}
        kept = {key: self._states[key] for key in graph.states if key not in graph.state_updates}
        outputs, states = self._programs[name](parameters, updated, kept, jax.device_put(inputs, self.device))
        self._states |= states
        if not outputs:
            jax.block_until_ready(states)
        return {key: np.asarray(array) for key, array in jax.device_get(outputs).items()}


def _evaluate(context, values, graph, inputs):
    """Emit a graph's nodes into the program that is being traced; `values` has what the graphs around it computed."""
    for key, value in graph.inputs.items():
        values[value] = inputs[key]
    for node in graph.nodes:
        arrays = [None if value is None else values[value] for value in node.inputs]
        with jax.named_scope(node.scope or node.op), context.lowering(node):
            results = LOWERINGS[node.op](context, *arrays, **node.attributes)
        results = results if isinstance(results, (tuple, list)) else (results,)
        for value, array in zip(node.outputs, results, strict=True):
            assert array.shape == value.shape and array.dtype == value.dtype, (
                f"{node.scope}: {node.op} gave {array.dtype}{array.shape}, not {value.spec}"
            )
            values[value] = array
    return [values[value] for value in graph.outputs.values()]


_jax_process = None  # the process whose JAX is up


def _refuse_forked_process():
    """JAX's threads do not come along into a forked process: whatever runs there waits for them for ever."""
    global _jax_process
    _jax_process = _jax_process or os.getpid()
    if os.getpid() != _jax_process:
        raise UserError("this process was forked after JAX was started and cannot run; use multiprocessing's spawn instead")


def _uninterrupted(function):
    """Call a function in a thread of its own and wait for it.

    An interrupt then comes at once, here, and the interpreter waits for the thread before it ends: were XLA's compiler
    interrupted itself, it would go on while the process is taken down around it, and crash (seen with jaxlib 0.10).
    """
    future = concurrent.futures.Future()

    def call():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="compile", daemon=False).start()
    return future.result()


def _refuse_64_bits(graph):
    """JAX would compute in 32 bits without a word."""
    registered = [*graph.inputs.values(), *graph.constants]
    registered += [value for _, value in (*graph.parameters.values(), *graph.states.values())]
    for value in (*registered, *(value for node in graph.walk() for value in node.outputs)):
        if value.dtype.name in ("float64", "int64", "uint64"):
            raise UnsupportedError(f"graph {graph.name!r}: backend xla has no {value.dtype} ({value.name}); cast to 32 bits")


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key, shape, dtype, init):
    if init != "normal":
        return jnp.full(shape, 1 if init == "ones" else 0, dtype)
    return (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(dtype)


def _copy_bandwidth_gb_per_s(device, num_bytes=1 << 29, repetitions=20):
    """Bytes read and written per second by a copy on the device, best of a few; what a memory-bound program can reach.

    None where the device has no room for two buffers of num_bytes beside what is there.
    """
    try:
        source = jnp.zeros(num_bytes // 4, jnp.float32, device=device).block_until_ready()
        return _time_copies(source, num_bytes, repetitions)
    except jax.errors.JaxRuntimeError as error:
        logger.warning("memory bandwidth not measured: %s", str(error).splitlines()[0])
        return None


def _time_copies(source, num_bytes, repetitions):
    copy = jax.jit(lambda x: x + 1)
    copy(source).block_until_ready()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repetitions):
            last = copy(source)
        last.block_until_ready()
        seconds.append((time.perf_counter() - begin) / repetitions)
    return 2 * num_bytes / min(seconds) / 1e9


def _custom_op_library(platform, custom_ops):
    """Find the kernels for a platform, or say by name that plain XLA runs instead: (library or None, why there is none)."""
    if not isinstance(custom_ops, (bool, str)) or isinstance(custom_ops, str) and custom_ops != "auto":
        raise UserError(f"custom_ops={custom_ops!r}: wanted true, false or auto")
    if custom_ops is False:
        return None, "custom_ops is false"
    if platform != "cpu":
        if custom_ops is True:
            raise UserError(f"custom_ops=true: there are no custom ops for {platform!r} yet; set custom_ops: auto or false")
        logger.info("no custom ops for %s yet: every op runs as plain XLA", platform)
        return None, f"no kernels for {platform} yet"
    from poptransformer.backends.xla.custom_ops import MissingLibraryError, load_cpu_library

    try:
        return load_cpu_library(), ""
    except MissingLibraryError as error:
        if custom_ops is True:
            raise
        logger.warning("attention, gather, linear and wkv run as plain XLA, several times slower: %s", error)
        return None, "the kernels are not built"
