"""Loss of a model on a text, for each precision of weights and KV cache, beside float32's: is a format as good as it should be?

    python benchmarks/accuracy.py                                    # gpt2-pocket on its valid.txt
    python benchmarks/accuracy.py --model smollm2 --tokens 8000      # after: python -m poptransformer.checkpoint.fetch smollm2
    POPTRANSFORMER_ISA=avx512 python benchmarks/accuracy.py          # without tiles: activations in 8 bits for prompts, too

The text is cut into windows that a row has room for; the loss is the mean of -log p over all tokens but each window's first. A
text is read as a prompt is: where the CPU has tiles, packed weights are multiplied as bfloat16 there, while decoding multiplies
integers by activations in 8 bits, which the third command shows. Exit status 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys

import numpy as np

from poptransformer import Session

ROOT = pathlib.Path(__file__).resolve().parent.parent
POCKET = ROOT / "examples" / "gpt2" / "gpt2-pocket"

# (what the row is called, arguments of Session, by how much the loss may exceed float32's; None: no bound)
VARIANTS = (
    ("fp32", {}, None),
    ("bf16", {"precision": "bf16"}, None),
    ("fp16", {"precision": "fp16"}, None),
    ("fp8", {"precision": "fp8"}, 0.01),
    ("int8, groups of 32", {"precision": "int8"}, 0.005),
    ("int8, rows", {"precision": "int8", "group_size": -1}, 0.005),
    ("int4, groups of 32", {"precision": "int4"}, 0.04),
    ("int4, groups of 64", {"precision": "int4", "group_size": 64}, None),
    ("int4, groups of 128", {"precision": "int4", "group_size": 128}, None),
    ("int4, rows", {"precision": "int4", "group_size": -1}, None),
    ("KV cache fp16", {"kv_cache": "fp16"}, None),
    ("KV cache bf16", {"kv_cache": "bf16"}, None),
    ("KV cache fp8", {"kv_cache": "fp8"}, 0.005),
    ("KV cache int8", {"kv_cache": "int8"}, 0.005),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(POCKET))
    parser.add_argument("--text", type=pathlib.Path, default=POCKET / "valid.txt")
    parser.add_argument("--tokens", type=int, help="how many of the text's first tokens; all without it")
    parser.add_argument("--window", type=int, default=512, help="tokens of a row")
    parser.add_argument("--only", nargs="+", help="names of variants, beside fp32")
    parser.add_argument("--custom-ops", default="auto", choices=("auto", "false"))
    arguments = parser.parse_args()
    text, exact, failed, shown = arguments.text.read_text(encoding="utf-8"), None, [], False
    for name, options, bound in VARIANTS:
        if arguments.only and name not in ("fp32", *arguments.only):
            continue
        custom_ops = "auto" if arguments.custom_ops == "auto" else False
        with Session(arguments.model, max_length=arguments.window, custom_ops=custom_ops, **options) as session:
            ids = session.tokenizer.encode(text)[: arguments.tokens]
            losses = token_losses(session, ids, arguments.window)
            if not shown:
                print(f"{arguments.model}: {len(losses)} tokens; custom ops {session.device_info.custom_ops}\n")
                print("| | loss | beside fp32 | bound |\n|---|---|---|---|", flush=True)
                shown = True
        loss, exact = losses.mean(), losses if exact is None else exact
        change = loss / exact.mean() - 1
        # How much of the difference is this text's: its standard error over tokens.
        error = np.std(losses - exact) / math.sqrt(len(losses)) / exact.mean()
        is_over = bound is not None and not change < bound
        failed += [name] if is_over else []
        beside = "" if losses is exact else f"{change:+.2%} (±{error:.2%})"
        print(
            f"| {name} | {loss:.4f} | {beside} | {'' if bound is None else f'{bound:.1%}'}{' exceeded' * is_over} |", flush=True
        )
    return 1 if failed else 0


def token_losses(session, ids, window):
    """-log p of each token but the first of every window; a last window of one token is left out."""
    starts = [start for start in range(0, len(ids), window) if len(ids) - start > 1]
    return np.concatenate([-session.score(ids[start : start + window]).astype(np.float64) for start in starts])


if __name__ == "__main__":
    sys.exit(main())
