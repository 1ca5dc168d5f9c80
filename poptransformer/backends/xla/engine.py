"""The XLA backend: walks a graph once under `jax.jit`, keeps weights and states on one device, runs compiled programs."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from poptransformer.backends.engine import DeviceInfo, Engine, random_weight
from poptransformer.backends.xla.device_group import DeviceGroup
from poptransformer.backends.xla.devices import cpu_name, pick_devices, use_compile_cache
from poptransformer.backends.xla.fuse import fuse
from poptransformer.backends.xla.huge_pages import HugePages
from poptransformer.backends.xla.lowering import Context
from poptransformer.backends.xla.memory import drop_zeros, trim
from poptransformer.backends.xla.packed_rows import PackedRows, packed_specs, rearrange
from poptransformer.backends.xla.program import Program
from poptransformer.backends.xla.staged_program import StagedProgram
from poptransformer.errors import UnsupportedError, UserError

_FAMILIES = (
    "attention", "collective", "elementwise", "layer_norm", "linear", "loop", "packed_linear", "reduce", "rms_norm", "rope",
    "sample", "shape", "softmax", "token_shift", "wkv",
)  # fmt: skip
for _family in _FAMILIES:
    importlib.import_module(f"poptransformer.backends.xla.{_family}")  # enters its ops into LOWERINGS

logger = logging.getLogger(__name__)


class XlaEngine(Engine):
    """Runs graphs on JAX devices: one, one for each tensor-parallel rank, or such a group for each stage.

    Args:
      platform: "cpu", "cuda", "tpu", or "auto" for JAX's default.
      custom_ops: "auto" uses the project's kernels where they are built for the device, True demands them, False never.
      execution_cache_dir: folder of the persistent compile cache; None for the user's cache folder, "" for no cache.
      world_size: tensor-parallel ranks, R.
      num_stages: pipeline stages, each of R devices.
      cluster: the Cluster whose processes share the devices; None: this process alone.
    """

    def __init__(
        self, platform="auto", custom_ops="auto", execution_cache_dir=None, world_size=1, num_stages=1, cluster=None
    ):  # fmt: skip
        super().__init__()
        _refuse_forked_process()
        use_compile_cache(execution_cache_dir)
        self.groups = [
            DeviceGroup(devices) for devices in pick_devices(platform, world_size, num_stages, cluster.size if cluster else 1)
        ]
        self.world_size = world_size
        self.device = self.groups[0].ranks_here()[0][1]
        self._library, self._no_custom_ops = _custom_op_library(self.device.platform, custom_ops)
        self._gpu_kernels = _gpu_kernels(self.device.platform, custom_ops)
        self._rearrangements = {}
        self._parameters, self._states, self._programs = {}, {}, {}
        self._stages = {}  # of states, by name
        self._huge_pages = HugePages()

    @property
    def device_info(self):
        library = self._library
        kernels = (
            f"{', '.join(library.ops)} ({library.instructions}, {library.num_threads} threads)"
            if library
            else f"{', '.join(self._gpu_kernels)} (Pallas)"
            if self._gpu_kernels
            else "none (plain XLA)"
        )
        platform = "cuda" if self.device.platform == "gpu" else self.device.platform
        name = self.device_name
        world_size, num_stages = self.world_size, len(self.groups)
        if world_size * num_stages > 1:
            stages = f"{num_stages} stages of " if num_stages > 1 and world_size > 1 else ""
            ranks = f"{world_size} tensor-parallel ranks" if world_size > 1 else f"{num_stages} stages"
            virtual = "virtual devices on one " if platform == "cpu" else ""
            name = f"{stages}{ranks}: {world_size * num_stages} {virtual}{name}"
        return DeviceInfo(platform, name, kernels)

    def memory_bandwidth_gb_per_s(self):
        if self.device.platform == "cpu":
            return self._library.read_bandwidth_gb_per_s() if self._library else None
        return _copy_bandwidth_gb_per_s(self.device)

    @property
    def device_name(self):
        return cpu_name() if self.device.platform == "cpu" else self.device.device_kind

    def memory_bytes(self):
        return (self.device.memory_stats() or {}).get("bytes_limit")

    def _free(self):
        for array in (*jax.tree.leaves(self._parameters), *self._states.values()):
            if not array.is_deleted():
                array.delete()
        self._parameters, self._states, self._programs = {}, {}, {}
        self._huge_pages = HugePages()

    def _check_process(self):
        _refuse_forked_process()

    def _load_one(self, parameter, stages):
        is_cut = parameter.cut is not None

        def part(rank, device):
            array = parameter.load(rank) if parameter.load else self._random(parameter, rank, device)
            return self._huge_pages.place(array, device) if device.platform == "cpu" else array

        places = {}
        for stage in stages:
            group = self.groups[stage]
            if self._rearranges(parameter) and not parameter.load:
                places[stage] = self._random_rows(parameter, group, is_cut)
                continue
            if is_cut or group.world_size == 1 or not parameter.load:
                places[stage] = group.put_parts(part, parameter.shape, is_cut)
            else:
                places[stage] = group.put(parameter.load(0))
            if self._rearranges(parameter):
                places[stage] = self._rearrange(parameter.packing, stage, is_cut)(places[stage])
            jax.block_until_ready(places[stage])
        self._parameters[parameter.name] = places

    def _rearranges(self, parameter):
        """Whether a parameter lies on the devices as PackedRows: the CPU's kernel takes packed weights as they are."""
        return parameter.packing is not None and not self._library

    def _rearrange(self, packing, stage, is_cut):
        """A function that rearranges every rank's part of a packed weight, compiled once for each shape."""
        key = packing, stage, is_cut
        if key not in self._rearrangements:
            on_ranks = self.groups[stage].on_ranks(lambda packed: rearrange(packed, packing), (is_cut,), is_cut)
            self._rearrangements[key] = jax.jit(on_ranks)
        return self._rearrangements[key]

    def _random_rows(self, parameter, group, is_cut):
        """Random packed weights as they lie, drawn on the devices: a host takes half a minute for 7 GB."""

        def part(rank, device, spec, number):
            with jax.default_device(device):
                if number is not None:
                    return jnp.full(spec.shape, number, spec.dtype)
                seed = zlib.crc32(parameter.name.encode()) + (rank if is_cut else 0)
                draws = jax.random.bits(jax.random.key(seed), (*spec.shape, 4), jnp.uint8)
                return jax.lax.bitcast_convert_type(jnp.asarray(parameter.packing.drawn_codes)[draws], spec.dtype)

        scale, minimum = (*parameter.packing.drawn_numbers, None)[:2]
        numbers = PackedRows(None, scale, minimum)
        return PackedRows(*(
            None if spec is None else group.put_parts(functools.partial(part, spec=spec, number=number), spec.shape, is_cut)
            for spec, number in zip(packed_specs(parameter.packing), numbers, strict=True)
        ))  # fmt: skip

    def _random(self, parameter, rank, device):
        if parameter.packing:
            return random_weight(parameter, rank)
        with jax.default_device(device):
            key = jax.random.key(zlib.crc32(parameter.name.encode()))
            whole = _draw(key, parameter.logical_shape, jnp.dtype(parameter.dtype), parameter.init)
            if parameter.cut is None:
                return whole
            indices, axis = parameter.cut.indices(rank), parameter.cut.axis
            mask = (indices >= 0).reshape((-1,) + (1,) * (whole.ndim - 1 - axis))
            return jnp.where(mask, jnp.take(whole, np.maximum(indices, 0), axis=axis), 0).astype(whole.dtype)

    def _compile_one(self, name, graph):
        _refuse_64_bits(graph)
        library = self._library
        context = Context(
            self.device.platform,
            frozenset((library.ops if library else ()) + self._gpu_kernels),
            library.isa if library else "Pallas" if self._gpu_kernels else "",
            self._no_custom_ops,
            any(parameter.packing for parameter, _ in graph.parameters.values()),
            {
                value: packed_specs(parameter.packing)
                for parameter, value in graph.parameters.values()
                if self._rearranges(parameter)
            },
        )
        self._stages |= graph.stages_of()
        trim()
        if len(self.groups) == 1:
            if "step_program" in context.custom_ops:
                context.fusion = fuse(graph, library.has_tiles)
            self._programs[name] = Program(graph, self.groups[0], context)
        else:
            self._programs[name] = StagedProgram(graph, self.groups, context)
        trim()
        return [choice for choice in context.choices.values() if choice.op != "loop"]

    def _create_states(self, states):
        for state in states:
            group = self.groups[self._stages[state.name][0]]
            self._states[state.name] = group.zeros(state.spec, state.is_cut)
            if self.device.platform == "cpu":
                drop_zeros(self._states[state.name])

    def _run_one(self, name, inputs):
        outputs, states = self._programs[name](self._parameters, self._states, inputs)
        self._states |= states
        if not outputs:
            jax.block_until_ready(states)
        return {key: _to_numpy(array) for key, array in outputs.items()}


def _to_numpy(array):
    """An output, which all ranks share, as the NumPy array that the process's first device has."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = array.addressable_data(0)
    return np.asarray(array)


_jax_process = None  # the process whose JAX is up


def _refuse_forked_process():
    """JAX's threads do not come along into a forked process: whatever runs there waits for them for ever."""
    global _jax_process
    _jax_process = _jax_process or os.getpid()
    if os.getpid() != _jax_process:
        raise UserError("this process was forked after JAX was started and cannot run; use multiprocessing's spawn instead")


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


def _gpu_kernels(platform, custom_ops):
    """Names of the ops that have a kernel on GPUs; these are Python, there is nothing to build."""
    return ("packed_linear",) if platform == "gpu" and custom_ops else ()


def _custom_op_library(platform, custom_ops):
    """Find the kernels for a platform, or say by name that plain XLA runs instead: (library or None, why there is none)."""
    if not isinstance(custom_ops, (bool, str)) or isinstance(custom_ops, str) and custom_ops != "auto":
        raise UserError(f"custom_ops={custom_ops!r}: wanted true, false or auto")
    if custom_ops is False:
        return None, "custom_ops is false"
    if platform == "gpu":
        return None, "no kernel for gpu yet"
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
