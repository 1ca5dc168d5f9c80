"""The zoo: which class runs a checkpoint."""

from __future__ import annotations

from poptransformer.errors import UnsupportedError
from poptransformer.models.bloom import Bloom
from poptransformer.models.gemma import Gemma
from poptransformer.models.gpt2 import GPT2
from poptransformer.models.gpt_neox import GPTNeoX
from poptransformer.models.llama import Llama
from poptransformer.models.opt import OPT
from poptransformer.models.phi import Phi

# Hugging Face `model_type` -> class, or a function of the config that tells classes which share a model_type apart.
MODELS = {
    "bloom": Bloom,
    "gemma": Gemma,
    "gpt2": GPT2,
    "gpt_neox": GPTNeoX,
    "llama": Llama,
    "mistral": Llama,
    "opt": OPT,
    "phi": Phi,
    "qwen2": Llama,
    "qwen3": Llama,
}


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
