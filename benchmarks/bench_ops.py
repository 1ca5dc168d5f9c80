"""Speed of single ops on the CPU, as a share of what the machine can do, measured in the same run.

    python benchmarks/bench_ops.py --op linear --format int4 int8 bf16 fp32 --rows 1
    python benchmarks/bench_ops.py --op linear --format int8 --rows 512 --size 4096x4096
    python benchmarks/bench_ops.py --op attention --format fp16 int8 --size llama-1b smollm2
    python benchmarks/bench_ops.py --op wkv gather --isa avx2 --plain

The limit of an op is the greater of two times: its bytes over the read bandwidth, its multiplications and additions over the
peak of dot products in registers. Both are measured beside each sample, the bandwidth on as many bytes as the op goes over, so
that what a large last-level cache keeps counts the same on both sides. Shares are medians over the rounds, with their range.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import platform
import statistics
import sys
import time

sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

OPS = {"linear": "linear", "packed_linear": "linear", "attention": "attention", "gather": "gather", "wkv": "wkv"}


def main():
    arguments = parse_arguments()
    if arguments.isa:
        os.environ["POPTRANSFORMER_ISA"] = arguments.isa  # read when the library is loaded
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from poptransformer.backends.xla.custom_ops import load_cpu_library

    library = load_cpu_library()
    print(f"{platform.processor() or platform.machine()}, {library.instructions}, {library.num_threads} threads, "
          f"jax {jax.__version__}, {arguments.rounds} rounds, {arguments.working_set} MiB")  # fmt: skip
    print("\n| | us | GB/s | of the bandwidth | Gop/s | of the limit |" + (" plain XLA / kernel |" if arguments.plain else ""))
    print("|---|---|---|---|---|---|" + ("---|" if arguments.plain else ""))
    peaks = {}
    for op in arguments.op:
        module = importlib.import_module(f"benchmarks.ops.{OPS[op]}")
        formats = arguments.format or module.FORMATS
        unknown = [kind for kind in formats if kind not in module.FORMATS]
        if unknown:
            raise SystemExit(f"{op} has no format {', '.join(unknown)}; there are {', '.join(module.FORMATS)}")
        for kind in formats:
            for size in arguments.size or module.SIZES:
                for rows in arguments.rows:
                    case = module.case(library, size, kind, rows, arguments.working_set << 20)
                    measure(case, library, arguments, peaks)
                    del case  # its arrays, before the next one's are made


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPS, required=True)
    parser.add_argument("--format", nargs="+", help="of the weights, or of the caches; default: all that the op has")
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="of x, of the batch, or indices")
    parser.add_argument("--size", nargs="+", help="INxOUT for linear, see benchmarks/ops for the others")
    parser.add_argument("--isa", choices=["amx", "avx512", "avx2", "portable"], help="instead of the CPU's best")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--working-set", type=int, default=512, help="MiB that the calls of one program go over together")
    parser.add_argument("--small-pages", action="store_true", help="leave weights in pages of 4 KiB, as XLA has them")
    parser.add_argument("--plain", action="store_true", help="beside the plain XLA lowering")
    return parser.parse_args()


def measure(case, library, arguments, peaks):
    """Print a case's line."""
    if not arguments.small_pages:
        import jax

        from poptransformer.backends.xla.huge_pages import use_huge_pages

        thread = use_huge_pages(jax.live_arrays())  # as the engine does with weights
        if thread:
            thread.join()
    functions = [case.kernel] + ([case.plain] if arguments.plain else [])
    for function in functions:
        function(), function()  # compiles, then fills what it fills
    peak = max(peak_of(kind, library, peaks) for kind in case.peaks) if case.num_ops else 0.0
    probe_bytes = max(8 << 20, case.num_bytes * case.num_calls)
    rows = []
    for _ in range(arguments.rounds):
        bandwidth = library.read_bandwidth_gb_per_s(num_bytes=probe_bytes, num_repetitions=1)
        seconds = [timed(function) / case.num_calls for function in functions]
        limit_s = case.num_bytes / bandwidth / 1e9
        if case.num_ops and peak:
            limit_s = max(limit_s, case.num_ops / peak / 1e9)
        rows.append({
            "us": 1e6 * seconds[0], "gb": case.num_bytes / seconds[0] / 1e9,
            "of_bandwidth": case.num_bytes / seconds[0] / 1e9 / bandwidth, "gop": case.num_ops / seconds[0] / 1e9,
            "of_limit": limit_s / seconds[0], "plain": seconds[-1] / seconds[0],
        })  # fmt: skip
    columns = [("us", ".1f"), ("gb", ".1f"), ("of_bandwidth", ".0%"), ("gop", ".0f"), ("of_limit", ".0%")]
    columns += [("plain", ".1f")] if arguments.plain else []
    cells = [spread([row[key] for row in rows], form) for key, form in columns]
    print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


def peak_of(kind, library, peaks):
    if kind not in peaks:
        peaks[kind] = library.dot_peak_gop_per_s(kind)
        if peaks[kind]:
            print(f"| (peak of {kind} products) | | | | {peaks[kind]:.0f} | |", flush=True)
    return peaks[kind]


def timed(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def spread(values, form):
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


if __name__ == "__main__":
    main()
