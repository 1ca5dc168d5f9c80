"""What a GGUF file calls a model's weights and how it lays them out, against what Hugging Face's checkpoints have.

Source: names in gguf.constants.TENSOR_NAMES; layouts as llama.cpp's convert_hf_to_gguf.py makes them.
"""

import dataclasses
import re

import numpy as np

_LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
# Hugging Face's GPT-2 holds these as [in, out]; a GGUF file holds every matrix as [out, in].
_GPT2_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")

# Divisors of the rotary frequencies: part of the configuration, no weight.
ROPE_FACTORS = "rope_freqs.weight"

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)", re.ASCII)
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What a tensor of the file is in a Hugging Face checkpoint.

    Attributes:
      name: its name there.
      is_transposed: whether the matrix has its axes the other way round there.
      num_heads: the heads that its rows belong to, where the rows of each lie in another order; else None.
    """

    name: str
    is_transposed: bool = False
    num_heads: int | None = None


def place_of(architecture, name, num_heads, num_kv_heads):
    """Return the Place of a tensor; one whose name is not known keeps it.

    In architecture "llama" the rows of each query and key head take turns, feature i of the first half, then feature i of
    the second, as llama.cpp rotates neighbours; Hugging Face's files have one half after the other. Qwen's stay as they are.
    """
    top, block, prefix = (
        (_GPT2_TOP, _GPT2_BLOCK, "transformer.h") if architecture == "gpt2" else (_LLAMA_TOP, _LLAMA_BLOCK, "model.layers")
    )
    if (match := _BLOCK_NAME.fullmatch(name)) and match[2] in block:
        layer, stem, kind = match.groups()
        is_transposed = architecture == "gpt2" and kind == "weight" and stem in _GPT2_TRANSPOSED
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(stem) if architecture == "llama" else None
        return Place(f"{prefix}.{layer}.{block[stem]}.{kind}", is_transposed, heads)
    if (match := _TOP_NAME.fullmatch(name)) and match[1] in top:
        return Place(f"{top[match[1]]}.{match[2]}")
    return Place(name)


def stored_rows(rows, num_rows, num_heads):
    """Return where rows of a query or key matrix, numbered as Hugging Face has them, lie in a file of architecture "llama".

    Args:
      rows: array of row numbers.
      num_rows: rows of the whole matrix, num_heads * head_dim with an even head_dim.
    """
    head_dim = num_rows // num_heads
    head, feature = np.divmod(rows, head_dim)
    half, pair = np.divmod(feature, head_dim // 2)
    return head * head_dim + 2 * pair + half
