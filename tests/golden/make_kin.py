"""Make tiny checkpoints of the families that transformers has, and the expected numbers that tests compare with.

    python tests/golden/make_kin.py                     writes <family>/ and <family>.json beside this file, for each family
    python tests/golden/make_kin.py --check             compares instead of writing
    python tests/golden/make_kin.py [--check] phi opt   those families alone

Weights are saved in 16 bits, as most checkpoints are; the numbers are those of transformers in float32. The same versions
give the same bytes; other versions should pass --check. Needs torch and transformers.
"""

import argparse
import json
import pathlib
import platform
import tempfile

import numpy as np
import torch
import transformers
from make_gpt2 import FOLDER, expected, to_json
from tiny import BOS, END_OF_TURN, EOS, VOCAB_SIZE, draw_weights, write_tokenizer

# No size is a multiple of a vector register, and heads are as odd as the architecture allows.
COMMON = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "bos_token_id": BOS, "eos_token_id": [EOS, END_OF_TURN],
          "pad_token_id": None}  # fmt: skip
ROWS = {"max_position_embeddings": 67}
GROUPED = ROWS | {
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
FAMILIES = {
    # three heads of an odd width; a number of heads that is no power of two has slopes from two series
    "bloom": {"hidden_size": 39, "n_head": 3},
    # one key/value head, heads wider than hidden_size / num_attention_heads
    "gemma": ROWS | {"hidden_size": 34, "intermediate_size": 47, "num_attention_heads": 3, "num_key_value_heads": 1,
                     "head_dim": 18, "rms_norm_eps": 1e-4},
    # 6 of 13 features turn
    "gpt_neox": ROWS | {"hidden_size": 39, "intermediate_size": 71, "num_attention_heads": 3, "layer_norm_eps": 1e-4,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
    # rows outgrow the window
    "mistral": GROUPED | {"rms_norm_eps": 1e-4, "sliding_window": 23},
    "opt": ROWS | {"hidden_size": 39, "ffn_dim": 71, "num_attention_heads": 3},
    # 6 of 14 features turn
    "phi": ROWS | {"hidden_size": 42, "intermediate_size": 71, "num_attention_heads": 3, "layer_norm_eps": 1e-4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.45}},
    "qwen2": ROWS | {"hidden_size": 48, "intermediate_size": 53, "num_attention_heads": 6, "num_key_value_heads": 2,
              "rms_norm_eps": 1e-4, "tie_word_embeddings": True},
    "qwen3": GROUPED | {"rms_norm_eps": 1e-4, "tie_word_embeddings": True},
}  # fmt: skip
DTYPES = {"gpt_neox": torch.float16, "opt": torch.float16, "phi": torch.float16}  # the others' files are bfloat16
# 3 unless said: the first from there on whose greedy tokens are chosen by a clear margin and don't repeat themselves at once.
SEEDS = {"bloom": 83, "gpt_neox": 5, "opt": 4, "phi": 5, "qwen3": 6}
WITH_BOS = ("gemma", "mistral", "opt")
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(0, 250, 11)), [262, 0, 260]]
NUM_NEW = 41


def make_tiny(family, folder):
    config = transformers.AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    draw_weights(model, SEEDS.get(family, 3))
    model.generation_config = transformers.GenerationConfig(bos_token_id=BOS, eos_token_id=[EOS, END_OF_TURN])
    model.to(DTYPES.get(family, torch.bfloat16)).save_pretrained(folder)
    folder.joinpath("model.safetensors").chmod(0o644)
    write_tokenizer(folder, use_bos=family in WITH_BOS)


def load(folder):
    model = transformers.AutoModelForCausalLM
    return model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all if none is given")
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for family in arguments.families or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            run(family, pathlib.Path(scratch) if arguments.check else FOLDER / family, arguments.check)
    if arguments.check:
        print("the same")


def run(family, folder, is_check):
    make_tiny(family, folder)
    model = load(folder)
    made = {
        "made_by": f"python tests/golden/make_kin.py {family}",
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cases": expected(model, PROMPTS, NUM_NEW),
    }
    if not is_check:
        (FOLDER / f"{family}.json").write_text(to_json(made), encoding="utf-8")
        return
    wanted = json.loads((FOLDER / f"{family}.json").read_text(encoding="utf-8"))
    for new, old in zip(made["cases"], wanted["cases"], strict=True):
        assert new["prompt"] == old["prompt"] and new["greedy"] == old["greedy"], (family, old["prompt"])
        np.testing.assert_allclose(new["logits"], old["logits"], rtol=1e-5, atol=2e-5)
    old = load(FOLDER / family).state_dict()
    for name, weight in model.state_dict().items():
        np.testing.assert_array_equal(old[name].numpy(), weight.numpy(), err_msg=name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (FOLDER / family / name).read_bytes(), (family, name)


if __name__ == "__main__":
    main()
