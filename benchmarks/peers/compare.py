"""This project beside the other engines: each in a process of its own that stays up, all in turn, round after round.

    decode   (T(prompt, n new) - T(prompt, 1 new)) / (n - 1)
    prefill  tokens of the prompt / T(prompt, 1 new)

Ratios are medians over the rounds of theirs over ours in the same round. Every prompt is new: no cache of prompts helps.
"""

from __future__ import annotations

import pathlib
import statistics
import sys

import numpy as np

from benchmarks.peers.catalog import VARIANTS, default_folder, find_interpreters
from benchmarks.peers.engine import EngineError, RemoteEngine
from poptransformer import Session
from poptransformer.backends.xla.custom_ops import load_cpu_library
from poptransformer.checkpoint.reader import Checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]
OURS = "poptransformer"


def compare(arguments):
    """Measure and print a table for each precision.

    Args:
      arguments: those of bench_generate.py.
    """
    library = load_cpu_library()
    with Checkpoint.open(arguments.model) as checkpoint:
        source = pathlib.Path(checkpoint.path).resolve()
    folder = default_folder(source)
    interpreters = find_interpreters()
    print(f"{arguments.model}, batch {arguments.batch_size}, prompt {arguments.prompt_tokens}, new {arguments.new_tokens}, "
          f"prefill of {arguments.prefill or arguments.prompt_tokens}, {arguments.threads} threads, {arguments.rounds} rounds, "
          f"{library.instructions}")  # fmt: skip
    for precision in arguments.precision:
        with Session(arguments.model, precision=precision) as session:
            weight_bytes, vocab_size = session.weight_bytes_per_token, session.config.vocab_size
        engines, absent = start(arguments, precision, source, folder, interpreters, vocab_size)
        try:
            samples, bandwidths = measure(arguments, engines, absent, vocab_size, library)
            loads = {name: (engine.load_s, engine.peak_mb) for name, engine in engines.items()}
        finally:
            for engine in engines.values():
                engine.close()
        report(arguments, precision, samples, loads, absent, bandwidths, weight_bytes)


def start(arguments, precision, source, folder, interpreters, vocab_size):
    """Engines by name, ours first, and why others are absent."""
    longest = max(arguments.prefill or 0, arguments.prompt_tokens + arguments.new_tokens) + 1
    common = {
        "precision": precision, "threads": arguments.threads, "batch_size": arguments.batch_size,
        "max_length": arguments.max_length or -(-longest // 64) * 64,
    }  # fmt: skip
    wanted = {f"{OURS} {precision}": (sys.executable, OURS, source, {})}
    absent = {}
    for variant in VARIANTS.get(precision, ()):
        path = folder / variant.file if variant.file else source
        if variant.engine not in interpreters:
            absent[variant.name] = "not installed"
        elif not path.exists():
            absent[variant.name] = f"{path} is not there: run python -m benchmarks.peers.prepare"
        else:
            options = dict(variant.options)
            if variant.engine in ("onnxruntime_genai", "ctranslate2"):
                options["unused_id"] = vocab_size - 1
            wanted[variant.name] = (interpreters[variant.engine], variant.engine, path, options)
    engines = {}
    for name, (python, engine, path, options) in wanted.items():
        try:
            engines[name] = RemoteEngine(python, engine, ROOT, model=str(path), options=options, **common)
        except EngineError as error:
            absent[name] = str(error)
    return engines, absent


def measure(arguments, engines, absent, vocab_size, library):
    """samples: name -> one dict a round; and the bandwidths beside them. An engine that fails goes to the absent ones."""
    generator = np.random.default_rng(0)

    def prompts(length):
        return generator.integers(3, vocab_size - 3, (arguments.batch_size, length)).tolist()

    samples, bandwidths = {name: [] for name in engines}, []
    for round_number in range(arguments.rounds + 1):
        for name, engine in engines.items():
            if name in absent:
                continue
            try:
                bandwidth = library.read_bandwidth_gb_per_s(num_repetitions=5)
                one = engine.seconds(prompts(arguments.prompt_tokens), 1)
                many = engine.seconds(prompts(arguments.prompt_tokens), arguments.new_tokens)
                prefill = engine.seconds(prompts(arguments.prefill), 1) if arguments.prefill else one
            except EngineError as error:
                absent[name] = str(error)
                continue
            if round_number > 0:  # the first one warms up
                decode_ms = 1e3 * (many - one) / (arguments.new_tokens - 1)
                num_tokens = arguments.batch_size * (arguments.prefill or arguments.prompt_tokens)
                samples[name].append({"decode_ms": decode_ms, "prefill_tok_s": num_tokens / prefill})
                bandwidths.append(bandwidth)
    return samples, bandwidths


def report(arguments, precision, samples, loads, absent, bandwidths, weight_bytes):
    """Print the table of one precision."""
    ours = samples[f"{OURS} {precision}"] if samples else []
    print(f"\n{precision}: weights {weight_bytes / 1e6:.0f} MB a token", end="")
    if bandwidths:
        limit = weight_bytes / 1e6 / statistics.median(bandwidths)
        print(f"; read bandwidth GB/s {spread(bandwidths, '.1f')}; limit of decode {limit:.2f} ms", end="")
    print("\n\n| | decode ms/step | tokens/s | theirs / ours | prefill tok/s | ours / theirs | load s | peak MB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rows in samples.items():
        if name in absent or not rows:
            continue
        decode, prefill = ([row[key] for row in rows] for key in ("decode_ms", "prefill_tok_s"))
        per_s = 1e3 * arguments.batch_size / statistics.median(decode)
        cells = [spread(decode, ".2f"), f"{per_s:.0f}", "", spread(prefill, ".0f"), ""]
        if rows is not ours and ours:
            pairs = list(zip(rows, ours, strict=False))
            cells[2] = f"{statistics.median(their['decode_ms'] / our['decode_ms'] for their, our in pairs):.2f}"
            cells[4] = f"{statistics.median(our['prefill_tok_s'] / their['prefill_tok_s'] for their, our in pairs):.2f}"
        load_s, peak_mb = loads[name]
        print(f"| {name} | {' | '.join(cells)} | {load_s:.2f} | {peak_mb:.0f} |")
    for name, reason in absent.items():
        print(f"| {name} | absent: {reason} | | | | | | |")


def spread(values, form):
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"
