"""Whether a `generate` program fits the IPUs it is for, by its sizes alone; see docs/planning.md for what is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from poptransformer.errors import UserError

_DEVICES = {"ipu2": "mk2", "ipu21": "c600"}  # Bow has the memory of Mk2


def check_fits(model, layers_per_device: Sequence[int], num_prefill: int, is_stepwise: bool, ipu_version: str) -> None:
    """Refuse a model that the IPUs' memory cannot hold.

    Args:
      model: a DecoderModel, as one rank sees it.
      layers_per_device: layers of each IPU of a replica.
      num_prefill: tokens of a row that are prefilled at once.
      is_stepwise: whether prompts go through the decode loop.
    Raises: UserError with the sizes, and the smallest number of IPUs that fits.
    """
    # Planning stands above the backends; only who wants to know asks it.
    from poptransformer.planning.devices import find_device
    from poptransformer.planning.footprint import measure
    from poptransformer.planning.stages import plan_stages

    device = find_device(_DEVICES[ipu_version])
    footprint = measure(model, 1 if is_stepwise else num_prefill, device.unpacks)
    hint = "popart.check_memory=false tries it all the same"
    if not is_stepwise:
        footprint = _weights_twice(footprint)
        hint = f"weights count twice, for the prompt's pass and for the loop: popart.prefill=stepwise has them once; {hint}"
    try:
        plan_stages(footprint, list(layers_per_device), len(layers_per_device), device=device).check()
    except UserError as error:
        raise UserError(f"{error} ({hint})") from None


def _weights_twice(footprint):
    """A Loop's body has weights of its own: PopART copies what it takes from the graph around."""

    def twice(part):
        again = {f"{name} in the prompt's pass": size for name, size in part.weights.items()}
        return dataclasses.replace(part, weights=part.weights | again)

    layers = tuple(twice(part) for part in footprint.layers)
    # The head is needed in the loop alone, tied tables as embeddings in both.
    return dataclasses.replace(footprint, first=twice(footprint.first), layers=layers)
