"""Which layers go on which device, what that takes, and whether it fits.

footprint = measure(model)
plan = plan_stages(footprint, "auto", num_stages=2, device=find_device("h200"))
plan.check()
print(plan.table())
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from poptransformer.errors import UserError
from poptransformer.planning.balance import balance
from poptransformer.planning.devices import Device
from poptransformer.planning.footprint import Footprint
from poptransformer.planning.text import aligned, ranges, share, size
from poptransformer.session_arguments import count_stages

MS_PER_S = 1000


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one device of a stage holds; with tensor parallelism each rank has one, and all are alike.

    Attributes:
      index: counted from 0.
      first_layer, num_layers: its layers; num_layers 0 for none.
      has_embedding, has_head: whether it is the first, the last stage.
      weight_bytes, cache_bytes, activation_bytes: on each rank.
      read_bytes: of weights, in a decode step on each rank.
    """

    index: int
    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    read_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    @property
    def holds(self) -> str:
        """What is on it, in words: "embedding, layers 0-5"."""
        words = ["embedding"] * self.has_embedding
        if self.num_layers:
            words.append(f"layer{'s' * (self.num_layers > 1)} {ranges(self.first_layer, self.num_layers)}")
        return ", ".join([*words, *["head"] * self.has_head]) or "nothing"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Stages on devices.

    Attributes:
      device: what each of the devices is.
      footprint: of the model on one rank.
      stages: in the order in which a token passes through them.
    """

    device: Device
    footprint: Footprint
    stages: tuple[Stage, ...]

    # ---- counts

    @property
    def num_replicas(self) -> int:
        return self.footprint.num_replicas

    @property
    def layers_per_device(self) -> list[int]:
        return [stage.num_layers for stage in self.stages]

    @property
    def num_devices(self) -> int:
        """Devices that have something on them."""
        return self.num_replicas * len(self.stages)

    @property
    def num_taken(self) -> int:
        """Devices that a program takes for itself: IPUs come in powers of two."""
        return next_power_of_two(self.num_devices) if self.device.kind == "ipu" else self.num_devices

    # ---- memory

    @property
    def fullest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def total_bytes(self) -> int:
        """On all devices together."""
        return self.num_replicas * sum(stage.total_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        needed = self.total_bytes if self.device.is_shared else self.fullest.total_bytes
        return needed <= self.device.memory_bytes

    def problem(self) -> str:
        """Why it does not fit, with the numbers."""
        memory = size(self.device.memory_bytes)
        if self.device.is_shared:
            return f"does not fit: {size(self.total_bytes)} are needed, and {self.device.name} has {memory} for all devices"
        over = [stage for stage in self.stages if stage.total_bytes > self.device.memory_bytes]
        words = [
            f"device {stage.index} ({stage.holds}) needs {size(stage.total_bytes)}: weights {size(stage.weight_bytes)}, "
            f"{self.footprint.memory} {size(stage.cache_bytes)}, activations {size(stage.activation_bytes)}"
            for stage in over[:4]
        ]
        words += [f"and {len(over) - 4} more"] * (len(over) > 4)
        ranks = f" on each of num_replicas={self.num_replicas} ranks" if self.num_replicas > 1 else ""
        return f"does not fit {self.device.name}, which has {memory}: {'; '.join(words)}{ranks}"

    def check(self) -> None:
        """Refuse a plan that does not fit. Raises: UserError with the numbers, and the least number of devices that do."""
        if self.fits:
            return
        raise UserError(f"{self.problem()}; {_remedy(self.footprint, self.device)}")

    # ---- speed

    @property
    def read_bytes_per_token(self) -> int:
        """Bytes of weights that one rank reads in a decode step, on all stages together."""
        return sum(stage.read_bytes for stage in self.stages)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of caches that one rank reads in a decode step once they are full, on all stages together."""
        return sum(stage.cache_bytes for stage in self.stages)

    def ms_per_token(self, with_cache: bool) -> float | None:
        """The least time of a decode step by the memory's bandwidth: a token passes through one stage after the other, and the
        ranks of a stage read at the same time. None where the bandwidth is not known.

        Args:
          with_cache: whether full caches are read as well.
        """
        if self.device.bandwidth_gb_per_s is None:
            return None
        # Parts of one machine read no faster together than the machine does.
        ranks = self.num_replicas if self.device.is_shared else 1
        num_bytes = ranks * (self.read_bytes_per_token + (self.cache_bytes_per_token if with_cache else 0))
        return num_bytes / (self.device.bandwidth_gb_per_s * 1e9) * MS_PER_S

    # ---- output

    def table(self) -> str:
        """A line for each stage: device, layers, bytes, and the share of the device's memory."""
        has_tiles, ranks = self.device.num_tiles > 0, self.num_replicas
        head = [
            "device" if ranks == 1 else "stage",
            "layers",
            "weights",
            self.footprint.memory,
            "activations",
            "total",
            "share",
        ]
        rows = [head + (["per tile", "share"] if has_tiles else [])]
        for stage in self.stages:
            parts = (stage.weight_bytes, stage.cache_bytes, stage.activation_bytes, stage.total_bytes)
            row = [
                str(stage.index),
                stage.holds.replace("layers ", "").replace("layer ", ""),
                *map(size, parts),
                share(stage.total_bytes, self.device.memory_bytes),
            ]
            if has_tiles:
                per_tile = -(-stage.total_bytes // self.device.num_tiles)
                row += [f"{per_tile / 1024:.0f} KiB", share(per_tile, self.device.tile_bytes)]
            rows.append(row)
        return "\n".join(aligned(rows, 2))


def plan_stages(
    footprint: Footprint,
    layers_per_device: str | Sequence[int] | None = "auto",
    num_stages: int | None = None,
    *,
    device: Device,
) -> Plan:
    """Put layers on devices.

    Args:
      footprint: of the model, see `footprint.measure`.
      layers_per_device: the number of layers of each stage; or "auto", which balances bytes of weights and caches, embedding
        and head counted; or None for one stage.
      num_stages: for "auto"; None takes 1.
      device: what each stage's device is, of which there are num_replicas for a stage.
    Raises: UserError if the numbers are no layer counts, do not add up, or are not num_stages many.
    """
    counts = _layer_counts(footprint, layers_per_device, num_stages)
    stages, begin = [], 0
    for index, count in enumerate(counts):
        ends = {"is_first": index == 0, "is_last": index == len(counts) - 1}
        part = footprint.join(begin, begin + count, **ends)
        stages.append(
            Stage(
                index, begin, count, ends["is_first"], ends["is_last"],
                weight_bytes=sum(part.weights.values()),
                cache_bytes=sum(part.caches.values()),
                activation_bytes=part.activation_bytes,
                read_bytes=sum(part.weights[name] for name in part.reads),
            )
        )  # fmt: skip
        begin += count
    return Plan(device, footprint, tuple(stages))


def _layer_counts(footprint, layers_per_device, num_stages):
    if layers_per_device is None:
        layers_per_device = "auto"
        if num_stages not in (None, 1):
            raise UserError(f"num_stages={num_stages} wants layers_per_device: auto, or a list of layer counts")
    if isinstance(layers_per_device, str) and layers_per_device == "auto":
        first, *layers, last = (
            sum(part.weights.values()) + sum(part.caches.values())
            for part in (footprint.first, *footprint.layers, footprint.last)
        )
        return balance(layers, first, last, 1 if num_stages is None else num_stages)
    given = count_stages(layers_per_device, footprint.num_layers, 1, None)
    if num_stages not in (None, given):
        raise UserError(f"layers_per_device={list(layers_per_device)} is for {given} stages, not for num_stages={num_stages}")
    return list(layers_per_device)


def fewest_stages(footprint: Footprint, device: Device) -> Plan | None:
    """The plan with the fewest stages that fits, balanced, with at most as many stages as layers; None if none is enough."""
    parts = (footprint.first, *footprint.layers, footprint.last)
    smallest = max(sum(part.weights.values()) + sum(part.caches.values()) + part.activation_bytes for part in parts)
    if smallest > device.memory_bytes:
        return None  # there is a part that fits on no device alone
    whole = footprint.join(0, footprint.num_layers, True, True)
    num_stages = -(-(sum(whole.weights.values()) + sum(whole.caches.values())) // device.memory_bytes)
    most = 1 if device.is_shared else footprint.num_layers
    while True:
        if device.kind == "ipu":
            num_stages = next_power_of_two(num_stages)
        if num_stages > most:
            return None
        plan = plan_stages(footprint, "auto", num_stages, device=device)
        if plan.fits:
            return plan
        num_stages += 1


def _remedy(footprint, device):
    best = fewest_stages(footprint, device)
    if best is None and device.is_shared:
        return "take a lower precision, or a smaller max_length or batch_size"
    if best is None:
        return "no number of stages is enough: raise num_replicas, which cuts every layer, or take a lower precision"
    stages = f"layers_per_device: auto over {len(best.stages)} stages"
    ranks = f" with num_replicas={best.num_replicas}" if best.num_replicas > 1 else ""
    return f"the smallest number that fits is {best.num_taken} x {device.name}: {stages}{ranks}"


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not less than a number of at least 1."""
    return 1 << (number - 1).bit_length()
