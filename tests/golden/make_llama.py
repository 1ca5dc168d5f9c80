"""Make the tiny Llama and the expected numbers that tests compare with, by Hugging Face transformers in float32.

    python tests/golden/make_llama.py             writes llama/ and llama.json beside this file
    python tests/golden/make_llama.py --check     compares instead of writing

The same versions give the same bytes; other versions should pass --check. Needs torch and transformers.
"""

import argparse
import json
import math
import pathlib
import platform
import tempfile

import numpy as np
import torch
import transformers
from make_gpt2 import FOLDER, expected, to_json
from tiny import write_tokenizer

# No size is a multiple of a vector register; head_dim is not hidden_size / num_attention_heads; rows outgrow the original
# length, where llama3's scaling matters; both eos ids count.
TINY = {
    "vocab_size": 263,
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 67,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 19,
    },
    "bos_token_id": 260,
    "eos_token_id": [261, 262],
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(0, 250, 11)), [262, 0, 260]]
NUM_NEW = 41


def draw_weights(model, seed):
    """Draw all weights wide, norms and biases too, so that each of them shows in the logits."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = generator.standard_normal(parameter.shape)
            if "norm" in name:
                drawn = 1 + 0.3 * drawn
            elif name.endswith("bias"):
                drawn = 0.3 * drawn
            elif "embed_tokens" not in name:
                drawn = 2 * drawn / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.from_numpy(drawn.astype(np.float32)))


def make_tiny(folder):
    config = transformers.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"])
    model = transformers.LlamaForCausalLM(config).eval()
    draw_weights(model, seed=3)
    model.generation_config = transformers.GenerationConfig(bos_token_id=260, eos_token_id=[261, 262])
    model.save_pretrained(folder)
    folder.joinpath("model.safetensors").chmod(0o644)
    write_tokenizer(folder, use_bos=True)


def load(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    is_check = parser.parse_args().check
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) if is_check else FOLDER / "llama"
        make_tiny(folder)
        model = load(folder)
        made = {
            "made_by": "python tests/golden/make_llama.py",
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "cases": expected(model, PROMPTS, NUM_NEW),
        }
        if not is_check:
            (FOLDER / "llama.json").write_text(to_json(made), encoding="utf-8")
            return
        wanted = json.loads((FOLDER / "llama.json").read_text(encoding="utf-8"))
        for new, old in zip(made["cases"], wanted["cases"], strict=True):
            assert new["prompt"] == old["prompt"] and new["greedy"] == old["greedy"], old["prompt"]
            np.testing.assert_allclose(new["logits"], old["logits"], rtol=1e-5, atol=2e-5)
        old = load(FOLDER / "llama").state_dict()
        for name, weight in model.state_dict().items():
            np.testing.assert_array_equal(old[name].numpy(), weight.numpy(), err_msg=name)
    print("the same")


if __name__ == "__main__":
    main()
