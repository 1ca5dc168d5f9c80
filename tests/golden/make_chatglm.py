"""Make the tiny ChatGLMs and the expected numbers that tests compare with, by chatglm_reference.py in float64.

    python tests/golden/make_chatglm.py             writes the folders chatglm6b, chatglm6b_bin, chatglm2 and chatglm3 and the
                                                    files chatglm6b.json, chatglm2.json, chatglm3.json, chatglm_variants.json
    python tests/golden/make_chatglm.py --check     compares instead of writing

The same versions give the same bytes; other versions should pass --check. Needs safetensors and torch, which writes the .bin
files. The tokenizers come from make_chatglm_tokenizers.py.

chatglm6b_bin has chatglm6b's weights, as the originals have theirs: two shards of pickles with an index, the head although it
is the table again, and beside them a .bin file that the index does not name and whose weights are wrong.
"""

import argparse
import json
import pathlib
import platform
import re
import sys
import tempfile

import chatglm_reference as reference
import numpy as np
import safetensors.numpy
import torch
from make_chatglm_tokenizers import V1_LEARNED, V1_NUM_IMAGE_TOKENS, V1_SPECIAL, V2_PIECES, V3_SPECIAL

FOLDER = pathlib.Path(__file__).resolve().parent
LEAST_MARGIN = 1e-3  # between the two best logits of every greedy choice: far above what float32 sums differ by

V1 = {token: V1_NUM_IMAGE_TOKENS + V1_LEARNED + i for i, token in enumerate(V1_SPECIAL)}
V3 = {token: V2_PIECES + i for i, token in enumerate(V3_SPECIAL)}
MASK, GMASK, SOP, EOP = (V1[token] for token in ("[MASK]", "[gMASK]", "<sop>", "<eop>"))
START = [V3["[gMASK]"], V3["sop"]]


def auto_map(name):
    """Remote code, which is not there: as the originals have it, and nothing may run."""
    return {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": f"modeling_chatglm.{name}",
        "AutoModelForSeq2SeqLM": f"modeling_chatglm.{name}",
    }


# No size is a multiple of a vector register, vocabularies are prime and have rows behind the last token. Half a head turns, and
# half of that by each kind of position, so a head's width is a multiple of 4; 12 makes three pairs.
CHATGLM_6B = {
    "_name_or_path": "THUDM/chatglm-6b",
    "architectures": ["ChatGLMModel"],
    "auto_map": auto_map("ChatGLMForConditionalGeneration"),
    "bos_token_id": SOP,
    "eos_token_id": EOP,
    "mask_token_id": MASK,
    "gmask_token_id": GMASK,
    "pad_token_id": V1_NUM_IMAGE_TOKENS + 3,
    "hidden_size": 36,
    "inner_hidden_size": 61,
    "layernorm_epsilon": 1e-4,
    "max_sequence_length": 251,
    "model_type": "chatglm",
    "num_attention_heads": 3,
    "num_layers": 2,
    "position_encoding_2d": True,
    "torch_dtype": "float16",
    "transformers_version": "4.27.1",
    "use_cache": True,
    "vocab_size": 599,
}
# kv_channels is not hidden_size / num_attention_heads.
CHATGLM2 = {
    "_name_or_path": "THUDM/chatglm2-6b",
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": auto_map("ChatGLMForConditionalGeneration"),
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 37,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 30,
    "kv_channels": 12,
    "layernorm_epsilon": 1e-4,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 2,
    "original_rope": True,
    "padded_vocab_size": 421,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 257,
    "use_cache": True,
    "torch_dtype": "float16",
    "transformers_version": "4.27.1",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The two markers that end an answer of ChatGLM3 are in its code, in GLM-4's config as a list.
CHATGLM3 = CHATGLM2 | {
    "_name_or_path": "THUDM/chatglm3-6b",
    "ffn_hidden_size": 29,
    "hidden_size": 33,
    "kv_channels": 8,
    "layernorm_epsilon": 1e-5,
    "multi_query_group_num": 3,
    "num_attention_heads": 6,
    "num_layers": 3,
    "padded_vocab_size": 431,
    "seq_length": 263,
    "eos_token_id": [2, V3["<|user|>"], V3["<|observation|>"]],
}
V1_PROMPTS = [
    [GMASK, SOP],
    [16, 28, 63, 170, 211, GMASK, SOP],
    list(range(9, 240, 13)) + [GMASK, SOP],
    [31, 41, 59, GMASK, SOP, 26, 53, 58],  # an answer has begun
    [27, 18, MASK, 28, 18, 28, 45, SOP],  # a blank inside the text
    [90, MASK, 45, 23, SOP, 53, 60, 28, 74],
    [14, MASK, 15, GMASK, 92, 65, SOP],  # [gMASK] goes before [MASK], wherever they are
    [57, GMASK, 72, GMASK, 15, SOP, 66, 49],  # the first one counts
    # So long that frequencies which are not rounded to float16 show.
    [9 + (7 * i * i + 3 * i) % 239 for i in range(131)] + [GMASK, SOP, 33],
]
V2_PROMPTS = [
    [7],
    START + [279, 321, 313],
    START + list(range(260, 405, 8)),
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5],
]
V3_PROMPTS = [
    [7],
    START + [V3["<|user|>"], 279, 13, 321, 313, V3["<|assistant|>"]],
    START + list(range(261, 405, 8)),
    [2, 7, 1, 8, 2, 8, 1, 8, 2, 8],
]
NUM_NEW = 23

# model -> (config, seed of its weights, prompts). Seeds were chosen for margins, and for new tokens that differ.
STORED = {
    "chatglm6b": (CHATGLM_6B, 33, V1_PROMPTS),
    "chatglm2": (CHATGLM2, 0, V2_PROMPTS),
    "chatglm3": (CHATGLM3, 0, V3_PROMPTS),
}

# ---- variants, whose weights are reference.random_weights(config, seed)

SMALL_V1 = {
    "model_type": "chatglm",
    "vocab_size": 131,
    "hidden_size": 36,
    "inner_hidden_size": 47,
    "num_layers": 2,
    "num_attention_heads": 3,
    "layernorm_epsilon": 1e-5,
    "max_sequence_length": 61,
    "position_encoding_2d": True,
    "mask_token_id": 120,
    "gmask_token_id": 121,
    "bos_token_id": 124,
    "eos_token_id": 125,
    "pad_token_id": 3,
}
SMALL_V2 = {
    "model_type": "chatglm",
    "padded_vocab_size": 127,
    "hidden_size": 30,
    "ffn_hidden_size": 41,
    "num_layers": 2,
    "num_attention_heads": 4,
    "kv_channels": 12,
    "layernorm_epsilon": 1e-5,
    "seq_length": 61,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_V1_PROMPTS = [
    [5, 6, 7, 121, 124],
    [8, 120, 9, 10, 11, 124],
    [12, 13, 120, 14, 124, 15, 16],
    [121, 124, 17, 18, 19],
    list(range(3, 60, 5)) + [121, 20, 124, 21],
]
SMALL_V2_PROMPTS = [[7], list(range(3, 120, 9)), [3, 1, 4, 1, 5, 9, 2, 6]]
SEVERAL = {
    "multi_query_attention": False,
    "apply_residual_connection_post_layernorm": True,
    "rmsnorm": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "rope_ratio": 3,
}
NUM_NEW_OF_VARIANTS = 11
# name -> (config, seed)
VARIANTS = {
    "v1, rows of both masks": (SMALL_V1, 28),
    "v1, one layer": (SMALL_V1 | {"num_layers": 1}, 31),
    "v1, one kind of position": (SMALL_V1 | {"position_encoding_2d": False, "hidden_size": 30}, 20),
    "v2, no multi-query": (SMALL_V2 | {"multi_query_attention": False, "multi_query_group_num": 1}, 0),
    "v2, one group": (SMALL_V2 | {"multi_query_group_num": 1}, 0),
    "v2, no bias of qkv": (SMALL_V2 | {"add_qkv_bias": False}, 0),
    "v2, biases everywhere": (SMALL_V2 | {"add_bias_linear": True, "add_qkv_bias": False}, 0),
    "v2, layer norm": (SMALL_V2 | {"rmsnorm": False}, 0),
    "v2, no last norm": (SMALL_V2 | {"post_layer_norm": False}, 0),
    "v2, residual of the normed": (SMALL_V2 | {"apply_residual_connection_post_layernorm": True}, 0),
    "v3, rope_ratio": (SMALL_V2 | {"rope_ratio": 50, "kv_channels": 20}, 0),
    "v2, several together": (SMALL_V2 | SEVERAL, 0),
}


def stored_weights(name):
    """Return name -> array as the files hold them: float16, ChatGLM-6B's layer norms float32."""
    config, seed, _ = STORED[name]
    is_first = reference.is_first_generation(config)
    return {
        key: weight if is_first and "layernorm" in key else weight.astype(np.float16)
        for key, weight in reference.random_weights(config, seed).items()
    }


def with_buffers(name, weights):
    """Add what the originals' files hold beside the weights, and no implementation needs: the frequencies."""
    config = STORED[name][0]
    if reference.is_first_generation(config):
        angles = reference.half_precision_frequencies(config["hidden_size"] // config["num_attention_heads"] // 2)
        names = [f"transformer.layers.{i}.attention.rotary_emb.inv_freq" for i in range(config["num_layers"])]
        return weights | {key: angles for key in names}
    return weights | {"transformer.rotary_pos_emb.inv_freq": reference.frequencies_of_second(config).astype(np.float16)}


def expected(name, config, weights, prompts, num_new):
    """Logits at a few places and the greedy continuation of each prompt, ends of text not heeded."""
    cases = []
    for prompt in prompts:
        logits = reference.logits(config, weights, prompt)
        greedy, margin = reference.continue_row(config, weights, prompt, num_new)
        if margin < LEAST_MARGIN:
            sys.exit(
                f"{name}, {prompt}: two logits are {margin:.1e} apart, which rounding may turn around; choose another seed"
            )
        places = sorted({0, len(prompt) // 2, len(prompt) - 1})
        tokens = list(range(0, logits.shape[1], logits.shape[1] // 12))
        cases.append(
            {
                "prompt": list(prompt),
                "greedy": greedy,
                "least_margin": round(margin, 5),
                "positions": places,
                "tokens": tokens,
                "logits": [[round(float(logits[p, t]), 6) for t in tokens] for p in places],
            }
        )
    return cases


def write_safetensors(folder, weights):
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_bins(folder, weights):
    """Two shards with an index, and a file that it does not name."""
    weights = weights | {"lm_head.weight": weights["transformer.word_embeddings.weight"].copy()}
    total, so_far, shards = sum(weight.nbytes for weight in weights.values()), 0, ({}, {})
    weight_map = {}
    for key, weight in sorted(
        weights.items(), key=lambda item: ("word_embeddings" not in item[0], item[0] == "lm_head.weight")
    ):
        number = int(so_far > total / 2)
        shards[number][key] = torch.from_numpy(weight)
        weight_map[key] = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        so_far += weight.nbytes
    for number, shard in enumerate(shards):
        torch.save(shard, folder / f"pytorch_model-{number + 1:05d}-of-00002.bin")
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    wrong = {key: torch.zeros(weights[key].shape) for key in weights if "final_layernorm" in key}
    torch.save(wrong, folder / "pytorch_model-00003-of-00003.bin")


def make_folders(root):
    """Write config and weights of all four; the tokenizers are there already."""
    for name, (config, _, _) in STORED.items():
        for folder in (root / name, root / f"{name}_bin") if name == "chatglm6b" else (root / name,):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = with_buffers(name, stored_weights(name))
        write_safetensors(root / name, weights)
        if name == "chatglm6b":
            write_bins(root / "chatglm6b_bin", weights)


def make_numbers():
    """Return file name -> contents."""
    made_by = {
        "made_by": "python tests/golden/make_chatglm.py",
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
    }
    made = {}
    for name, (config, _, prompts) in STORED.items():
        made[f"{name}.json"] = made_by | {"cases": expected(name, config, stored_weights(name), prompts, NUM_NEW)}
    variants = {}
    for name, (config, seed) in VARIANTS.items():
        prompts = SMALL_V1_PROMPTS if reference.is_first_generation(config) else SMALL_V2_PROMPTS
        cases = expected(name, config, reference.random_weights(config, seed), prompts, NUM_NEW_OF_VARIANTS)
        variants[name] = {"config": config, "seed": seed, "cases": cases}
    made["chatglm_variants.json"] = made_by | {"variants": variants}
    return made


def to_json(made):
    """JSON with one line for each list of numbers."""
    text = json.dumps(made, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda match: " ".join(match[0].split()), text) + "\n"


def read_weights(folder):
    """Return name -> array of a folder, of the shards that its index names if it has one."""
    index = folder / "pytorch_model.bin.index.json"
    if not index.exists():
        return safetensors.numpy.load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    shards = {file: torch.load(folder / file, weights_only=True) for file in set(weight_map.values())}
    return {key: shards[file][key].numpy() for key, file in weight_map.items()}


def compare(scratch, numbers):
    for folder in ("chatglm6b", "chatglm6b_bin", "chatglm2", "chatglm3"):
        configs = [json.loads((root / folder / "config.json").read_text(encoding="utf-8")) for root in (scratch, FOLDER)]
        assert configs[0] == configs[1], folder
        new, old = read_weights(scratch / folder), read_weights(FOLDER / folder)
        assert new.keys() == old.keys(), folder
        for key, weight in new.items():
            np.testing.assert_array_equal(weight, old[key], err_msg=f"{folder}: {key}", strict=True)
    for file, made in numbers.items():
        wanted = json.loads((FOLDER / file).read_text(encoding="utf-8"))
        pairs = [(made, wanted)] if "cases" in made else [(made["variants"][key], wanted["variants"][key]) for key in VARIANTS]
        for new, old in pairs:
            for new_case, old_case in zip(new["cases"], old["cases"], strict=True):
                for key in ("prompt", "greedy", "positions", "tokens"):
                    assert new_case[key] == old_case[key], (file, old_case["prompt"], key)
                np.testing.assert_allclose(new_case["logits"], old_case["logits"], rtol=0, atol=2e-6)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    is_check = parser.parse_args().check
    torch.set_num_threads(1)
    numbers = make_numbers()
    if not is_check:
        make_folders(FOLDER)
        for file, made in numbers.items():
            (FOLDER / file).write_text(to_json(made), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_folders(pathlib.Path(scratch))
        compare(pathlib.Path(scratch), numbers)
    print("the same")


if __name__ == "__main__":
    main()
