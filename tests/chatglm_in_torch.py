"""ChatGLM-6B, ChatGLM2 and ChatGLM3 in torch, in any of its precisions: what a run in 16 bits is measured by.

As the originals do, everything is in the precision asked for but RMSNorm and softmax, which are float32. Angles are float32
here, too, where the originals' are 16 bits: the kinder choice. Positions, masks and frequencies are those of
golden/chatglm_reference.py, with which this agrees in float32.
"""

import math

import numpy as np
import torch
from golden import chatglm_reference as reference
from torch.nn import functional


def logits(config, weights, ids, dtype):
    """Logits after each token: [T, V] float32, computed in the torch.dtype given."""
    weights = {key: torch.from_numpy(np.asarray(weight, np.float32)).to(dtype) for key, weight in weights.items()}
    run = _first if reference.is_first_generation(config) else _second
    with torch.no_grad():
        return run(config, weights, torch.tensor(ids)).float().numpy()


def _linear(x, weights, name):
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _turning(positions, frequencies, dtype):
    """cos and sin [T, 1, pairs]."""
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * torch.from_numpy(np.float32(frequencies))
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def _attend(query, key, value, visible, coefficient=1):
    """query [T, N, H], key and value [T, K, H], visible [T, T] -> [T, N * H]."""
    queries_per_kv = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(queries_per_kv, 1) for x in (key, value))
    scores = torch.einsum("qnh,knh->nqk", query / (math.sqrt(query.shape[2]) * coefficient), key)
    shares = (scores.masked_fill(~visible, -10000.0).float() * coefficient).softmax(-1).to(query.dtype)
    return torch.einsum("nqk,knh->qnh", shares, value).flatten(1)


def _first(config, weights, ids):
    row = reference.describe(config, ids.tolist())
    visible = torch.tensor([[reference.sees_in_first(row, q, k) for k in range(len(ids))] for q in range(len(ids))])
    size, num_heads = config["hidden_size"], config["num_attention_heads"]
    frequencies = reference.half_precision_frequencies(size // num_heads // 2)
    table = weights["transformer.word_embeddings.weight"]
    turns = [_turning(each, frequencies, table.dtype) for each in reference.positions(config, row, len(ids))]

    def norm(x, name):
        return functional.layer_norm(x, [size], weights[f"{name}.weight"], weights[f"{name}.bias"], config["layernorm_epsilon"])

    def turn(x):
        halves = []
        for half, (cos, sin) in zip(x.chunk(2, -1), turns, strict=True):
            a, b = half.chunk(2, -1)
            halves += a * cos - b * sin, b * cos + a * sin
        return torch.cat(halves, -1)

    x = table[ids]
    for i in range(config["num_layers"]):
        name = f"transformer.layers.{i}"
        a = norm(x, f"{name}.input_layernorm")
        query, key, value = _linear(a, weights, f"{name}.attention.query_key_value").unflatten(1, (num_heads, -1)).chunk(3, -1)
        mixed = _attend(turn(query), turn(key), value, visible, coefficient=i + 1)
        x = a * reference.ALPHA + _linear(mixed, weights, f"{name}.attention.dense")
        m = norm(x, f"{name}.post_attention_layernorm")
        inner = functional.gelu(_linear(m, weights, f"{name}.mlp.dense_h_to_4h"), approximate="tanh")
        x = m * reference.ALPHA + _linear(inner, weights, f"{name}.mlp.dense_4h_to_h")
    return functional.linear(norm(x, "transformer.final_layernorm"), table)


def _second(config, weights, ids):
    num_heads, num_groups, head_dim = config["num_attention_heads"], config["multi_query_group_num"], config["kv_channels"]
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    table = weights["transformer.embedding.word_embeddings.weight"]
    cos, sin = _turning(range(len(ids)), reference.frequencies_of_second(config), table.dtype)

    def norm(x, name):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config["layernorm_epsilon"])
        return weights[f"{name}.weight"] * wide.to(x.dtype)

    def turn(x):
        turning, rest = x.chunk(2, -1)
        a, b = turning[..., 0::2], turning[..., 1::2]
        return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)

    x = table[ids]
    for i in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{i}"
        mixed = _linear(norm(x, f"{name}.input_layernorm"), weights, f"{name}.self_attention.query_key_value")
        parts = mixed.unflatten(1, (-1, head_dim)).split([num_heads, num_groups, num_groups], 1)
        mixed = _attend(turn(parts[0]), turn(parts[1]), parts[2], visible)
        x = x + _linear(mixed, weights, f"{name}.self_attention.dense")
        m = norm(x, f"{name}.post_attention_layernorm")
        gate, up = _linear(m, weights, f"{name}.mlp.dense_h_to_4h").chunk(2, -1)
        x = x + _linear(functional.silu(gate) * up, weights, f"{name}.mlp.dense_4h_to_h")
    return functional.linear(norm(x, "transformer.encoder.final_layernorm"), weights["transformer.output_layer.weight"])
