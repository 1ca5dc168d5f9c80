"""Which devices a model wants, and what goes where: python -m poptransformer.plan --model gpt2-xl --device bow --precision fp16

Nothing is loaded and nothing is run: sizes come from the graphs that the model builds. docs/planning.md says how to read it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys

from poptransformer.errors import UserError
from poptransformer.packing import GROUP_SIZES
from poptransformer.planning.devices import DEVICES, find_device
from poptransformer.planning.models import find_sizes
from poptransformer.planning.report import as_dict, as_text
from poptransformer.planning.search import place
from poptransformer.planning.shapes import SHAPES
from poptransformer.precision import DTYPES
from poptransformer.session_arguments import positive


def parse(arguments):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m poptransformer.plan",
        description="Say how many devices a model wants at least, which layers go where, what each device holds, and how fast "
        "a token can be by the memory's bandwidth. No weight is loaded.",
        epilog=f"models known without files: {', '.join(SHAPES)}. devices: cpu, {', '.join(DEVICES)}",
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder, a file of weights, a config.json, a name from below or on the hub")
    add("--device", required=True, help="one of those below; cpu is this machine")
    add("--precision", default="fp32", help="fp32, bf16, fp16, int8 or int4 (default fp32)")
    add("--kv-cache", help=f"{', '.join(DTYPES)} (default: as Session has it)")
    add("--group-size", type=int, help=f"weights that share a scale in int8 and int4: {', '.join(map(str, GROUP_SIZES))}")
    add("--batch-size", type=int, default=1, help="rows that run side by side (default 1)")
    add(
        "--max-length",
        type=int,
        help="tokens of a row, prompt and new ones together (default: the model's limit, at most 2048)",
    )
    add("--prefill-length", type=int, help="tokens of a row that prefill takes at once (default 512, or max_length)")
    add("--num-replicas", type=int, help="tensor-parallel ranks (default: what needs the fewest devices)")
    add("--layers-per-device", default="auto", help="auto, or the layers of each stage: 0,6,7,7")
    add("--devices", type=int, help="devices in all (default: as few as can be)")
    add("--memory-gb", type=float, help="usable memory of a device in 10^9 bytes, instead of the one known")
    add(
        "--bandwidth-gb-per-s", type=float, help="memory bandwidth of a device, instead of the one known; for cpu none is known"
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--picture", metavar="FILE", help="draw devices and layers into a .png or .svg file (needs matplotlib)")
    return parser.parse_args(arguments)


def layer_counts(text: str) -> str | list[int]:
    """What --layers-per-device says: "auto", or a list of counts. Raises: UserError for anything else."""
    if text == "auto":
        return text
    parts = [part.strip() for part in text.strip("[] ").split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"layers_per_device={text!r}: wanted auto, or layer counts such as 0,6,7,7")
    return [int(part) for part in parts]


def run(options) -> str:
    """Make the plan; draw the picture if one is asked for. Returns: the text to print."""
    device = find_device(options.device, options.memory_gb, options.bandwidth_gb_per_s)
    layers_per_device = layer_counts(options.layers_per_device)
    for name in ("num_replicas", "devices", "prefill_length"):
        if getattr(options, name) is not None:
            positive(name, getattr(options, name))
    if options.picture is not None:
        from poptransformer.planning import picture

        picture.check(options.picture)
    sizes = find_sizes(
        options.model, options.precision, options.kv_cache, options.group_size, options.batch_size, options.max_length
    )
    plan, ways = place(
        functools.cache(lambda num_replicas: sizes.footprint(device, num_replicas, options.prefill_length)),
        sizes.most_replicas,
        device,
        num_replicas=options.num_replicas,
        layers_per_device=layers_per_device,
        num_devices=options.devices,
    )
    if options.picture is not None:
        picture.save(plan, sizes, options.picture)
    return json.dumps(as_dict(plan, sizes, ways), indent=2) if options.json else as_text(plan, sizes, ways)


def main(arguments=None) -> int:
    """Print the plan that the command line asks for; returns the exit status."""
    options = parse(arguments)
    try:
        print(run(options), flush=True)
    except BrokenPipeError:  # whoever reads has seen enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
