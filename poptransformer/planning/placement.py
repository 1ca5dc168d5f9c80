"""The plan of a Session that has several devices: what each of them will hold, known before anything is loaded."""

from __future__ import annotations

import logging

from poptransformer.errors import UserError
from poptransformer.models.decoder_model import DecoderModel
from poptransformer.planning.devices import Device, this_machine
from poptransformer.planning.footprint import measure
from poptransformer.planning.stages import Plan, plan_stages

logger = logging.getLogger(__name__)


def plan_session(
    model: DecoderModel, layers_per_device: list[int], platform: str, name: str, memory_bytes: int | None
) -> Plan | None:
    """Say what goes where.

    Args:
      model: as one rank sees it.
      layers_per_device: layers of each stage.
      platform, name: of one device.
      memory_bytes: what a device has for weights, caches and activations; None for devices that share this machine's memory.
    Returns: the Plan; None, with a line in the log, where the system does not tell how much memory there is.
    """
    if memory_bytes is None:
        try:
            device = this_machine()
        except UserError as error:
            logger.info("no plan is made: %s", error)
            return None
    else:
        device = Device(name, "gpu" if platform == "cuda" else platform, memory_bytes)
    footprint = measure(model, unpacks=device.unpacks)
    return plan_stages(footprint, layers_per_device, device=device)
