"""Time the linear kernel beside XLA's own product, for the few rows of a decode step, in one run.

    python -m benchmarks.ops.bench_linear [--rounds 20]

Each call runs a matrix for each of `layers` layers in one jitted program, so that all together exceed the cache of the CPU.
"""

import argparse
import platform
import types

import jax
import jax.numpy as jnp

from benchmarks.timing import interleave
from poptransformer.backends.xla import custom_ops
from poptransformer.backends.xla.linear import linear

SHAPES = {"768 to 2304": (768, 2304), "768 to 3072": (768, 3072), "3072 to 768": (3072, 768), "1600 to 6400": (1600, 6400)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    library = custom_ops.load_cpu_library()
    print(f"{library.isa}, {library.num_threads} threads; jax {jax.__version__}, python {platform.python_version()}")
    print(
        "median us a product (half the spread of the middle half); GB/s of weights, share of the bandwidth measured beside it"
    )
    for name, (size_in, size_out) in SHAPES.items():
        for dtype in ("float32", "bfloat16"):
            for rows in (1, 8):
                report(name, size_in, size_out, dtype, rows, rounds, library)


def report(name, size_in, size_out, dtype, rows, rounds, library):
    num_bytes = size_in * size_out * jnp.dtype(dtype).itemsize
    layers = max(2, (200 << 20) // num_bytes)
    x = jax.random.normal(jax.random.key(0), (rows, size_in), dtype)
    weights = [jax.random.normal(jax.random.key(i), (size_out, size_in), dtype) * 0.02 for i in range(layers)]

    def program(ops):
        context = types.SimpleNamespace(custom_ops=frozenset(ops))
        run = jax.jit(lambda x, weights: [linear(context, x, weight, None, x.dtype) for weight in weights])
        return lambda: jax.block_until_ready(run(x, weights))

    samples = interleave({"kernel": program(["linear"]), "xla": program([])}, rounds)
    bandwidth = library.read_bandwidth_gb_per_s()
    cells = []
    for which, sample in samples.items():
        rate = num_bytes * layers / sample.median / 1e9
        us = 1e6 * sample.median / layers
        cells.append(f"{which} {us:.0f} us (±{sample.spread:.0%}), {rate:.1f} GB/s, {rate / bandwidth:.0%}")
    print(f"{name}, {dtype}, {rows} rows: {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
