"""How the time of a decode step grows with the tokens that a row has, and with the rows of a batch.

    python -m benchmarks.plots.decode_growth --by context --shape llama-3.2-1b --precision int4 --out context.png
    python -m benchmarks.plots.decode_growth --by batch --shape smollm2-135m --precision int4 int8 --out batch.png

Weights are random. The caches are not filled first: decode runs as if they were, since its time depends on how many positions
it reads, not on what is in them. Lines are medians, bands go from the least to the greatest; dashed lines are the limit,
weights and caches over the read bandwidth that is measured beside each sample.
"""

from __future__ import annotations

import argparse
import statistics
import time

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.shapes import hf_config
from poptransformer import Session

COLOURS = ("#1b4f72", "#e67e22", "#148f77", "#8e44ad")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["context", "batch"], required=True)
    parser.add_argument("--shape", required=True, help="a name in benchmarks/shapes.py")
    parser.add_argument("--precision", nargs="+", default=["int4"])
    parser.add_argument("--kv-cache", nargs="+", default=[None], help="a line for each, beside each precision")
    parser.add_argument("--contexts", nargs="+", type=int, default=[0, 512, 1024, 2048, 4096, 6144, 8000])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 12, 16])
    parser.add_argument("--steps", type=int, default=8, help="tokens of a sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", required=True, help="the PNG file")
    arguments = parser.parse_args()
    lines = {}
    for precision in arguments.precision:
        for kv_cache in arguments.kv_cache:
            name = precision if kv_cache is None else f"{precision}, {kv_cache} cache"
            by = by_context if arguments.by == "context" else by_batch
            lines[name] = by(arguments, precision, kv_cache)
            for x, (samples, limits) in lines[name].items():
                median, low, high = statistics.median(samples), min(samples), max(samples)
                print(f"{name}, {arguments.by} {x}: {median:.2f} ms a step ({low:.2f}..{high:.2f}), "
                      f"limit {statistics.median(limits):.2f}", flush=True)  # fmt: skip
    draw(arguments, lines)


def by_context(arguments, precision, kv_cache):
    """{tokens before: (ms a step, limits)}; all lengths in turn, round after round."""
    longest = max(arguments.contexts) + arguments.steps + 1
    with make_session(arguments, precision, kv_cache, 1, longest) as session:
        return measure({context: (session, context) for context in arguments.contexts}, arguments)


def by_batch(arguments, precision, kv_cache):
    """{rows: (ms a step, limits)}, 128 tokens before."""
    found = {}
    for batch in arguments.batches:
        with make_session(arguments, precision, kv_cache, batch, 256) as session:
            found |= measure({batch: (session, 128)}, arguments)
    return found


def make_session(arguments, precision, kv_cache, batch_size, max_length):
    return Session(
        hf_config(arguments.shape), precision=precision, kv_cache=kv_cache, batch_size=batch_size, max_length=max_length,
        random_weights=True,
    )  # fmt: skip


def measure(points, arguments):
    samples, limits = ({x: [] for x in points} for _ in range(2))
    for round_number in range(arguments.rounds + 1):
        for x, (session, context) in points.items():
            bandwidth = session.memory_bandwidth_gb_per_s()
            ms = decode_ms(session, context, arguments.steps)
            if round_number > 0:  # the first one compiles and warms up
                samples[x].append(ms)
                share = context / session.max_length  # of the caches, that one step reads
                cache_bytes = session.describe().cache_bytes * share
                limits[x].append((session.weight_bytes_per_token + cache_bytes) / bandwidth / 1e6)
    return {x: (samples[x], limits[x]) for x in points}


def decode_ms(session, context, steps):
    """ms a step of one decode call that goes on after `context` tokens of each row; less what a call without a step takes."""
    graph = session.graph("decode")
    inputs = {name: np.zeros(value.shape, value.dtype) for name, value in graph.inputs.items()}
    inputs["stop_ids"][:] = -1
    inputs["cache_len"][:] = context
    inputs["repetition_penalty"][:] = inputs["top_p"][:] = 1
    seconds = []
    for count in (0, steps):
        inputs["max_new"][:] = count
        begin = time.perf_counter()
        outputs = session.run("decode", inputs)
        seconds.append(time.perf_counter() - begin)
        assert (outputs["num_new"] == count).all()
    return 1e3 * (seconds[1] - seconds[0]) / steps


def draw(arguments, lines):
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
        x = list(points)
        axes.plot(x, [statistics.median(samples) for samples, _ in points.values()], "o-", color=colour, label=name)
        low, high = ([pick(samples) for samples, _ in points.values()] for pick in (min, max))
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(x, [statistics.median(limits) for _, limits in points.values()], "--", color=colour, linewidth=1)
    axes.set_xlabel("tokens in the cache" if arguments.by == "context" else "rows of the batch")
    axes.set_ylabel("ms a step")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{arguments.shape}, decode; dashed: bytes / read bandwidth", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
