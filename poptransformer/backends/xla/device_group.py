"""DeviceGroup: the devices of one stage, one for each tensor-parallel rank, and how arrays lie on them.

An array that all ranks share is replicated. One that each rank has its own of is a single JAX array whose first axis is cut
over the ranks: rank r has the r-th part, in the shape that the graph says.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

RANKS = "ranks"  # name of the mesh axis


class DeviceGroup:
    """Devices that run one stage together.

    Args:
      devices: one JAX device for each rank; those of other processes count too.
    """

    def __init__(self, devices):
        self.devices = list(devices)
        self.world_size = len(self.devices)
        if self.world_size == 1:
            self._shared = self._cut = SingleDeviceSharding(self.devices[0])
        else:
            self._mesh = Mesh(np.array(self.devices), (RANKS,))
            self._shared = NamedSharding(self._mesh, PartitionSpec())
            self._cut = NamedSharding(self._mesh, PartitionSpec(RANKS))
        self._is_local = all(device.process_index == jax.process_index() for device in self.devices)

    def ranks_here(self):
        """(rank, device) of this process's devices."""
        here = jax.process_index()
        return [(rank, device) for rank, device in enumerate(self.devices) if device.process_index == here]

    def put(self, array):
        """Give every rank the same array: a NumPy array, or a JAX array that lies elsewhere in this process."""
        if self._is_local:
            return jax.device_put(array, self._shared)
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            array = array.addressable_data(0)
        array = array if isinstance(array, jax.Array) else np.asarray(array)
        return self.put_parts(lambda rank, device: array, array.shape, False)

    def put_parts(self, parts, shape, is_cut):
        """Join what `ranks_here` have: a JAX or NumPy array for each of them, of the graph's shape.

        Args:
          parts: (rank, device) -> array; called once for each rank of this process.
          shape: of one rank.
          is_cut: whether they are parts; False: they are all the same.
        """
        arrays = [jax.device_put(parts(rank, device), device) for rank, device in self.ranks_here()]
        if self.world_size == 1:
            return arrays[0]
        sharding = self._cut if is_cut else self._shared
        return jax.make_array_from_single_device_arrays(self._whole(shape, is_cut), sharding, arrays)

    def zeros(self, spec, is_cut):
        """Zeros of a spec on every rank."""

        def part(rank, device):
            return jnp.zeros(spec.shape, spec.dtype, device=device)

        return self.put_parts(part, spec.shape, is_cut)

    def abstract(self, spec, is_cut):
        """What a program is told of an array before it is compiled."""
        sharding = self._cut if is_cut else self._shared
        return jax.ShapeDtypeStruct(self._whole(spec.shape, is_cut), spec.dtype, sharding=sharding)

    def on_ranks(self, function, arguments_are_cut, results_are_cut):
        """Make a function of one rank's arrays one of all ranks' arrays.

        Args:
          arguments_are_cut, results_are_cut: bools in the structure of the arguments (a tuple) and of the results.
        """
        if self.world_size == 1:
            return function

        def spec(is_cut):
            return PartitionSpec(RANKS) if is_cut else PartitionSpec()

        in_specs, out_specs = (jax.tree.map(spec, tree) for tree in (arguments_are_cut, results_are_cut))
        # What is equal on all ranks is known from the graph (rank_values); JAX cannot see through the project's kernels.
        return jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _whole(self, shape, is_cut):
        return (self.world_size * shape[0], *shape[1:]) if is_cut and self.world_size > 1 else tuple(shape)
