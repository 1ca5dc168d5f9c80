"""What happens on an IPU host, in one command and as a report to paste: python -m poptransformer.backends.popart.selfcheck

The host and its SDK, the devices, then tiny models with random weights from prompt to tokens, each compared with the NumPy
reference. Nothing is downloaded and no file is read.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time

import numpy as np

import poptransformer
from poptransformer.backends.popart.host import LocalHost, WorkerHost
from poptransformer.backends.popart.options import DEVICES
from poptransformer.errors import UserError

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 257, "n_embd": 64, "n_layer": 4, "n_head": 4,
    "n_positions": 64,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = [[5, 17, 99, 3], [42]]
ENVIRONMENT = ("POPLAR_SDK_ENABLED", "POPART_CACHE_DIR", "POPXL_CACHE_DIR", "POPLAR_ENGINE_OPTIONS", "IPUOF_CONFIG_PATH",
               "IPUOF_VIPU_API_PARTITION_ID", "POPLAR_RUNTIME_OPTIONS")  # fmt: skip
# name -> (config, IPUs, arguments of Session, settings). In float16 logits differ in the third digit.
STEPS = {
    "gpt2 fp32, greedy": (GPT2, 1, {}, {}),
    "gpt2 fp16, greedy": (GPT2, 1, {"precision": "fp16"}, {}),
    "gpt2 fp32, top_k 5 and top_p 0.9": (GPT2, 1, {}, {"top_k": 5, "top_p": 0.9, "seed": 7}),
    "llama fp32, greedy": (LLAMA, 1, {}, {}),
    "gpt2 fp32, prompts in the loop": (GPT2, 1, {"popart": {"prefill": "stepwise"}}, {}),
    "gpt2 int8": (GPT2, 1, {"precision": "int8"}, {}),
    "gpt2 fp32, 2 stages": (GPT2, 2, {"layers_per_device": [2, 2]}, {}),
    "gpt2 fp32, 2 replicas": (GPT2, 2, {"num_replicas": 2}, {}),
}


def parse(arguments):
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m poptransformer.backends.popart.selfcheck", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="ipu", help="default: ipu")
    parser.add_argument("--python", help="the interpreter that has the Poplar SDK, where it is not this one")
    parser.add_argument("--ipus", type=int, default=2, help="the most IPUs to use (default 2)")
    return parser.parse_args(arguments)


def main(arguments=None, write=print) -> int:
    """Write the report line by line; 0 if every step went as it should."""
    given = parse(arguments)
    started = time.time()
    write(f"poptransformer {poptransformer.__version__}, Python {platform.python_version()}, {platform.platform()}")
    write(f"NumPy {np.__version__}, {os.cpu_count()} CPUs")
    write(
        "environment: " + (", ".join(f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ) or "none set")
    )
    try:
        host = WorkerHost(given.python) if given.python else LocalHost()
    except UserError as error:
        write(f"FAILED {error}")
        return 1
    try:
        write(f"PopART {host.version}{f', in {given.python}' if given.python else ''}")
        write(f"devices: {_devices(host)}")
    finally:
        host.close()
    failed = []
    for name, (config, ipus, session, settings) in STEPS.items():
        if ipus > given.ipus or ipus > 1 and given.device == "cpu":
            write(f"skipped {name}: wants {ipus} IPUs")
            continue
        if session.get("num_replicas") and given.device == "ipu_model":
            write(f"skipped {name}: ipu_model has no replicas")
            continue
        begin = time.time()
        try:
            told = _step(config, session, settings, given)
        except Exception as error:  # a report of everything that happens is what this is for
            failed.append(name)
            told = f"{type(error).__name__}: {error}"
        write(f"{'FAILED' if name in failed else 'ok'} {name} ({time.time() - begin:.1f} s): {told}")
    count = f"{len(failed)} of {len(STEPS)} steps failed" if failed else "all steps passed"
    write(f"{count} on device {given.device}, {time.time() - started:.0f} s in all")
    return 1 if failed else 0


def _devices(host):
    try:
        found = host.devices()
    except Exception as error:  # whatever the SDK raises: the steps show whether it matters
        return f"not listed: {error}"
    return ", ".join(f"{count} x {kind}" for kind, count in found.items()) or "none"


def _step(config, session, settings, given):
    """Generate on the device and by the reference; gives a line about it. Raises: AssertionError where they differ."""
    from poptransformer.sessions import Session

    arguments = {"random_weights": True, "batch_size": 2, "max_length": 40} | session
    popart = {"device": given.device, "python": given.python} | arguments.pop("popart", {})
    settings = {"max_new_tokens": 12, "ignore_eos": True} | settings
    with Session(config, backend="popart", popart=popart, **arguments) as ours:
        arguments.pop("layers_per_device", None)
        with Session(config, backend="reference", **arguments) as theirs:
            ours.compile([4])
            if given.device == "offline":
                return "compiled; an offline device does not run"
            found, wanted = (each.generate(PROMPTS, logprobs=True, **settings) for each in (ours, theirs))
    timings = found[0].timings
    difference = max(_difference(one, other) for one, other in zip(found, wanted, strict=True))
    tokens = [out.token_ids for out in found]
    limit = 1e-3 if arguments.get("precision", "fp32") == "fp32" else 0.1
    assert difference < limit, (
        f"log-probabilities differ by {difference:.1e}; tokens {tokens}, wanted {[out.token_ids for out in wanted]}"
    )
    return (
        f"log-probabilities within {difference:.1e} of the reference, {timings.decode_ms_per_token:.2f} ms/step with transfers"
    )


def _difference(found, wanted):
    """Between the log-probabilities of two generations, up to the first token that is another: near ties fall either way."""
    same = 0
    while same < len(found.token_ids) and found.token_ids[same] == wanted.token_ids[same]:
        same += 1
    assert same or not found.token_ids, f"the first token is {found.token_ids[0]}, wanted {wanted.token_ids[0]}"
    return float(np.abs(np.subtract(found.logprobs[: same + 1], wanted.logprobs[: same + 1])).max())


if __name__ == "__main__":
    sys.exit(main())
