"""Make the tiny GPT-2 and the expected numbers that tests compare with, by Hugging Face transformers in float32.

    python tests/golden/make_gpt2.py             writes gpt2/ and gpt2.json beside this file
    python tests/golden/make_gpt2.py --check     compares instead of writing

The same versions give the same bytes; other versions should pass --check. Needs torch and transformers.
"""

import argparse
import json
import math
import pathlib
import platform
import re
import sys
import tempfile

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).resolve().parent
POCKET = FOLDER.parents[1] / "examples" / "gpt2" / "gpt2-pocket"
# Every size is odd where the architecture allows it, and none is a multiple of a vector register.
TINY = {
    "vocab_size": 257,
    "n_embd": 39,
    "n_head": 3,
    "n_layer": 3,
    "n_positions": 61,
    "n_inner": 77,
    "layer_norm_epsilon": 1e-4,
    "bos_token_id": 255,
    "eos_token_id": 256,
}
TINY_PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(0, 250, 11)), [256, 0, 255]]
POCKET_PROMPTS = ["Once upon a time", "The old man opened the box and", "Lily", '"Why?" asked the dog.\n\nThe cat']
NUM_NEW = {"gpt2-tiny": 37, "gpt2-pocket": 48}
WINDOW = 512  # tokens of one text of the loss
LEAST_MARGIN = 1e-3  # between the two best logits of every greedy choice: far above what float32 sums differ by


def make_tiny(folder):
    """Write a GPT-2 whose weights are all drawn wide, norms and biases too, so that each of them shows in the logits."""
    config = transformers.GPT2Config(**TINY, architectures=["GPT2LMHeadModel"])
    model = transformers.GPT2LMHeadModel(config).eval()
    generator = np.random.default_rng(2)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = generator.standard_normal(parameter.shape)
            if name.endswith("weight") and ".ln_" in name:
                drawn = 1 + 0.3 * drawn
            elif name.endswith("bias"):
                drawn = 0.3 * drawn
            elif ".wte" in name:
                drawn = 0.3 * drawn
            elif ".wpe" not in name:
                drawn = 2 * drawn / math.sqrt(parameter.shape[0])  # Conv1D: [in, out]
            parameter.copy_(torch.from_numpy(drawn.astype(np.float32)))
    model.generation_config = transformers.GenerationConfig(bos_token_id=255, eos_token_id=256)
    model.save_pretrained(folder)
    folder.joinpath("model.safetensors").chmod(0o644)


def expected(model, prompts, num_new):
    """Logits at a few places and the greedy continuation of each prompt, EOS not heeded."""
    cases = []
    for prompt in prompts:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
            ids, margin = list(prompt), math.inf
            while len(ids) < len(prompt) + num_new:
                best = model(torch.tensor([ids])).logits[0, -1].topk(2)
                margin = min(margin, float(best.values[0] - best.values[1]))
                ids.append(int(best.indices[0]))
        if margin < LEAST_MARGIN:
            sys.exit(f"prompt {prompt}: two logits are {margin:.1e} apart, which rounding may turn around; choose another")
        positions = sorted({0, len(prompt) // 2, len(prompt) - 1})
        tokens = list(range(0, logits.shape[1], logits.shape[1] // 12))
        cases.append(
            {
                "prompt": list(prompt),
                "greedy": ids[len(prompt) :],
                "least_margin": round(margin, 5),
                "positions": positions,
                "tokens": tokens,
                "logits": [[round(float(logits[p, t]), 6) for t in tokens] for p in positions],
            }
        )
    return cases


def pocket_loss(model, tokenizer):
    """Mean over all predictions in windows of 512 tokens without overlap; the rest of the file is left out."""
    ids = tokenizer(POCKET.joinpath("valid.txt").read_text(encoding="utf-8"), verbose=False)["input_ids"]
    losses = []
    for begin in range(0, len(ids) - WINDOW + 1, WINDOW):
        window = torch.tensor([ids[begin : begin + WINDOW]])
        with torch.no_grad():
            losses.append(float(model(window, labels=window).loss))
    return {"num_tokens": len(ids), "num_windows": len(losses), "mean": round(float(np.mean(losses)), 5)}


def load(folder):
    return transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    is_check = parser.parse_args().check
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = pathlib.Path(scratch) if is_check else FOLDER / "gpt2"
        make_tiny(tiny)
        tokenizer = transformers.AutoTokenizer.from_pretrained(POCKET)
        pocket, tiny_model = load(POCKET), load(tiny)
        made = {
            "made_by": "python tests/golden/make_gpt2.py",
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "gpt2-tiny": {"cases": expected(tiny_model, TINY_PROMPTS, NUM_NEW["gpt2-tiny"])},
            "gpt2-pocket": {
                "cases": expected(pocket, [tokenizer(text)["input_ids"] for text in POCKET_PROMPTS], NUM_NEW["gpt2-pocket"]),
                "texts": POCKET_PROMPTS,
                "valid_loss": pocket_loss(pocket, tokenizer),
            },
        }
        if not is_check:
            (FOLDER / "gpt2.json").write_text(to_json(made), encoding="utf-8")
            return
        wanted = json.loads((FOLDER / "gpt2.json").read_text(encoding="utf-8"))
        compare(made, wanted)
        old = load(FOLDER / "gpt2").state_dict()
        for name, weight in tiny_model.state_dict().items():
            np.testing.assert_array_equal(old[name].numpy(), weight.numpy(), err_msg=name)
    print("the same")


def to_json(made):
    """JSON with one line for each list of numbers."""
    text = json.dumps(made, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda match: " ".join(match[0].split()), text) + "\n"


def compare(made, wanted):
    for name in ("gpt2-tiny", "gpt2-pocket"):
        for new, old in zip(made[name]["cases"], wanted[name]["cases"], strict=True):
            assert new["prompt"] == old["prompt"] and new["greedy"] == old["greedy"], (name, old["prompt"])
            np.testing.assert_allclose(new["logits"], old["logits"], rtol=1e-5, atol=2e-5)
    new, old = (side["gpt2-pocket"]["valid_loss"] for side in (made, wanted))
    assert new["num_windows"] == old["num_windows"] and abs(new["mean"] - old["mean"]) < 1e-4, (new, old)


if __name__ == "__main__":
    main()
