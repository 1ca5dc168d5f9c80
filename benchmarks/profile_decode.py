"""Where the time of decoding goes on a GPU: each kernel's share of a token, and the gaps between kernels.

    python benchmarks/profile_decode.py --shape llama-2-7b --precision bf16 --max-length 512

The profile is of the tokens of one run of the decode graph, random weights, with kernels launched one by one: inside a CUDA
graph the profiler sees none. So the gaps it shows are not those of a normal run. `XLA_FLAGS=--xla_dump_to=DIR` shows what is
in a kernel.
"""

from __future__ import annotations

import argparse
import collections
import glob
import itertools
import os
import pathlib
import re
import sys
import tempfile

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="  # before JAX starts

import jax

sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)  # as in bench_generate.py

from benchmarks.shapes import hf_config, prompt_ending  # noqa: E402
from poptransformer import Session  # noqa: E402

NEW_TOKENS = 64  # one run of the decode graph


def main():
    arguments = parse_arguments()
    session = Session(
        hf_config(arguments.shape), precision=arguments.precision, platform=arguments.platform, random_weights=True,
        batch_size=arguments.batch_size, max_length=arguments.max_length,
    )  # fmt: skip
    prompts = [prompt_ending(session.config) or [5]] * arguments.batch_size  # a single token needs no prefill
    session.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    print(f"{arguments.shape} {arguments.precision}, batch {arguments.batch_size}, {session.device_info.name}")
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            session.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        print_table(device_events(folder), arguments.top)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help="a name in benchmarks/shapes.py")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--top", type=int, default=30, help="rows of the table")
    return parser.parse_args()


def device_events(folder):
    """(name, begin, end in ns) of all that ran on the first GPU, in the order it began."""
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    planes = [plane for plane in jax.profiler.ProfileData.from_file(path).planes if plane.name.startswith("/device:GPU:0")]
    lines = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
    return sorted(
        ((event.name, event.start_ns, event.end_ns) for line in lines for event in line.events), key=lambda event: event[1]
    )


def print_table(events, top):
    busy, count = collections.Counter(), collections.Counter()
    for name, begin, end in events:
        busy[name] += (end - begin) / 1e3 / NEW_TOKENS
        count[name] += 1 / NEW_TOKENS
    gaps = [max(0, after[1] - before[2]) / 1e3 for before, after in itertools.pairwise(events)]
    total = (events[-1][2] - events[0][1]) / 1e3 / NEW_TOKENS
    large = sum(gap for gap in gaps if gap > 5) / NEW_TOKENS
    print(
        f"a token: {total:.1f} us, {sum(count.values()):.0f} kernels that take {sum(busy.values()):.1f} us, "
        f"gaps {sum(gaps) / NEW_TOKENS:.1f} us, {large:.1f} of them in gaps over 5 us"
    )
    print(f"\n{'us a token':>10} {'a token':>8} {'us each':>8}  kernel")
    for name, microseconds in busy.most_common(top):
        print(f"{microseconds:10.1f} {count[name]:8.2f} {microseconds / count[name]:8.2f}  {name}")
    families = collections.Counter()
    for name, microseconds in busy.items():
        families[re.sub(r"[_.]?\d+$", "", name)] += microseconds
    print("by kind:", ", ".join(f"{name} {microseconds:.0f} us" for name, microseconds in families.most_common(12)))


if __name__ == "__main__":
    main()
