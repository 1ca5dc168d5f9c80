"""The zoo: which class runs a checkpoint."""

from __future__ import annotations

from poptransformer.errors import UnsupportedError
from poptransformer.models.gpt2 import GPT2
from poptransformer.models.llama import Llama
from poptransformer.models.rwkv import RWKV

# Hugging Face `model_type` -> class, or a function of the config that tells classes which share a model_type apart.
MODELS = {"gpt2": GPT2, "llama": Llama, "mistral": Llama, "qwen2": Llama, "qwen3": Llama, "rwkv": RWKV}


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


def find_model(config: dict):
    """Return the model class for a checkpoint's config.json.

    Raises: UnsupportedError naming the family and those that are supported.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    names = architectures if isinstance(architectures, list) else [architectures]
    other_heads = [name for name in names if not str(name).endswith(("LMHeadModel", "ForCausalLM", "Model"))]
    if not isinstance(model_type, str) or model_type not in MODELS or other_heads:
        what = f"architectures={architectures}" if other_heads else f"model_type={model_type!r}"
        raise UnsupportedError(
            f"config.json: {what} is not supported; this version runs causal language models of {', '.join(MODELS)}"
        )
    found = MODELS[model_type]
    return found if isinstance(found, type) else found(config)
