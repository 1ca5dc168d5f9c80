"""Time the attention kernel beside the plain XLA lowering, decode and prefill, in one run.

    python -m benchmarks.ops.bench_attention [--rounds 20] [--only decode]

Decode lines give the cache bytes that one call must read over the time, and that as a share of the read bandwidth measured
between the lines. Each call is one attention op of one of `layers` layers inside a jitted loop that carries the caches, as a
decode loop does; all layers together exceed the cache of the CPU where a line says so.
"""

import argparse
import dataclasses
import os
import platform

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import interleave
from poptransformer.backends.xla import custom_ops
from poptransformer.backends.xla.attention import plain_attention


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_new: int  # T
    context: int  # positions in the cache before the call
    capacity: int  # S
    layers: int
    dtype: str
    cache_dtype: str
    batch: int = 1
    window: int | None = None
    use_slopes: bool = False
    is_prefix: bool = False  # whether all new tokens see each other

    @property
    def cache_bytes(self):
        """Read by one call."""
        positions = self.batch * min(self.context + self.num_new, self.num_new - 1 + (self.window or self.capacity))
        return 2 * positions * self.num_kv_heads * self.head_dim * jnp.dtype(self.cache_dtype).itemsize

    @property
    def flops(self):
        """Of one call, without what masks hide."""
        ends = self.context + np.arange(1, self.num_new + 1)
        seen = np.minimum(ends, self.window or self.capacity).sum()
        if self.is_prefix:
            seen = self.num_new * ends[-1]
        return 4 * self.batch * int(seen) * self.num_heads * self.head_dim

    @property
    def options(self):
        """Keyword arguments of the op."""
        slopes = np.exp2(-8 * np.arange(1, self.num_heads + 1) / self.num_heads).astype(np.float32)
        return {
            "window": self.window,
            "context_len": np.full(self.batch, self.context + self.num_new, np.int32) if self.is_prefix else None,
            "alibi_slopes": slopes if self.use_slopes else None,
        }


def decode_cases():
    for dtype in ("float32", "bfloat16"):
        for context, capacity in ((128, 1024), (1000, 1024)):
            yield Case("gpt2-124m", 12, 12, 64, 1, context, capacity, 12, dtype, dtype)
    yield Case("gpt2-124m", 12, 12, 64, 1, 1000, 1024, 12, "bfloat16", "bfloat16", batch=8)
    for context, capacity in ((1000, 1024), (8000, 8192)):
        yield Case("gqa-32/8", 32, 8, 128, 1, context, capacity, 4, "bfloat16", "bfloat16")
    yield Case("mqa-32/2", 32, 2, 128, 1, 8000, 8192, 4, "bfloat16", "bfloat16")
    yield Case("window", 32, 8, 128, 1, 8000, 8192, 4, "bfloat16", "bfloat16", window=1024)
    yield Case("slopes", 16, 16, 64, 1, 1000, 1024, 12, "bfloat16", "bfloat16", use_slopes=True)


def prefill_cases():
    for dtype in ("float32", "bfloat16"):
        for num_new in (64, 512, 1024):
            yield Case("gpt2-124m", 12, 12, 64, num_new, 0, 1024, 1, dtype, dtype)
    yield Case("gqa-32/8", 32, 8, 128, 512, 0, 1024, 1, "bfloat16", "bfloat16")
    yield Case("gqa-32/8", 32, 8, 128, 128, 3968, 4096, 1, "bfloat16", "bfloat16")
    yield Case("window", 32, 8, 128, 128, 3968, 4096, 1, "bfloat16", "bfloat16", window=1024)
    yield Case("slopes", 16, 16, 64, 512, 0, 1024, 1, "bfloat16", "bfloat16", use_slopes=True)
    yield Case("prefix", 32, 32, 128, 512, 0, 1024, 1, "bfloat16", "bfloat16", is_prefix=True)


def looped(attention, case, steps):
    """A function that runs `steps` tokens through all layers, and how many calls that is. Caches are carried and donated."""
    rng = np.random.default_rng(0)
    rows = (case.batch, case.num_new)
    new = [
        jnp.asarray(rng.standard_normal((*rows, heads, case.head_dim)), case.dtype)
        for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    ]
    shape = (case.batch, case.num_kv_heads, case.capacity, case.head_dim)
    cache = jnp.asarray(rng.standard_normal(shape, dtype=np.float32), case.cache_dtype)
    state = [[(jnp.array(cache), jnp.array(cache)) for _ in range(case.layers)]]
    lengths = jnp.full(case.batch, case.context, jnp.int32)
    counts = jnp.full(case.batch, case.num_new, jnp.int32)

    def run(query, key, value, caches):
        def step(_, carry):
            query, caches = carry
            updated = []
            for k_cache, v_cache in caches:
                inputs = (query, key, value, k_cache, v_cache, lengths, counts, case.head_dim**-0.5)
                query, k_cache, v_cache = attention(*inputs, **case.options)
                updated.append((k_cache, v_cache))
            return query, updated

        return jax.lax.fori_loop(0, steps, step, (query, caches))

    run = jax.jit(run, donate_argnums=3)

    def call():
        out, state[0] = run(*new, state[0])
        out.block_until_ready()

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--model", help="only the cases of this model")
    options = parser.parse_args()
    library = custom_ops.load_cpu_library()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, jax {jax.__version__}, isa {library.isa},")
    print(f"{library.num_threads} threads, median of {options.rounds} rounds, +- half the quartile distance")

    cases = [*decode_cases(), *prefill_cases()]
    for case in cases:
        is_decode = case.num_new == 1
        if options.only and is_decode != (options.only == "decode") or options.model not in (None, case.model):
            continue
        steps = max(1, min(16, (200 << 20) // (case.cache_bytes * case.layers))) if is_decode else 1
        samples = interleave(
            {
                "kernel": looped(custom_ops.attention, case, steps),
                "plain": looped(plain_attention, case, steps),
            },
            options.rounds,
            settle_runs=1,  # the plain lowering frees large temporaries for a while after it is done
        )
        num_calls = steps * case.layers
        kernel_s, plain_s = samples["kernel"].median / num_calls, samples["plain"].median / num_calls
        line = (
            f"{case.model:9} {case.dtype:8} B={case.batch} T={case.num_new:<4} context {case.context:4} of {case.capacity:4}: "
            f"kernel {kernel_s * 1e6:8.1f} us +-{samples['kernel'].spread:4.0%}, "
            f"plain {plain_s * 1e6:8.1f} us +-{samples['plain'].spread:4.0%}, x{plain_s / kernel_s:4.1f}; "
        )
        if is_decode:
            read_gb_per_s = case.cache_bytes / kernel_s / 1e9
            peak_gb_per_s = library.read_bandwidth_gb_per_s(num_repetitions=5)
            line += f"{read_gb_per_s:5.1f} GB/s, {read_gb_per_s / peak_gb_per_s:4.0%} of {peak_gb_per_s:.1f}; "
            line += f"{case.cache_bytes * case.layers / 2**20:.0f} MiB in all layers"
        else:
            line += f"{case.flops / kernel_s / 1e9:5.0f} GFLOP/s"
        print(line, flush=True)


if __name__ == "__main__":
    main()
