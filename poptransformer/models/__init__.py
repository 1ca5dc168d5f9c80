"""The zoo: which class runs a checkpoint."""

from __future__ import annotations

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.models.bloom import Bloom
from poptransformer.models.chatglm import ChatGLM
from poptransformer.models.chatglm2 import ChatGLM2
from poptransformer.models.gemma import Gemma
from poptransformer.models.glm import GLM
from poptransformer.models.gpt2 import GPT2
from poptransformer.models.gpt_neox import GPTNeoX
from poptransformer.models.llama import Llama
from poptransformer.models.opt import OPT
from poptransformer.models.phi import Phi
from poptransformer.models.rwkv import RWKV

# Keys that only one generation's config has. All ChatGLM generations have the same model_type.
CHATGLM_KEYS = ("inner_hidden_size", "max_sequence_length", "position_encoding_2d")
CHATGLM2_KEYS = ("padded_vocab_size", "ffn_hidden_size", "kv_channels", "seq_length")


def find_chatglm(config: dict):
    """Tell the generations of ChatGLM apart by the keys that only one of them has.

    Raises: UserError if the config has keys of both or of none.
    """
    first, later = ([key for key in keys if key in config] for keys in (CHATGLM_KEYS, CHATGLM2_KEYS))
    if bool(first) == bool(later):
        what = f"both {', '.join(first)} and {', '.join(later)}" if first else "none of them"
        raise UserError(
            f"config.json: model_type='chatglm' is ChatGLM-6B with {', '.join(CHATGLM_KEYS)}, or a later generation with "
            f"{', '.join(CHATGLM2_KEYS)}; this one has {what}"
        )
    return ChatGLM if first else ChatGLM2


# Hugging Face `model_type` -> class, or a function of the config that tells classes which share a model_type apart.
MODELS = {
    "bloom": Bloom,
    "chatglm": find_chatglm,
    "gemma": Gemma,
    "glm": GLM,
    "gpt2": GPT2,
    "gpt_neox": GPTNeoX,
    "llama": Llama,
    "mistral": Llama,
    "opt": OPT,
    "phi": Phi,
    "qwen2": Llama,
    "qwen3": Llama,
    "rwkv": RWKV,
}


def read_model_config(checkpoint) -> dict:
    """Return a checkpoint's config.json; where there is none, what a family tells from the weights, in the same form.

    Raises: UserError if the file is missing and the weights' names and shapes do not say enough, or if it is broken.
    """
    if not checkpoint.has_config and checkpoint.has_weights:
        for model_class in dict.fromkeys(each for each in MODELS.values() if hasattr(each, "config_from_weights")):
            config = model_class.config_from_weights(checkpoint)
            if config:
                return config
    return checkpoint.config


# How `architectures` ends for causal language models.
CAUSAL_LM = ("LMHeadModel", "ForCausalLM", "Model", "ChatGLMForConditionalGeneration")


def find_model(config: dict):
    """Return the model class for a checkpoint's config.json.

    Raises: UnsupportedError naming the family and those that are supported.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    names = architectures if isinstance(architectures, list) else [architectures]
    other_heads = [name for name in names if not str(name).endswith(CAUSAL_LM)]
    if not isinstance(model_type, str) or model_type not in MODELS or other_heads:
        what = f"architectures={architectures}" if other_heads else f"model_type={model_type!r}"
        raise UnsupportedError(
            f"config.json: {what} is not supported; this version runs causal language models of {', '.join(MODELS)}"
        )
    found = MODELS[model_type]
    return found if isinstance(found, type) else found(config)
