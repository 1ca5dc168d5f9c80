"""Decode and prefill speed of a model folder or a named shape, beside Hugging Face eager where torch is installed.

    python benchmarks/bench_generate.py --shape gpt2-124m
    python benchmarks/bench_generate.py --shape smollm2-135m --precision bf16
    python benchmarks/bench_generate.py --shape gpt2-xl --platform cuda --precision bf16 --max-length 512
    python benchmarks/bench_generate.py --model examples/gpt2/gpt2-pocket --precision fp32 bf16 --custom-ops auto false

All variants run in turn, round after round, each beside a measurement of the memory bandwidth. Prompts are new random ids in
every round; decoding is greedy and ignores end-of-sequence tokens.

    python benchmarks/bench_generate.py --model smollm2 --precision int4 --peers [--prefill 512] [--batch-size 8]

measures beside other engines, each in a process of its own, the models of benchmarks/peers/prepare.py; PEERS_VENVS names the
folder of their virtual environments, see benchmarks/peers/catalog.py.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)  # not this folder: names of other packages are in peers/

from benchmarks.shapes import hf_config, prompt_ending  # noqa: E402
from poptransformer import Session  # noqa: E402


def main():
    arguments = parse_arguments()
    if arguments.peers:
        from benchmarks.peers.compare import compare

        return compare(arguments)
    model = arguments.model or hf_config(arguments.shape)
    variants = {}
    for precision in arguments.precision:
        for custom_ops in arguments.custom_ops:
            name = f"poptransformer {precision}" + ("" if custom_ops == "auto" else f", custom_ops={custom_ops}")
            variants[name] = Ours(arguments, model, precision, custom_ops)
        if not arguments.no_peer and has_torch():
            variants[f"HF transformers eager {precision}"] = HuggingFace(arguments, model, precision)
    samples = {name: [] for name in variants}
    bandwidths = []
    probe = next(variant for variant in variants.values() if isinstance(variant, Ours)).session
    generator, ending = np.random.default_rng(0), prompt_ending(probe.config)
    for round_number in range(arguments.rounds + 1):
        for name, variant in variants.items():
            prompts = generator.integers(
                10, 250, (arguments.batch_size, max(0, arguments.prompt_tokens - len(ending)))
            ).tolist()
            prompts = [prompt + ending for prompt in prompts]
            bandwidth = probe.memory_bandwidth_gb_per_s()
            sample = variant.measure(prompts)
            if round_number > 0:  # the first round warms up
                samples[name].append(sample | {"bandwidth": bandwidth})
                bandwidths.append(bandwidth)
    print_table(arguments, probe, samples, bandwidths)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="folder in Hugging Face format")
    what.add_argument("--shape", help="a name in benchmarks/shapes.py; random weights")
    parser.add_argument("--precision", nargs="+", default=["fp32"])
    parser.add_argument("--custom-ops", nargs="+", default=["auto"], choices=["auto", "true", "false"])
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--batch-size", "--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="1: nothing to prefill, and less to compile")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-length", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true", help="leave Hugging Face out")
    parser.add_argument("--peers", action="store_true", help="beside every engine that is installed, on the CPU; wants --model")
    parser.add_argument("--prefill", type=int, default=None, help="with --peers: tokens of the prompt for prefill")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="with --peers: of each engine")
    arguments = parser.parse_args()
    if arguments.peers and not arguments.model:
        parser.error("--peers compares the models that benchmarks/peers/prepare.py makes: it wants --model")
    return arguments


class Ours:
    """A Session, measured by its own timings."""

    def __init__(self, arguments, model, precision, custom_ops):
        self.new_tokens, self.batch_size = arguments.new_tokens, arguments.batch_size
        custom_ops = {"auto": "auto", "true": True, "false": False}[custom_ops]
        self.session = Session(
            model, precision=precision, custom_ops=custom_ops, platform=arguments.platform, batch_size=self.batch_size,
            max_length=arguments.max_length, random_weights=isinstance(model, dict),
        )  # fmt: skip

    def measure(self, prompts):
        begin = time.perf_counter()
        result = self.session.generate(prompts, max_new_tokens=self.new_tokens, ignore_eos=True)
        wall_ms = 1e3 * (time.perf_counter() - begin)
        timings = result[0].timings
        num_calls = -(-timings.decode_steps // 64)
        outside_ms = wall_ms - timings.prefill_ms - timings.decode_ms + num_calls * self._empty_call_ms()
        sample = {
            "decode_ms": timings.decode_ms_per_token,
            "gb_per_s": timings.decode_gb_per_s,
            "outside": outside_ms / (wall_ms - timings.prefill_ms),
        }
        return sample | ({"prefill_tok_s": timings.prefill_tokens_per_s} if timings.prefill_tokens else {})

    def _empty_call_ms(self):
        """What one run of the decode graph costs when its loop makes no step: dispatch and copies in and out."""
        graph = self.session._engine.graphs["decode"]
        inputs = {name: np.zeros(value.shape, value.dtype) for name, value in graph.inputs.items()}
        durations = []
        for _ in range(5):
            begin = time.perf_counter()
            self.session.run("decode", inputs)
            durations.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(durations)


class HuggingFace:
    """transformers' generate, eager; decode is the difference between many new tokens and one."""

    def __init__(self, arguments, model, precision):
        import torch

        from benchmarks.peers.transformers import Engine

        is_cuda = arguments.platform in ("auto", "cuda") and torch.cuda.is_available()
        threads = torch.get_num_threads()
        options = {"device": "cuda" if is_cuda else "cpu"}
        self.engine = Engine(model, precision, threads, arguments.batch_size, arguments.max_length, options)
        self.new_tokens = arguments.new_tokens

    def measure(self, prompts):
        one, many = self._seconds(prompts, 1), self._seconds(prompts, self.new_tokens)
        return {
            "decode_ms": 1e3 * (many - one) / (self.new_tokens - 1),
            "prefill_tok_s": sum(map(len, prompts)) / one,
        }

    def _seconds(self, prompts, new_tokens):
        begin = time.perf_counter()
        self.engine.generate(prompts, new_tokens)  # the tokens are back on the host: nothing is left to wait for
        return time.perf_counter() - begin


def has_torch():
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def print_table(arguments, session, samples, bandwidths):
    import jax

    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout
    device = session.device_info
    known = [bandwidth for bandwidth in bandwidths if bandwidth]
    print(f"{arguments.model or arguments.shape}, batch {arguments.batch_size}, prompt {arguments.prompt_tokens}, "
          f"new {arguments.new_tokens}, {arguments.rounds} rounds, cache of {session.max_length} positions")  # fmt: skip
    print(f"{device.platform} {device.name}, custom ops: {device.custom_ops}; jax {jax.__version__}, "
          f"python {platform.python_version()}, commit {commit.strip()}")  # fmt: skip
    if known:
        print(f"memory bandwidth GB/s: median {statistics.median(known):.1f} ({min(known):.1f}..{max(known):.1f})")
    print("\n| | decode ms/token | GB/s | share of the bandwidth beside it | outside the loop | prefill tok/s |")
    print("|---|---|---|---|---|---|")
    for name, rows in samples.items():
        print(f"| {name} | {spread(rows, 'decode_ms', '.2f')} | {spread(rows, 'gb_per_s', '.1f')} | "
              f"{share(rows)} | {spread(rows, 'outside', '.1%')} | {spread(rows, 'prefill_tok_s', '.0f')} |")  # fmt: skip


def spread(rows, key, form):
    values = [row[key] for row in rows if key in row]
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def share(rows):
    values = [row["gb_per_s"] / row["bandwidth"] for row in rows if "gb_per_s" in row and row["bandwidth"]]
    return f"{statistics.median(values):.0%} ({min(values):.0%}..{max(values):.0%})" if values else "-"


if __name__ == "__main__":
    main()
