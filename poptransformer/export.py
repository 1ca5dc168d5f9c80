"""Write a model as a folder that another host compiles: python -m poptransformer.export --model M --backend popart --out folder

The folder has the ONNX model, its weights, the options, and a script that needs the Poplar SDK alone. --check looks at
a folder without the SDK. docs/ipu.md says what to do with it.
"""

from __future__ import annotations

import argparse
import sys

from poptransformer.errors import UnsupportedError, UserError

BACKENDS = ("popart",)


def parse(arguments):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m poptransformer.export",
        description="Write a model as a folder that an IPU host compiles and runs, or check such a folder.",
    )
    add = parser.add_argument
    add("--check", metavar="FOLDER", help="check a folder and do nothing else")
    add("--model", help="a folder, a file of weights, or a name on the hub")
    add("--backend", default="popart", help=f"which compiler it is for: {', '.join(BACKENDS)}")
    add("--out", metavar="FOLDER", help="where to write")
    add("--precision", default="fp16", help="fp32, fp16, int8, int4 or fp8 (default fp16)")
    add("--kv-cache", help="fp32 or fp16 (default: as the activations)")
    add("--group-size", type=int, help="weights that share a scale in int8 and int4")
    add("--batch-size", type=int, default=1, help="rows that run side by side (default 1)")
    add("--max-length", type=int, help="tokens of a row, prompt and new ones together (default: the model's, at most 2048)")
    add("--prompt-length", type=int, help="the longest prompt, in tokens (default: half of max-length)")
    add("--max-new-tokens", type=int, help="the most new tokens of a row (default: what max-length leaves)")
    add("--sampling", default="greedy", help="greedy, all, or topN; with -p, -m, -r for top_p, min_p, repetition_penalty")
    add("--num-replicas", type=int, default=1, help="tensor-parallel ranks, a power of two (default 1)")
    add("--layers-per-device", help="auto, or the layers of each IPU of a replica: 0,6,7,7 (default: all on one)")
    add("--devices", type=int, help="IPUs that auto spreads the layers over, all replicas together")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the group popart; may be repeated")
    add("--random-weights", action="store_true", help="draw weights instead of reading them")
    given = parser.parse_args(arguments)
    if not given.check and not (given.model and given.out):
        parser.error("--model and --out are needed, or --check")
    return given


def read_options(texts) -> dict:
    """KEY=VALUE texts as a dict; true, false, null and whole numbers are what they look like."""
    words = {"true": True, "false": False, "null": None}
    options = {}
    for text in texts:
        key, is_pair, value = text.partition("=")
        if not is_pair:
            raise UserError(f"--option {text}: wanted KEY=VALUE")
        options[key] = words[value] if value in words else int(value) if value.isdecimal() else value
    return options


def export(given) -> str:
    """Write the folder that the command line asks for; gives the line to print."""
    if given.backend not in BACKENDS:
        raise UnsupportedError(f"backend={given.backend!r}: only programs for {', '.join(BACKENDS)} can be exported")
    from poptransformer.backends.popart.check import check_folder
    from poptransformer.backends.popart.writer import ProgramWriter
    from poptransformer.generation.program_wave import generate_name
    from poptransformer.models.sampling import Sampling
    from poptransformer.plan import layer_counts
    from poptransformer.session_arguments import positive
    from poptransformer.sessions import Session

    sampling = Sampling.parse(given.sampling)
    writer = ProgramWriter(read_options(given.option), given.num_replicas)
    layers = None if given.layers_per_device is None else layer_counts(given.layers_per_device)
    with Session(
        given.model, backend=writer, precision=given.precision, kv_cache=given.kv_cache, group_size=given.group_size,
        batch_size=given.batch_size, max_length=given.max_length, num_replicas=given.num_replicas, layers_per_device=layers,
        devices=given.devices, random_weights=given.random_weights,
    ) as session:  # fmt: skip
        longest = max(session.max_length // 2, 1) if given.prompt_length is None else given.prompt_length
        if positive("prompt_length", longest) >= session.max_length:
            raise UserError(f"prompt_length={longest} leaves no room for a new token in max_length={session.max_length}")
        most = session.max_length - longest
        most_new = most if given.max_new_tokens is None else positive("max_new_tokens", given.max_new_tokens)
        if most_new > most:
            raise UserError(
                f"max_new_tokens={most_new} and prompt_length={longest} are more than max_length={session.max_length} together"
            )
        name = generate_name(longest - 1, most_new, session.max_length, sampling)
        session.write_program(name, given.out)
    return check_folder(given.out)


def main(arguments=None) -> int:
    """Do what the command line asks for; returns the exit status."""
    given = parse(arguments)
    try:
        if given.check:
            from poptransformer.backends.popart.check import check_folder

            print(check_folder(given.check))
        else:
            print(export(given))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
