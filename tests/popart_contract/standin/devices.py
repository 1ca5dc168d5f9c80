"""DeviceManager and DeviceInfo: FACTS (f)."""

from __future__ import annotations

from popart_contract.standin.binding import NAMESPACE, bound
from popart_contract.standin.errors import popart_exception, refuse
from popart_contract.standin.machine import MACHINE

IPU_MODEL_OPTIONS = ("numIPUs", "tilesPerIPU", "compileIPUCode", "ipuVersion")
SIM_OPTIONS = ("numIPUs", "tilesPerIPU")
OFFLINE_OPTIONS = ("numIPUs", "tilesPerIPU", "ipuVersion", "syncPattern", "gatewayMode")
SYNC_PATTERNS = ("full", "singlePipeline", "replicaAndLadder")


@bound("DeviceInfo")
class DeviceInfo:
    """A device; only a DeviceManager makes one."""

    @classmethod
    def _make(cls, kind, num_ipus, connection, version="", tiles=1472, index=0):
        device = cls.__new__(cls)
        connections, types = NAMESPACE["DeviceConnectionType"], NAMESPACE["DeviceType"]
        for name, value in {
            "type": types[kind], "numIpus": num_ipus, "connectionType": connections[connection], "ipuVersion": version,
            "tilesPerIPU": tiles, "tilesPerIpu": tiles, "id": index, "isAttached": False, "version": "", "driverIds": [],
            "numWorkerContexts": 6,
        }.items():  # fmt: skip
            object.__setattr__(device, name, value)
        return device

    def attach(self):
        """Take the hardware. A device without any raises."""
        if self.connectionType.name == "Never":
            refuse("fact_f_offline_devices_only_compile", "an offline device cannot be attached")
        if not self.isAttached:
            if self.type.name == "Ipu":
                MACHINE.attached += self.numIpus
            object.__setattr__(self, "isAttached", True)
        return True

    def detach(self):
        """Give the hardware back."""
        if self.connectionType.name == "Never":
            refuse("fact_f_offline_devices_only_compile", "an offline device cannot be detached")
        if self.isAttached:
            if self.type.name == "Ipu":
                MACHINE.attached -= self.numIpus
            object.__setattr__(self, "isAttached", False)

    def tryAttachUntilTimeout(self):
        """As attach."""
        return self.attach()

    def __enter__(self):
        self.attach()
        return self

    def __exit__(self, *exception):
        self.detach()

    def __repr__(self):
        return f"Device({self.type.name}, {self.numIpus} IPUs, {self.connectionType.name})"


def _checked(where, options, known):
    unknown = sorted(set(options) - set(known))
    if unknown:
        refuse("fact_f_device_options_are_known", f"{where}: unknown options {unknown}; known are {list(known)}")
    return {key: str(value) for key, value in options.items()}


def _count(options):
    return int(options.get("numIPUs", 1))


@bound("DeviceManager")
class DeviceManager:
    """The one device manager of the process."""

    def __init__(self):
        pass

    def createCpuDevice(self):
        """The host as one device."""
        return DeviceInfo._make("Cpu", 1, "Always")

    def createIpuModelDevice(self, arg0):
        """The IPU model: few tiles unless told otherwise."""
        options = _checked("createIpuModelDevice", arg0, IPU_MODEL_OPTIONS)
        return DeviceInfo._make("IpuModel", _count(options), "Always", options.get("ipuVersion", "ipu2"), tiles=4)

    def createSimDevice(self, arg0):
        """The simulator."""
        return DeviceInfo._make("Sim", _count(_checked("createSimDevice", arg0, SIM_OPTIONS)), "Always")

    def createOfflineIPUDevice(self, opts):
        """A device that only compiles."""
        options = _checked("createOfflineIPUDevice", opts, OFFLINE_OPTIONS)
        if options.get("syncPattern", "full") not in SYNC_PATTERNS:
            refuse("fact_f_device_options_are_known", f"syncPattern is one of {SYNC_PATTERNS}, not {options['syncPattern']!r}")
        return DeviceInfo._make("OfflineIpu", _count(options), "Never", options.get("ipuVersion", "ipu2"))

    def acquireAvailableDevice(self, **wanted):
        """A free set of IPUs. Raises: where there is none."""
        device = self.tryAcquireAvailableDevice(**wanted)
        if device is None:
            raise popart_exception(f"no device with {wanted['numIpus']} IPUs is free")
        return device

    def tryAcquireAvailableDevice(self, numIpus, tilesPerIpu, pattern, connectionType, selectionCriterion):
        """A free set of IPUs, or None. Hosts give out 1, 2, 4, 8, ... IPUs."""
        is_set = numIpus >= 1 and numIpus & (numIpus - 1) == 0
        if not is_set or numIpus > MACHINE.num_ipus - MACHINE.attached:
            return None
        device = DeviceInfo._make("Ipu", numIpus, connectionType.name, "ipu2")
        if connectionType.name == "Always":
            device.attach()
        return device
