"""Time from nothing to the first token, cold and warm, and peak memory while loading; each in fresh processes.

    python benchmarks/bench_start.py                              # gpt2-pocket, as `make demo` runs it
    python benchmarks/bench_start.py --shape gpt2-124m            # writes a random float32 checkpoint first
    python benchmarks/bench_start.py --model folder --batch 1     # a model of one's own, such as one that was saved packed

Cold: an empty compile cache. Warm: the cache that the cold start left. Both with everything installed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np
from shapes import hf_config

ROOT = pathlib.Path(__file__).resolve().parent.parent

FIRST_TOKEN = """
import json, resource, sys, time
begin = time.perf_counter()
from poptransformer import Session
imported = time.perf_counter()
prompts = [[10, 11, 12, 13], [14, 15, 16, 17, 18, 19]][:int(sys.argv[4])]
session = Session(sys.argv[1], precision=sys.argv[3] or None, batch_size=len(prompts), execution_cache_dir=sys.argv[2])
session.load()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
next(session.stream(prompts, max_new_tokens=4))
end = time.perf_counter()
peak_until_token = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"import": imported - begin, **session.timings_s, "inside": end - begin, "peak_bytes": peak,
                  "peak_until_token": peak_until_token,
                  "weights": sum(p.spec.num_bytes for p in session.model.parameters())}))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="a name in benchmarks/shapes.py")
    parser.add_argument("--model", default=ROOT / "examples/gpt2/gpt2-pocket", help="as Session takes it")
    parser.add_argument("--precision", default="", help="none: the model's own, or fp32")
    parser.add_argument("--batch", type=int, choices=(1, 2), default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if arguments.shape:
            model = write_checkpoint(pathlib.Path(folder) / "model", hf_config(arguments.shape))
        rounds = {"cold": [], "warm": []}
        for number in range(arguments.rounds):
            for kind in rounds:  # the warm start of a round uses what its cold start compiled
                rounds[kind].append(start(model, f"{folder}/cache-{number}", arguments.precision, arguments.batch))
    for kind, samples in rounds.items():
        columns = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
        peak, weights, until_token = (columns.pop(key) for key in ("peak_bytes", "weights", "peak_until_token"))
        print(f"{kind}: " + ", ".join(f"{key} {value:.2f} s" for key, value in columns.items()))
        print(f"      peak memory until the weights are loaded {peak / 1e6:.0f} MB: weights {weights / 1e6:.0f} MB "
              f"and {(peak - weights) / 1e6:.0f} MB; until the first token {until_token / 1e6:.0f} MB")  # fmt: skip


def start(model, cache, precision, batch):
    """One fresh process up to its first token; `process` is what a user waits, the interpreter's start included."""
    import time

    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", FIRST_TOKEN, str(model), cache, precision, str(batch)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return json.loads(done.stdout) | {"process": time.perf_counter() - begin}


def write_checkpoint(folder, config):
    """Write a random float32 checkpoint of a shape, in Hugging Face's format."""
    from safetensors.numpy import save_file

    from poptransformer.backends.engine import random_weight
    from poptransformer.models import find_model
    from poptransformer.register import REGISTER

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    float32, model_class = np.dtype(np.float32), find_model(config)
    with REGISTER.scope(batch_size=1, max_length=16, world_size=1, dtype=float32, weight_dtype=float32, cache_dtype=float32):
        model = model_class(model_class.config_class.from_hf(config))
    tensors = {}
    for parameter in model.parameters():
        array = random_weight(parameter)
        tensors[parameter.name] = np.ascontiguousarray(array.T if model.is_transposed(parameter.name) else array)
    save_file(tensors, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    main()
