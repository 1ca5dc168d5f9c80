"""GPT-2 by Hugging Face under poptorch.inferenceModel: the baseline that PopTransformer was published against.

    python benchmarks/peers/poptorch_gpt2.py --model gpt2 --prompt-tokens 128 --new-tokens 64

Each new token is a whole forward pass of the padded row, as PopTorch traces one static graph and a model's cache does not stay
on the device between two calls. Needs an IPU host with the Poplar SDK and its poptorch wheel, torch and transformers in the
Python that runs this (3.8 is enough); says so and ends elsewhere. It has never been run: no such host was at hand.
"""

import argparse
import statistics
import sys
import time

MISSING = (
    "poptorch baseline skipped: {what} is not installed in {python}. It comes with the Poplar SDK: source its "
    "poplar-*/enable.sh, install its poptorch wheel (pip install <sdk>/poptorch-*.whl) and transformers, and run this again on "
    "an IPU host."
)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="folder or name on the hub (default gpt2, 124 M weights)")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp16")
    return parser.parse_args()


def main():
    """Print ms/token, or why there are none."""
    arguments = parse_arguments()
    try:
        import poptorch
        import torch
        import transformers
    except ImportError as error:
        print(MISSING.format(what=error.name, python=sys.executable))
        return
    if not poptorch.ipuHardwareIsAvailable():
        print("poptorch baseline skipped: this host has no IPU that is free; gc-monitor shows who has them.")
        return

    class NextToken(torch.nn.Module):
        """Ids [B, S] and the row's newest position -> the best next token [B]; logits of other positions stay on the device."""

        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids, position):
            logits = self.model(input_ids=input_ids, use_cache=False, return_dict=True).logits
            return torch.argmax(torch.index_select(logits, 1, position)[:, 0], -1)

    length = arguments.prompt_tokens + arguments.new_tokens
    model = transformers.GPT2LMHeadModel.from_pretrained(arguments.model).eval()
    model = model.half() if arguments.precision == "fp16" else model
    options = poptorch.Options()
    options.deviceIterations(1)
    compiled = poptorch.inferenceModel(NextToken(model), options)
    ids = torch.zeros(arguments.batch_size, length, dtype=torch.int32)
    ids[:, : arguments.prompt_tokens] = torch.randint(10, 250, (arguments.batch_size, arguments.prompt_tokens))

    def generate():
        row = ids.clone()
        begin = time.perf_counter()
        for place in range(arguments.prompt_tokens, length):
            row[:, place] = compiled(row, torch.tensor([place - 1], dtype=torch.int32))
        return 1e3 * (time.perf_counter() - begin) / arguments.new_tokens

    begin = time.perf_counter()
    compiled(ids, torch.tensor([arguments.prompt_tokens - 1], dtype=torch.int32))
    print(f"compiled in {time.perf_counter() - begin:.1f} s")
    generate()  # warms up
    samples = [generate() for _ in range(arguments.rounds)]
    spread = f"median of {len(samples)}; {min(samples):.2f} to {max(samples):.2f}"
    what = f"{arguments.model}, {arguments.precision}, batch {arguments.batch_size}, rows of {length}"
    print(f"poptorch {poptorch.__version__}, {what}: {statistics.median(samples):.2f} ms/token ({spread})")


if __name__ == "__main__":
    main()
