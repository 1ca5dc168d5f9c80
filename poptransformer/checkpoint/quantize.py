"""Save a model with packed weights: python -m poptransformer.checkpoint.quantize --model M --precision int4 --out folder

What Session.save_quantized does, from the command line. Nothing runs on a device.
"""

import argparse
import sys

from poptransformer.errors import UserError


def main(arguments=None):
    """Save what the command line names and print where; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m poptransformer.checkpoint.quantize",
        description="Read a model, pack its weights and save it as a folder that a Session opens at once.",
    )
    parser.add_argument("--model", required=True, help="a folder, a file of weights, or a name, as Session takes them")
    parser.add_argument("--precision", required=True, help="int4, int8 or fp8; fp32, bf16 and fp16 save plain weights")
    parser.add_argument("--group-size", type=int, help="weights that share a scale: 32, 64, 128, or -1 for the whole row")
    parser.add_argument("--out", required=True, help="the folder to write; it must not be there yet, or be empty")
    given = parser.parse_args(arguments)
    from poptransformer import Session  # a program over the public API; the rest of this folder is below it

    try:
        with Session(given.model, precision=given.precision, group_size=given.group_size, backend="reference") as session:
            print(session.save_quantized(given.out))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"error: interrupted; nothing was left in {given.out}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
