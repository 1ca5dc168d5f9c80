"""Which engine can run what: names, modules, and the models that prepare.py makes for each precision."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys

# module that an engine's environment must have -> what it is called in tables
ENGINES = {
    "llama_cpp": "llama.cpp",
    "onnxruntime_genai": "ONNX Runtime GenAI",
    "openvino_genai": "OpenVINO GenAI",
    "ctranslate2": "CTranslate2",
    "transformers": "Hugging Face eager",
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model as an engine takes it.

    Attributes:
      engine: key of ENGINES.
      format: what its weights are, in words.
      file: file or folder under the folder that prepare.py fills; "" for the file that everything was made from.
      options: for the engine.
    """

    engine: str
    format: str
    file: str
    options: dict = dataclasses.field(default_factory=dict, hash=False)

    @property
    def name(self):
        return f"{ENGINES[self.engine]} {self.format}"


# Their own name for the arithmetic that goes with a precision stands in the options; see prepare.py for how files are made.
FP32_ARITHMETIC = {"INFERENCE_PRECISION_HINT": "f32"}
VARIANTS = {
    "int4": [
        Variant("llama_cpp", "as shipped", ""),
        Variant("llama_cpp", "Q4_0", "Q4_0.gguf"),
        Variant("onnxruntime_genai", "int4", "onnxruntime-int4"),
        Variant("openvino_genai", "Q4_0", "Q4_0.gguf"),
    ],
    "int8": [
        Variant("llama_cpp", "Q8_0", "Q8_0.gguf"),
        Variant("onnxruntime_genai", "int8", "onnxruntime-int8"),
        Variant("openvino_genai", "Q8_0", "Q8_0.gguf"),
        Variant("ctranslate2", "int8", "ctranslate2-int8", {"compute_type": "int8"}),
    ],
    "bf16": [
        Variant("llama_cpp", "BF16", "BF16.gguf"),
        Variant("openvino_genai", "F16, bf16 arithmetic", "F16.gguf", {"INFERENCE_PRECISION_HINT": "bf16"}),
        Variant("transformers", "bf16", "hugging-face"),
    ],
    "fp16": [
        Variant("llama_cpp", "F16", "F16.gguf"),
        Variant("transformers", "fp16", "hugging-face"),
    ],
    "fp32": [
        Variant("llama_cpp", "F32", "F32.gguf"),
        Variant("onnxruntime_genai", "fp32", "onnxruntime-fp32"),
        Variant("openvino_genai", "F16, fp32 arithmetic", "F16.gguf", FP32_ARITHMETIC),
        Variant("ctranslate2", "fp32", "ctranslate2-float32", {"compute_type": "float32"}),
        Variant("transformers", "fp32", "hugging-face"),
    ],
}


def find_interpreters(folder=None):
    """Engine -> interpreter of an environment that has it: FOLDER/ENGINE/bin/python, or else the one that runs this.

    Args:
      folder: of virtual environments, one for each engine, since their requirements exclude each other; None: the environment
        variable PEERS_VENVS.
    Returns: {engine: path}, without those that are not installed.
    """
    folder = folder or os.environ.get("PEERS_VENVS")
    found = {}
    for engine in ENGINES:
        own = pathlib.Path(folder or "", engine, "bin", "python")
        python = own if folder and own.exists() else pathlib.Path(sys.executable)
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
        if subprocess.run([python, "-c", probe], check=False, cwd="/").returncode == 0:
            found[engine] = python
    return found


def default_folder(model):
    """Where prepare.py puts the peers' files of a model: $XDG_CACHE_HOME/poptransformer/peers/NAME."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return cache / "poptransformer" / "peers" / pathlib.Path(model).stem
