"""How many devices a model wants at least, and the ways to spread it over as many."""

from __future__ import annotations

from collections.abc import Callable

from poptransformer.errors import UserError
from poptransformer.planning.devices import Device
from poptransformer.planning.footprint import Footprint
from poptransformer.planning.stages import Plan, fewest_stages, next_power_of_two, plan_stages
from poptransformer.session_arguments import count_stages

MOST_REPLICAS = 64  # ranks that are tried where none are asked for


def check_replicas(num_replicas: int, most: int, device: Device) -> None:
    """Refuse a number of ranks that the model or the device cannot have.

    Args:
      most: ranks among which the model's layers can be cut.
    Raises: UserError.
    """
    if num_replicas > most:
        raise UserError(
            f"num_replicas={num_replicas} is more than the {most} heads or features that the model has to give out: further "
            f"ranks would hold zeros; set at most {most}"
        )
    if device.kind == "ipu" and num_replicas != next_power_of_two(num_replicas):
        below = next_power_of_two(num_replicas) // 2
        raise UserError(
            f"num_replicas={num_replicas}: IPUs come in powers of two, in equal numbers for each replica; set {below} or "
            f"{2 * below}"
        )


def ways_to_fit(footprint_of: Callable[[int], Footprint], most_replicas: int, device: Device) -> list[Plan]:
    """All ways to place a model on the smallest number of devices: fewest ranks first; empty if there is none.

    Ranks are tried in powers of two, and for each the fewest stages that fit.

    Args:
      footprint_of: num_replicas -> what each part of the model takes on one of the ranks.
      most_replicas: ranks among which the model's layers can be cut.
    """
    found, num_replicas = [], 1
    fewest = None
    while num_replicas <= min(most_replicas, MOST_REPLICAS, fewest or MOST_REPLICAS):
        plan = fewest_stages(footprint_of(num_replicas), device)
        if plan is not None:
            found.append(plan)
            fewest = min(plan.num_taken, fewest or plan.num_taken)
        num_replicas *= 2
    return [plan for plan in found if plan.num_taken == fewest]


def place(
    footprint_of: Callable[[int], Footprint],
    most_replicas: int,
    device: Device,
    *,
    num_replicas: int | None = None,
    layers_per_device="auto",
    num_devices: int | None = None,
) -> tuple[Plan, list[Plan]]:
    """Make the plan that was asked for, or the one with the fewest devices.

    Args:
      footprint_of, most_replicas: as for `ways_to_fit`.
      num_replicas: ranks; None takes 1 where layers_per_device or num_devices says how many stages there are, or else what
        needs the fewest devices.
      layers_per_device: "auto", or a list of layer counts.
      num_devices: devices in all; None takes as many as are needed.
    Returns: the plan, and all ways to place the model on as few devices as can be (empty where the plan was asked for).
    Raises: UserError if it does not fit, with the smallest number of devices that do; or for numbers that contradict each
      other.
    """
    if num_replicas is not None:
        check_replicas(num_replicas, most_replicas, device)
    if num_devices is None and layers_per_device == "auto":
        if num_replicas is not None:
            footprint = footprint_of(num_replicas)
            plan = fewest_stages(footprint, device)
            if plan is None:
                one = plan_stages(footprint, layers_per_device, 1, device=device)
                raise UserError(f"{one.problem()}; {_remedy(footprint_of, most_replicas, device)}")
            return plan, []
        ways = ways_to_fit(footprint_of, most_replicas, device)
        if not ways:
            one = plan_stages(footprint_of(1), layers_per_device, 1, device=device)
            raise UserError(f"{one.problem()}; {_remedy(footprint_of, most_replicas, device)}")
        return ways[0], ways
    footprint = footprint_of(num_replicas or 1)
    num_stages = count_stages(layers_per_device, footprint.num_layers, footprint.num_replicas, num_devices)
    plan = plan_stages(footprint, layers_per_device, num_stages, device=device)
    if not plan.fits:
        raise UserError(f"{plan.problem()}; {_remedy(footprint_of, most_replicas, device)}")
    return plan, []


def _remedy(footprint_of, most_replicas, device):
    ways = ways_to_fit(footprint_of, most_replicas, device)
    if not ways:
        return "no number of devices is enough; take a lower precision, or a smaller max_length or batch_size"
    words = []
    for plan in ways:
        stages = f"{len(plan.stages)} {'stage' if len(plan.stages) == 1 else 'stages'}"
        words.append(f"num_replicas={plan.num_replicas} with {stages}")
    return f"the smallest number that fits is {ways[0].num_taken} x {device.name}: {', or '.join(words)}"
