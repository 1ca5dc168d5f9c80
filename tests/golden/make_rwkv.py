"""Make the tiny RWKV-4 and the expected numbers that tests compare with, by Hugging Face transformers in float32.

    python tests/golden/make_rwkv.py             writes rwkv/ and rwkv.json beside this file
    python tests/golden/make_rwkv.py --check     compares instead of writing

The same versions give the same bytes; other versions should pass --check. Needs torch, transformers and tokenizers.
"""

import argparse
import json
import math
import pathlib
import platform
import tempfile

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from make_gpt2 import FOLDER, expected, to_json

# No size is a multiple of a vector register, attention has a width of its own, and the stream is halved on the way.
TINY = {
    "vocab_size": 259,
    "hidden_size": 31,
    "attention_hidden_size": 37,
    "intermediate_size": 43,
    "num_hidden_layers": 3,
    "context_length": 67,
    "layer_norm_epsilon": 1e-3,
    "rescale_every": 2,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
SPECIAL = ["<|endoftext|>", "<|padding|>"]
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(0, 250, 11)), [256, 0, 255]]
NUM_NEW = 41


def draw_weights(config, seed):
    """Draw all weights wide, norms too, so that each of them shows in the logits, and decays from slow to sudden.

    Returns: dict of name -> tensor; a tied weight once.
    """
    with torch.device("meta"):  # without memory, and without transformers' own weights, which take long to draw
        shapes = {name: parameter.shape for name, parameter in transformers.RwkvForCausalLM(config).named_parameters()}
    generator, tensors = np.random.default_rng(seed), {}
    for name, shape in sorted(shapes.items()):
        drawn = generator.standard_normal(shape)
        if "ln" in name and name.endswith("weight"):
            drawn = 1 + 0.3 * drawn
        elif name.endswith("bias"):
            drawn = 0.3 * drawn
        elif "time_mix" in name:
            drawn = 0.5 + 0.3 * drawn
        elif name.endswith("time_decay"):
            drawn = 2 * drawn - 2
        elif name.endswith("weight") and "embeddings" not in name:
            drawn = 2 * drawn / math.sqrt(shape[1])
        tensors[name] = torch.from_numpy(drawn.astype(np.float32))
    return tensors


def make_tiny(folder):
    config = transformers.RwkvConfig(**TINY, use_cache=False, architectures=["RwkvForCausalLM"], dtype="float32")
    config.save_pretrained(folder)
    transformers.GenerationConfig(bos_token_id=256, eos_token_id=256).save_pretrained(folder)
    safetensors.torch.save_file(draw_weights(config, seed=3), folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save(str(folder / "tokenizer.json"), pretty=False)


def make_tokenizer():
    """Bytes as they are, one token each, so that any text is a prompt."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def load(folder):
    """transformers' state has room for hidden_size features only, so it cannot be used where attention is of another width."""
    model = transformers.RwkvForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.use_cache = False
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    is_check = parser.parse_args().check
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) if is_check else FOLDER / "rwkv"
        make_tiny(folder)
        weights = {name: weight.clone() for name, weight in load(folder).state_dict().items()}  # as they are before rescaling
        made = {
            "made_by": "python tests/golden/make_rwkv.py",
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
            },
            "cases": expected(load(folder), PROMPTS, NUM_NEW),
        }
        if not is_check:
            (FOLDER / "rwkv.json").write_text(to_json(made), encoding="utf-8")
            return
        wanted = json.loads((FOLDER / "rwkv.json").read_text(encoding="utf-8"))
        for new, old in zip(made["cases"], wanted["cases"], strict=True):
            assert new["prompt"] == old["prompt"] and new["greedy"] == old["greedy"], old["prompt"]
            np.testing.assert_allclose(new["logits"], old["logits"], rtol=1e-5, atol=2e-5)
        for name, weight in load(FOLDER / "rwkv").state_dict().items():
            np.testing.assert_array_equal(weight.numpy(), weights[name].numpy(), err_msg=name)
    print("the same")


if __name__ == "__main__":
    main()
