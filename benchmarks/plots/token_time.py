"""Where a token's time goes: a stacked bar for each precision, and a mark at the limit that the memory sets.

    python -m benchmarks.plots.token_time --model smollm2 --out docs/images/token_time.png

JAX's profiler notes each step of a decode program while it runs 64 tokens; an instruction's metadata say which layer it belongs
to. What no step covers is between them: XLA's own dispatch, and what the profiler costs. Medians over the rounds.
"""

from __future__ import annotations

import argparse
import collections
import glob
import gzip
import json
import re
import statistics
import tempfile

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.shapes import hf_config
from poptransformer import Session

TOKENS = 65  # one decode call makes 64, the first one comes with the prompt's last token
# Parts from the bottom of a bar to its top, with colours that differ in brightness too.
PARTS = {
    "MLP's weights": "#1b4f72", "attention's weights": "#2e86c1", "head": "#85c1e9", "weights, fused": "#1b4f72",
    "attention over the cache": "#e67e22", "embedding": "#f9e79f", "norms, rope, activations, sampling": "#7f8c8d",
    "between the steps": "#d5d8dc",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a checkpoint")
    what.add_argument("--shape", help="a name in benchmarks/shapes.py; random weights")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "int8", "int4"])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", required=True, help="the PNG file")
    arguments = parser.parse_args()
    bars = {}
    for precision in arguments.precision:
        bars[precision] = measure(arguments, precision)
        parts, wall_ms, limit_ms = bars[precision]
        print(f"{precision}: {wall_ms:.2f} ms a token, limit {limit_ms:.2f}; "
              + ", ".join(f"{part} {ms:.2f} ({ms / wall_ms:.0%})" for part, ms in parts.items()), flush=True)  # fmt: skip
    draw(arguments, bars)


def measure(arguments, precision):
    """({part: ms a token}, ms a token, ms that reading the weights takes)."""
    model = arguments.model or hf_config(arguments.shape)
    with Session(
        model, precision=precision, max_length=512, execution_cache_dir="", random_weights=arguments.shape is not None
    ) as session:
        prompt = [10 + i % 200 for i in range(arguments.prompt_tokens)]
        session.generate([prompt], max_new_tokens=TOKENS, ignore_eos=True)
        parts_of = parts_of_instructions(session._engine._programs["decode"].as_text())
        rounds = []
        for _ in range(arguments.rounds):
            bandwidth = session.memory_bandwidth_gb_per_s()
            rounds.append((profile(session, prompt, parts_of), session.weight_bytes_per_token / bandwidth / 1e6))
    walls = [wall for (_, wall), _ in rounds]
    parts = {part: statistics.median(found[part] for (found, _), _ in rounds) for part in PARTS if rounds[0][0][0][part]}
    return parts, statistics.median(walls), statistics.median(limit for _, limit in rounds)


def profile(session, prompt, parts_of):
    """({part: ms a token}, ms a token) of one call."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            timings = session.generate([prompt], max_new_tokens=TOKENS, ignore_eos=True)[0].timings
        with gzip.open(glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)[0]) as file:
            events = json.load(file)["traceEvents"]
    found = collections.Counter()
    for event in events:
        part = parts_of.get(event["name"]) if event.get("ph") == "X" else None
        if part:
            found[part] += event["dur"] / 1e3 / timings.decode_steps
    wall = timings.decode_ms_per_token
    found["between the steps"] = max(0.0, wall - sum(found.values()))
    return found, wall


def parts_of_instructions(text):
    """Name of an instruction of the loop over tokens -> the part that it belongs to."""
    parts = {}
    for line in text.splitlines():
        match = re.match(r'\s*(?:ROOT )?%?([\w.-]+) = .*?\s([\w-]+)\(.*metadata={.*?op_name="([^"]*)"', line)
        if not match or "/while/body/" not in match[3] or match[2] in ("while", "call", "conditional", "parameter"):
            continue
        target = re.search(r'custom_call_target="poptransformer_(\w+)"', line)
        parts[match[1]] = part_of(target and target[1], match[3])
    return parts


def part_of(kernel, scope):
    if kernel in ("linear", "packed_linear"):
        return (
            "MLP's weights" if "mlp" in scope else "attention's weights" if "attn" in scope or "attention" in scope else "head"
        )
    known = {"attention": "attention over the cache", "gather": "embedding", "step_program": "weights, fused"}
    return known.get(kernel, "norms, rope, activations, sampling")


def draw(arguments, bars):
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.7 * len(bars)), layout="constrained")
    seen = set()
    for row, (parts, _, limit_ms) in enumerate(bars.values()):
        left = 0.0
        for part, ms in parts.items():
            axes.barh(row, ms, left=left, color=PARTS[part], edgecolor="white", linewidth=0.5, height=0.6,
                      label=None if part in seen else part)  # fmt: skip
            seen.add(part)
            left += ms
        axes.plot([limit_ms] * 2, [row - 0.42, row + 0.42], color="black", linewidth=2,
                  label="weights / read bandwidth" if row == 0 else None)  # fmt: skip
        axes.text(left, row, f" {left:.1f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(sum(parts.values()) for parts, _, _ in bars.values()))
    axes.set_xlabel("ms a token")
    axes.set_title(
        f"{arguments.model or arguments.shape}, decode, batch 1, {arguments.prompt_tokens} tokens before", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
