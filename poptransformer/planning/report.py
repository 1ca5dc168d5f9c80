"""A plan as text and as JSON."""

from __future__ import annotations

from poptransformer.planning.models import Sizes
from poptransformer.planning.stages import Plan
from poptransformer.planning.text import aligned, share, size


def as_text(plan: Plan, sizes: Sizes, ways: list[Plan] = ()) -> str:
    """What the command line prints.

    Args:
      plan: fits its devices.
      ways: plans on the same number of devices that are named beside it.
    """
    device = plan.device
    rows = "1 row" if sizes.batch_size == 1 else f"{sizes.batch_size} rows"
    precision = f"{sizes.precision}, {plan.footprint.memory} {_state_dtype(sizes)}"
    bandwidth = "bandwidth not known" if device.bandwidth_gb_per_s is None else f"{device.bandwidth_gb_per_s:g} GB/s"
    tiles = f", {device.num_tiles} tiles of {device.tile_bytes // 1024} KiB" if device.num_tiles else ""
    lines = [
        f"{sizes.name}: {plan.footprint.num_layers} layers, {sizes.num_parameters / 1e6:,.1f} M weights; {precision}; {rows} "
        f"of up to {sizes.max_length} tokens",
        f"{device.name}: {device.about}, {size(device.memory_bytes)}{tiles}, {bandwidth}",
        "",
        _how_many(plan),
        "",
        plan.table(),
        "",
        *_speed(plan),
    ]
    if len(ways) > 1:
        lines += ["", f"ways to use {plan.num_taken} devices:", *(f"  {line}" for line in _ways(ways))]
    if device.kind == "ipu":
        lines += ["", "Not counted: program code and exchange buffers, which IPUs keep in the same memory."]
    return "\n".join(lines)


def _state_dtype(sizes):
    return sizes.build().states()[0].dtype.name


def _how_many(plan):
    total, stages = plan.num_taken, len(plan.stages)
    what = f"{total} x {plan.device.name}" if not plan.device.is_shared else f"{total} on this machine"
    how = [f"{stages} stages" if stages > 1 else "1 stage"]
    if plan.num_replicas > 1:
        how.append(f"{'each ' * (stages > 1)}cut over {plan.num_replicas} ranks: the table shows what one of them holds")
    if total > plan.num_devices:
        how.append(f"{total - plan.num_devices} of the IPUs idle, as they come in powers of two")
    return f"devices: {what} ({', '.join(how)})"


def _speed(plan):
    weights, cache = plan.read_bytes_per_token, plan.cache_bytes_per_token
    each = "" if plan.num_replicas == 1 else " on each rank"
    lines = [f"read per token: {size(weights)} of weights, {size(cache)} of {plan.footprint.memory} once it is full{each}"]
    if plan.device.bandwidth_gb_per_s is not None:
        empty, full = (_ms(plan.ms_per_token(with_cache)) for with_cache in (False, True))
        lines.append(f"at best: {empty} ms/token by the memory's bandwidth, {full} when the {plan.footprint.memory} is full")
    return lines


def _ms(milliseconds):
    return f"{milliseconds:.2f}" if milliseconds >= 1 else f"{milliseconds:.2g}"


def _ways(ways):
    rows = [["num_replicas", "layers_per_device", "fullest device", "share", "ms/token at best"]]
    for plan in ways:
        ms = plan.ms_per_token(with_cache=True)
        fullest = plan.fullest.total_bytes
        rows.append(
            [
                str(plan.num_replicas),
                _short(plan.layers_per_device),
                size(fullest),
                share(fullest, plan.device.memory_bytes),
                "-" if ms is None else _ms(ms),
            ]
        )
    return aligned(rows, 2)


def _short(counts):
    """Layer counts, runs of the same one as 3 x 12."""
    runs = []
    for count in counts:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return ", ".join(str(count) if times == 1 else f"{times} x {count}" for times, count in runs)


def as_dict(plan: Plan, sizes: Sizes, ways: list[Plan] = ()) -> dict:
    """The same as values that JSON can hold; bytes are those of one rank."""
    device = plan.device
    return {
        "model": {
            "name": sizes.name,
            "num_layers": plan.footprint.num_layers,
            "num_parameters": sizes.num_parameters,
            "precision": sizes.precision.name,
            "group_size": sizes.precision.packing[1] if sizes.precision.packing else None,
            "memory": plan.footprint.memory,
            "memory_dtype": _state_dtype(sizes),
            "batch_size": sizes.batch_size,
            "max_length": sizes.max_length,
        },
        "device": {
            "name": device.name,
            "kind": device.kind,
            "memory_bytes": device.memory_bytes,
            "bandwidth_gb_per_s": device.bandwidth_gb_per_s,
            "num_tiles": device.num_tiles,
            "tile_bytes": device.tile_bytes,
        },
        "num_devices": plan.num_taken,
        "num_replicas": plan.num_replicas,
        "layers_per_device": plan.layers_per_device,
        "stages": [
            {
                "stage": stage.index,
                "layers": list(range(stage.first_layer, stage.first_layer + stage.num_layers)),
                "has_embedding": stage.has_embedding,
                "has_head": stage.has_head,
                "weight_bytes": stage.weight_bytes,
                "cache_bytes": stage.cache_bytes,
                "activation_bytes": stage.activation_bytes,
                "total_bytes": stage.total_bytes,
                "total_bytes_per_tile": -(-stage.total_bytes // device.num_tiles) if device.num_tiles else None,
                "share_of_memory": stage.total_bytes / device.memory_bytes,
            }
            for stage in plan.stages
        ],
        "read_bytes_per_token": {"weights": plan.read_bytes_per_token, "full_cache": plan.cache_bytes_per_token},
        "ms_per_token_at_best": {"empty_cache": plan.ms_per_token(False), "full_cache": plan.ms_per_token(True)},
        "ways": [{"num_replicas": way.num_replicas, "layers_per_device": way.layers_per_device} for way in ways],
    }
