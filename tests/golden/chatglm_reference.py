"""ChatGLM-6B, ChatGLM2 and ChatGLM3 in plain NumPy, written to be obvious: one row, token and head at a time, no caches.

Written from the papers and from what the original checkpoints' code computes, apart from this project's models, layers and
ops, so that the two can be compared. All is float64 unless asked otherwise, and every new token computes the whole text again.

    GLM: Du et al. 2022, arXiv:2103.10360 (blank infilling, the two kinds of position, [MASK] and [gMASK])
    GLM-130B: Zeng et al. 2023, arXiv:2210.02414 (residuals of the normed input times sqrt(2 * num_layers), rotary positions)
    RoPE: Su et al. 2021, arXiv:2104.09864; multi-query: Shazeer 2019, arXiv:1911.02150; SwiGLU: Shazeer 2020, arXiv:2002.05202

`logits` and `greedy` take a config as in config.json, the weights under their names in the checkpoint, and token ids.
"""

import math
from typing import NamedTuple

import numpy as np


def logits(config, weights, ids, dtype=np.float64, row=None):
    """Return the logits after each token.

    Args:
      config: dict, as in the checkpoint's config.json; of ChatGLM-6B if it has inner_hidden_size.
      weights: dict, name -> array of any float dtype.
      ids: token ids of one row.
      dtype: what is computed in, np.float64 or np.float32.
      row: the Row of a ChatGLM-6B text, if it is not that of ids.
    Returns: [T, V], dtype.
    Raises: ValueError if ids lack what ChatGLM-6B wants of a row.
    """
    weights = {name: np.asarray(weight).astype(dtype) for name, weight in weights.items()}
    if is_first_generation(config):
        return _logits_of_first(config, weights, ids, describe(config, ids) if row is None else row)
    return _logits_of_second(config, weights, ids)


def greedy(config, weights, ids, num_new, dtype=np.float64):
    """Return the num_new tokens that follow ids if the best one is taken each time; ends of text are not heeded."""
    return continue_row(config, weights, ids, num_new, dtype)[0]


def continue_row(config, weights, ids, num_new, dtype=np.float64):
    """Return the tokens of `greedy`, and the least distance between the two best logits that they were chosen from."""
    # A row is what its prompt says: a [gMASK] or <sop> among the new tokens changes nothing.
    row = describe(config, ids) if is_first_generation(config) else None
    ids, num_prompt, margin = list(ids), len(ids), math.inf
    for _ in range(num_new):
        last = logits(config, weights, ids, dtype, row)[-1]
        second, first = np.argsort(last, kind="stable")[-2:]
        margin = min(margin, float(last[first] - last[second]))
        ids.append(int(first))
    return ids[num_prompt:], margin


def is_first_generation(config):
    """Say whether a config is of ChatGLM-6B; all generations call themselves chatglm."""
    return "inner_hidden_size" in config


# ---- ChatGLM-6B

# The original builds every block for 28 layers, however many the config asks for.
ALPHA = math.sqrt(2 * 28)
# What a score is where the query may not look. Scores are divided by the layer's number before, and multiplied after.
MASKED = -10000.0


class Row(NamedTuple):
    """What the special tokens of a ChatGLM-6B text say.

    context_length: tokens before <sop>, the part that all tokens see.
    mask_position: where the first [gMASK] is, or the first [MASK] in a row without [gMASK]: the blank that is filled in.
    is_gmask: whether it is a [gMASK].
    """

    context_length: int
    mask_position: int
    is_gmask: bool


def describe(config, ids):
    """Return the Row of a text.

    Raises: ValueError if it has no <sop>, or neither [gMASK] nor [MASK].
    """
    ids = list(ids)
    mask = config["gmask_token_id"] if config["gmask_token_id"] in ids else config["mask_token_id"]
    return Row(ids.index(config["bos_token_id"]), ids.index(mask), mask == config["gmask_token_id"])


def positions(config, row, num_tokens):
    """Return the position and the block position of each token of a row.

    With two kinds of position, those of the context are 0, 1, ... and 0, 0, ...; the tokens from <sop> on stand at the mask's
    position and count 1, 2, ... in their block. With one kind (position_encoding_2d false) they count on behind [gMASK], and
    stay at the position of [MASK]; there is no block position.
    """
    places, blocks = [], []
    for t in range(num_tokens):
        is_context = t < row.context_length
        if config.get("position_encoding_2d", True):
            places.append(t if is_context else row.mask_position)
            blocks.append(0 if is_context else t - row.context_length + 1)
        else:
            places.append(t if is_context or row.is_gmask else row.mask_position)
            blocks.append(None)
    return places, blocks


def sees_in_first(row, query, key):
    """Say whether the token at query sees the one at key: all of the context, and of the rest what is not later."""
    return key < row.context_length or key <= query


def half_precision_frequencies(width):
    """Return the angles per position of ChatGLM-6B's width / 2 pairs: 10000 ** (-2i / width), rounded to float16.

    The original holds them as float16 and computes with the rounded ones in whatever precision it runs: it does not load them
    from files, and a model made float32 has its rounded numbers made float32. It was trained with them, too. At position 100
    the angle of a pair is off by up to 0.02 otherwise.
    """
    exact = np.float32(1) / np.float32(10000) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    return exact.astype(np.float16)


def turn_halves(x, position, frequencies):
    """Rotate the pairs (x[i], x[i + half]) of a vector by position * frequencies[i] radians."""
    half = len(frequencies)
    assert x.shape == (2 * half,)
    out = np.empty_like(x)
    for i in range(half):
        angle = x.dtype.type(position) * x.dtype.type(frequencies[i])
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def turn_in_first(config, x, place, block):
    """Rotate one head's query or key [H]: its first half by the position, its second by the block position."""
    if not config.get("position_encoding_2d", True):
        return turn_halves(x, place, half_precision_frequencies(len(x)))
    half = len(x) // 2
    frequencies = half_precision_frequencies(half)
    return np.concatenate([turn_halves(x[:half], place, frequencies), turn_halves(x[half:], block, frequencies)])


def _logits_of_first(config, weights, ids, row):
    table = weights["transformer.word_embeddings.weight"]  # [V, D]
    x = np.stack([table[token] for token in ids])  # [T, D]
    for i in range(config["num_layers"]):
        x = block_of_first(config, weights, i, x, row)
    x = layer_norm(x, weights, "transformer.final_layernorm", config["layernorm_epsilon"])
    return x @ table.T  # the head is the table


def block_of_first(config, weights, i, x, row):
    """Layer i on x [T, D]. What goes past attention and MLP is the normed input, many times over."""
    eps = config["layernorm_epsilon"]
    name = f"transformer.layers.{i}"
    a = layer_norm(x, weights, f"{name}.input_layernorm", eps)
    x = a * x.dtype.type(ALPHA) + _attention_of_first(config, weights, i, a, row)
    m = layer_norm(x, weights, f"{name}.post_attention_layernorm", eps)
    inner = gelu(linear(m, weights, f"{name}.mlp.dense_h_to_4h"))
    return m * x.dtype.type(ALPHA) + linear(inner, weights, f"{name}.mlp.dense_4h_to_h")


def _attention_of_first(config, weights, i, a, row):
    num_heads = config["num_attention_heads"]
    head_dim = config["hidden_size"] // num_heads
    name = f"transformer.layers.{i}.attention"
    places, blocks = positions(config, row, len(a))
    mixed = linear(a, weights, f"{name}.query_key_value")  # [T, N * 3 * H]: a head's query, key and value, then the next head's
    heads = []
    for n in range(num_heads):
        query, key, value = np.split(mixed[:, n * 3 * head_dim : (n + 1) * 3 * head_dim], 3, axis=1)
        query, key = (
            np.stack([turn_in_first(config, x[t], places[t], blocks[t]) for t in range(len(a))]) for x in (query, key)
        )
        heads.append(_attend(query, key, value, lambda q, k: sees_in_first(row, q, k), coefficient=i + 1, masked=MASKED))
    return linear(np.concatenate(heads, axis=1), weights, f"{name}.dense")


# ---- ChatGLM2 and ChatGLM3


def frequencies_of_second(config):
    """Return the angles per position of the pairs that turn: base ** (-2i / width), where width is half of a head.

    rope_ratio multiplies the base, as in ChatGLM3-6B-32k (and GLM-4). ChatGLM2-6B-32k, whose config has the same key, divides
    positions by it instead; that one is left out here.
    """
    width = config["kv_channels"] // 2
    base = 10000.0 * config.get("rope_ratio", 1)
    return base ** (-np.arange(0, width, 2) / width)


def turn_neighbours(x, position, frequencies):
    """Rotate the pairs (x[2i], x[2i + 1]) of a vector by position * frequencies[i] radians; what is behind them stays."""
    out = x.copy()
    for i, frequency in enumerate(frequencies):
        angle = x.dtype.type(position) * x.dtype.type(frequency)
        out[2 * i] = x[2 * i] * np.cos(angle) - x[2 * i + 1] * np.sin(angle)
        out[2 * i + 1] = x[2 * i + 1] * np.cos(angle) + x[2 * i] * np.sin(angle)
    return out


def _logits_of_second(config, weights, ids):
    table = weights["transformer.embedding.word_embeddings.weight"]
    x = np.stack([table[token] for token in ids])  # [T, D]
    for i in range(config["num_layers"]):
        x = block_of_second(config, weights, i, x)
    if config.get("post_layer_norm", True):
        x = _norm_of_second(config, x, weights, "transformer.encoder.final_layernorm")
    return x @ weights["transformer.output_layer.weight"].T


def block_of_second(config, weights, i, x):
    """Layer i on x [T, D]."""
    name = f"transformer.encoder.layers.{i}"
    is_post = config.get("apply_residual_connection_post_layernorm", False)
    a = _norm_of_second(config, x, weights, f"{name}.input_layernorm")
    x = (a if is_post else x) + _attention_of_second(config, weights, i, a)
    m = _norm_of_second(config, x, weights, f"{name}.post_attention_layernorm")
    has_bias = config.get("add_bias_linear", False)
    gate, up = np.split(linear(m, weights, f"{name}.mlp.dense_h_to_4h", has_bias), 2, axis=1)
    return (m if is_post else x) + linear(silu(gate) * up, weights, f"{name}.mlp.dense_4h_to_h", has_bias)


def _norm_of_second(config, x, weights, name):
    if config.get("rmsnorm", True):
        return rms_norm(x, weights, name, config["layernorm_epsilon"])
    return layer_norm(x, weights, name, config["layernorm_epsilon"])


def _attention_of_second(config, weights, i, a):
    num_heads, head_dim = config["num_attention_heads"], config["kv_channels"]
    name = f"transformer.encoder.layers.{i}.self_attention"
    has_bias = config.get("add_bias_linear", False)
    mixed = linear(a, weights, f"{name}.query_key_value", has_bias or config.get("add_qkv_bias", False))
    frequencies = frequencies_of_second(config)

    heads = []
    for n in range(num_heads):
        if config.get("multi_query_attention", False):
            # All queries, then the keys of all groups, then their values; neighbouring heads share a group.
            num_groups = config["multi_query_group_num"]
            group = n // (num_heads // num_groups)
            begins = (n, num_heads + group, num_heads + num_groups + group)
        else:
            begins = (3 * n, 3 * n + 1, 3 * n + 2)  # a head's query, key and value, then the next head's
        query, key, value = (mixed[:, begin * head_dim : (begin + 1) * head_dim] for begin in begins)
        query, key = (np.stack([turn_neighbours(x[t], t, frequencies) for t in range(len(a))]) for x in (query, key))
        heads.append(_attend(query, key, value, lambda q, k: k <= q))
    return linear(np.concatenate(heads, axis=1), weights, f"{name}.dense", has_bias)


# ---- what both are made of


def _attend(query, key, value, sees, coefficient=1, masked=-math.inf):
    """One head's attention: query, key, value [T, H] -> [T, H].

    Scores are divided by coefficient, masked, and multiplied by it again, so that float16 holds them; it changes only masked.
    """
    out = np.empty_like(query)
    for q in range(len(query)):
        scores = key @ query[q] / (math.sqrt(query.shape[1]) * coefficient)  # [T]
        for k in range(len(key)):
            scores[k] = (scores[k] if sees(q, k) else masked) * coefficient
        out[q] = softmax(scores) @ value
    return out


def softmax(scores):
    """exp(scores) divided by their sum, of a vector."""
    exps = np.exp(scores - scores.max())
    return exps / exps.sum()


def linear(x, weights, name, has_bias=True):
    """x @ weight.T + bias, weight [out, in]."""
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if has_bias else out


def layer_norm(x, weights, name, eps):
    """Each row minus its mean, divided by its deviation, times weight, plus bias."""
    out = np.empty_like(x)
    for t in range(len(x)):
        centered = x[t] - x[t].mean()
        out[t] = centered / np.sqrt((centered**2).mean() + x.dtype.type(eps))
    return out * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rms_norm(x, weights, name, eps):
    """Each row divided by the root of its mean square, times weight."""
    out = np.empty_like(x)
    for t in range(len(x)):
        out[t] = x[t] / np.sqrt((x[t] ** 2).mean() + x.dtype.type(eps))
    return out * weights[f"{name}.weight"]


def gelu(x):
    """The tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return 0.5 * x * (1 + np.tanh(x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x**3)))


def silu(x):
    """x times its logistic function."""
    return x / (1 + np.exp(-x))


# ---- weights to try it with


def shapes(config):
    """Return name -> shape of all the weights that are computed with, in the checkpoint's order."""
    size = config["hidden_size"]
    found = {}

    def add(name, *shape, bias=True):
        found[f"{name}.weight"] = shape
        if bias:
            found[f"{name}.bias"] = shape[:1]

    if is_first_generation(config):
        inner = config["inner_hidden_size"]
        add("transformer.word_embeddings", config["vocab_size"], size, bias=False)
        for i in range(config["num_layers"]):
            add(f"transformer.layers.{i}.input_layernorm", size)
            add(f"transformer.layers.{i}.attention.query_key_value", 3 * size, size)
            add(f"transformer.layers.{i}.attention.dense", size, size)
            add(f"transformer.layers.{i}.post_attention_layernorm", size)
            add(f"transformer.layers.{i}.mlp.dense_h_to_4h", inner, size)
            add(f"transformer.layers.{i}.mlp.dense_4h_to_h", size, inner)
        add("transformer.final_layernorm", size)
        return found

    num_heads, head_dim, inner = config["num_attention_heads"], config["kv_channels"], config["ffn_hidden_size"]
    num_groups = config["multi_query_group_num"] if config.get("multi_query_attention", False) else num_heads
    norm_bias, bias = not config.get("rmsnorm", True), config.get("add_bias_linear", False)
    add("transformer.embedding.word_embeddings", config["padded_vocab_size"], size, bias=False)
    for i in range(config["num_layers"]):
        name = f"transformer.encoder.layers.{i}"
        qkv_bias = bias or config.get("add_qkv_bias", False)
        add(f"{name}.input_layernorm", size, bias=norm_bias)
        add(f"{name}.self_attention.query_key_value", (num_heads + 2 * num_groups) * head_dim, size, bias=qkv_bias)
        add(f"{name}.self_attention.dense", size, num_heads * head_dim, bias=bias)
        add(f"{name}.post_attention_layernorm", size, bias=norm_bias)
        add(f"{name}.mlp.dense_h_to_4h", 2 * inner, size, bias=bias)
        add(f"{name}.mlp.dense_4h_to_h", size, inner, bias=bias)
    if config.get("post_layer_norm", True):
        add("transformer.encoder.final_layernorm", size, bias=norm_bias)
    add("transformer.output_layer", config["padded_vocab_size"], size, bias=False)
    return found


def random_weights(config, seed):
    """Draw weights so wide, norms and biases too, that each of them shows in the logits. Returns name -> array, float32."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(config).items():
        drawn = generator.standard_normal(shape)
        if name.endswith("norm.weight"):
            drawn = 1 + 0.3 * drawn
        elif name.endswith("bias"):
            drawn = 0.3 * drawn
        elif name == "transformer.word_embeddings.weight":
            drawn = 0.4 * drawn  # the head, too
        elif "embeddings" not in name:
            drawn = 2 * drawn / math.sqrt(shape[1])
            if is_first_generation(config) and "dense" in name:
                drawn = 3 * drawn  # or ALPHA times the input drowns what attention and MLP say
        weights[name] = drawn.astype(np.float32)
    return weights
