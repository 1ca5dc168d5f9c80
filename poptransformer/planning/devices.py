"""Devices that a plan can be made for: what their memory holds, and how fast it is read."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from poptransformer.errors import UnsupportedError, UserError, near_miss

GB = 10**9
IPU_TILES = 1472
IPU_TILE_BYTES = 624 * 1024
# Where Linux says how much memory a container may use, version 2 and version 1.
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclasses.dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
      name: as on the command line.
      kind: "ipu", "gpu" or "cpu".
      memory_bytes: what weights, caches and activations may take together.
      bandwidth_gb_per_s: how fast the memory is read; None where that is not known.
      num_tiles, tile_bytes: of an IPU, whose memory lies beside its cores, a part with each; 0 for other devices.
      is_shared: whether all devices of this kind are parts of one machine and share its memory (a host's virtual devices).
      about: the device in words.
    """

    name: str
    kind: str
    memory_bytes: int
    bandwidth_gb_per_s: float | None = None
    num_tiles: int = 0
    tile_bytes: int = 0
    is_shared: bool = False
    about: str = ""

    @property
    def unpacks(self) -> str:
        """When packed matrices are turned into numbers in memory, see `activations.peak_bytes`: the CPU's kernels multiply
        codes, XLA alone does it for products of one row, and PopART has no operator that does.
        """
        return {"cpu": "never", "gpu": "rows"}.get(self.kind, "always")


def _ipu(name, gb_per_s, about):
    # 1472 tiles of 624 KiB are 940.6 MB; the data sheets say 900 MB, which leaves some of each tile for what comes on top.
    return Device(name, "ipu", 900 * 10**6, gb_per_s, IPU_TILES, IPU_TILE_BYTES, about=about)


def _gpu(name, memory_gb, gb_per_s, about):
    # The data sheets' gigabytes, taken as 10^9 bytes. The chips have binary ones, mostly; the difference, 7 %, is about what
    # the driver, the libraries and the programs take for themselves.
    return Device(name, "gpu", int(memory_gb * GB), gb_per_s, about=about)


# Bandwidths are the vendors' peaks. Programs reach less: on an H200 a plain copy has been measured at 4260 of the 4800 GB/s.
# IPUs: of all tiles together. Mk2 and Bow as Graphcore gives them; they are in proportion to the clocks, 1.33 and 1.85 GHz. For
# the C600 only arithmetic is published, 280 TFLOPS in float16 to 250 of the same chip at 1.33 GHz: 47.5 TB/s become 53.2.
DEVICES = {
    device.name: device
    for device in (
        _ipu("mk2", 47500, "Graphcore Mk2 IPU (GC200), as in an IPU-POD"),
        _ipu("bow", 65400, "Graphcore Bow IPU, as in a Bow Pod"),
        _ipu("c600", 53200, "Graphcore C600 card, one Mk2 IPU"),
        _gpu("b200", 180, 8000, "NVIDIA B200"),
        _gpu("h200", 141, 4800, "NVIDIA H200"),
        _gpu("h100", 80, 3350, "NVIDIA H100 SXM"),
        _gpu("h100-pcie", 80, 2000, "NVIDIA H100 PCIe"),
        _gpu("h100-nvl", 94, 3900, "NVIDIA H100 NVL"),
        _gpu("a100-80", 80, 2039, "NVIDIA A100 80GB SXM"),
        _gpu("a100-40", 40, 1555, "NVIDIA A100 40GB"),
        _gpu("a10", 24, 600, "NVIDIA A10"),
        _gpu("l40s", 48, 864, "NVIDIA L40S"),
        _gpu("l4", 24, 300, "NVIDIA L4"),
        _gpu("t4", 16, 320, "NVIDIA T4"),
        _gpu("v100", 32, 900, "NVIDIA V100 32GB"),
        _gpu("rtx5090", 32, 1792, "NVIDIA GeForce RTX 5090"),
        _gpu("rtx4090", 24, 1008, "NVIDIA GeForce RTX 4090"),
        _gpu("rtx3090", 24, 936, "NVIDIA GeForce RTX 3090"),
    )
}


def find_device(name: str, memory_gb: float | None = None, bandwidth_gb_per_s: float | None = None) -> Device:
    """Look a device up.

    Args:
      name: one of DEVICES, in any letter case, or "cpu" for this machine.
      memory_gb: usable memory in 10^9 bytes instead of the one known; bandwidth_gb_per_s: the same for the bandwidth.
    Raises: UnsupportedError for another name, with the list; UserError for numbers that are none.
    """
    key = str(name).lower()
    if key != "cpu" and key not in DEVICES:
        known = ("cpu", *DEVICES)
        raise UnsupportedError(f"device={name!r} is not known{near_miss(key, known)}; there are {', '.join(known)}")
    for what, number in (("memory_gb", memory_gb), ("bandwidth_gb_per_s", bandwidth_gb_per_s)):
        if number is not None and not 0 < number < float("inf"):
            raise UserError(f"{what}={number!r}: wanted a number greater than 0")
    changes = {} if memory_gb is None else {"memory_bytes": int(memory_gb * GB)}
    if bandwidth_gb_per_s is not None:
        changes["bandwidth_gb_per_s"] = bandwidth_gb_per_s
    device = DEVICES[key] if key != "cpu" else this_machine(changes.get("memory_bytes"))
    return dataclasses.replace(device, **changes)


def this_machine(memory_bytes: int | None = None) -> Device:
    """The machine this runs on, as a device; memory_bytes: None asks the system.

    Raises: UserError where the system does not tell.
    """
    if memory_bytes is None:
        memory_bytes = _memory_bytes()
    return Device("cpu", "cpu", memory_bytes, is_shared=True, about="this machine")


def _memory_bytes():
    """Memory of the machine, or of the container if that has less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise UserError("device='cpu': the system does not say how much memory there is; give memory_gb") from None
    for path in CGROUP_LIMITS:
        try:
            total = min(total, int(pathlib.Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total
