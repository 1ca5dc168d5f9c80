"""Models out of GGUF files against transformers: tiny random ones, written by the gguf package's writer and its own names."""

import dataclasses
import re

import numpy as np
import pytest
from gguf_cases import gguf, write
from tolerance import assert_close

from poptransformer import Session, UserError

torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-dev.txt")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-dev.txt")

SIZES = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 61,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 2**-17,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.4, "high_freq_factor": 2.0}
CASES = {
    "llama": SIZES | {"model_type": "llama", "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "llama, tied, biases": SIZES | {
        "model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    },
    "llama 3": SIZES | {
        "model_type": "llama",
        "rope_parameters": LLAMA3 | {"rope_theta": 300.0, "original_max_position_embeddings": 17},
    },
    "qwen2": SIZES | {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 10},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 61, "n_inner": 96,
        "layer_norm_epsilon": 2**-17, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
IDS = [int(i) for i in np.random.default_rng(5).integers(0, 131, 61)]


def write_model(path, model, quantise=lambda name, array: array):
    """Write a model of transformers as llama.cpp's converter would; `quantise` may turn an array into (bytes, type)."""
    config, family = model.config, model.config.model_type
    sizes = {"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size}
    sizes |= {"block_count": config.num_hidden_layers, "attention.head_count": config.num_attention_heads}
    if family == "gpt2":
        sizes |= {"feed_forward_length": config.n_inner, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes |= {
            "feed_forward_length": config.intermediate_size,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        }
    metadata = {f"{family}.{key}": value for key, value in sizes.items()}
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config.num_hidden_layers)
    tensors = {}
    for key, tensor in model.state_dict().items():
        array = tensor.numpy()
        if key == "lm_head.weight" and config.tie_word_embeddings or key.endswith((".attn.bias", "masked_bias")):
            continue
        if family == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            array = array.T
        if family == "llama" and re.search(r"[qk]_proj", key):
            array = array.reshape(-1, 2, head_dim // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        tensors[name] = quantise(name, np.ascontiguousarray(array))
    if family != "gpt2" and config.rope_parameters["rope_type"] == "llama3":
        rope = model.model.rotary_emb
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        tensors["rope_freqs.weight"] = (plain / rope.inv_freq.numpy()).astype(np.float32)
    return write(path, family, metadata, tensors)


@pytest.fixture
def make():
    """A function that gives a random model of transformers for a config."""

    def make(config):
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config), attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name or ".ln_" in name else 0.0, 0.2)
        return model

    return make


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(make, tmp_path, name):
    """Config and logits; the same from the model's own files as from the GGUF file."""
    model = make(CASES[name])
    path = write_model(tmp_path / "tiny.gguf", model)
    with Session(path, backend="reference") as session, Session(model.config.to_dict(), random_weights=True) as own:
        assert session.eos_token_ids == (2,) and session.tokenizer is None
        ours, theirs = (dataclasses.asdict(each.config) for each in (session, own))
        if name == "llama 3":
            assert ours.pop("rope")["kind"] == "factors" and theirs.pop("rope")["kind"] == "llama3"
        assert ours == theirs
        # Sums over up to 96 float32 products in NumPy's order and torch's; logits have a deviation of about 1 to 3.
        assert_close(session.logits(IDS), logits_of(model, IDS), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_quantised_under_xla(make, tmp_path, name):
    """Every matrix in a type of its own, against transformers on what the gguf package makes of them."""
    kinds = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]
    model, used, values = make(CASES[name]), [], {}

    def quantise(key, array):
        if array.ndim == 1:
            return array
        kind = gguf.GGMLQuantizationType[kinds[len(used) % len(kinds)]]
        data = gguf.quants.quantize(array, kind)
        used.append(kind.name)
        values[key] = gguf.quants.dequantize(data, kind)
        return data.view(np.uint8), kind.name

    path = write_model(tmp_path / "tiny.gguf", model, quantise)
    assert set(used) == set(kinds)
    put_back(model, values)
    with Session(path, batch_size=2) as session:
        assert_close(session.logits(IDS), logits_of(model, IDS), rtol=1e-5, atol=3e-5)
        prompts = [IDS[:3], IDS[10:40]]
        for prompt, out in zip(prompts, session.generate(prompts, max_new_tokens=12, ignore_eos=True), strict=True):
            assert out.token_ids == logits_of(model, prompt + out.token_ids)[len(prompt) - 1 : -1].argmax(-1).tolist()


def put_back(model, values):
    """Give a model of transformers the values that its GGUF file has."""
    family = model.config.model_type
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], model.config.num_hidden_layers)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            array = values.get(names.get_name(key, try_suffixes=(".weight", ".bias")))
            if array is None:
                continue
            if family == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                array = array.T
            if family == "llama" and re.search(r"[qk]_proj", key):
                array = array.reshape(-1, model.config.head_dim // 2, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
            parameter.copy_(torch.from_numpy(np.array(array, np.float32)))


def test_weights_that_are_missing_or_too_many(make, tmp_path):
    model = make(CASES["qwen2"])
    path = write_model(tmp_path / "tiny.gguf", model)
    data = path.read_bytes().replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_door.weight")
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        Session(path)
    assert str(caught.value).splitlines() == [
        "checkpoint lacks 1 of 26 weights: model.layers.1.mlp.gate_proj.weight; set random_weights: true to run without a "
        "checkpoint",
        "checkpoint has 1 weight that this model has no place for: blk.1.ffn_door.weight; is it of another model family, or "
        "config.json of another checkpoint?",
    ]
