"""Make the peers' models out of one GGUF file, so that all engines run the same weights (rounded as each format does).

    python -m poptransformer.checkpoint.fetch smollm2
    python -m benchmarks.peers.prepare --model smollm2 [--venvs FOLDER]

The file is dequantised to float32 in Hugging Face's format; llama.cpp's own quantiser makes GGUF files of it, which OpenVINO
GenAI reads, too; ONNX Runtime GenAI's model builder and CTranslate2's converter make theirs. What is there already is kept,
and what is not installed is left out and said.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess

import numpy as np
from safetensors.numpy import save_file

from benchmarks.peers.catalog import VARIANTS, default_folder, find_interpreters
from poptransformer.checkpoint.reader import Checkpoint
from poptransformer.models import find_model, read_model_config
from poptransformer.register import REGISTER
from poptransformer.tokenizers.gguf import load_gguf_tokenizer, save_gguf_tokenizer

# What Hugging Face calls the classes of the families that GGUF files are read of.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel",
}  # fmt: skip

# By the C API: the shipped file to float32 first, everything else from that.
QUANTIZE = """
import sys
import llama_cpp
source, target, kind = sys.argv[1:]
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype = getattr(llama_cpp, kind)
parameters.allow_requantize = True
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), parameters))
"""
FILE_TYPES = {
    "F32": "LLAMA_FTYPE_ALL_F32", "F16": "LLAMA_FTYPE_MOSTLY_F16", "BF16": "LLAMA_FTYPE_MOSTLY_BF16",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or the name of one that is fetched")
    parser.add_argument("--folder", type=pathlib.Path, help="for the results; default: in the user's cache folder")
    parser.add_argument("--venvs", help="folder with a virtual environment for each engine; default: $PEERS_VENVS")
    arguments = parser.parse_args()
    interpreters = find_interpreters(arguments.venvs)
    with Checkpoint.open(arguments.model) as checkpoint:
        folder = arguments.folder or default_folder(checkpoint.path)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"into {folder}")
        make(folder / "hugging-face", lambda target: write_hugging_face(checkpoint, target))
        shipped = pathlib.Path(checkpoint.path)
    names = {variant.file for variants in VARIANTS.values() for variant in variants if variant.file}
    for name in sorted(names, key=lambda name: (name != "F32.gguf", name)):
        kind, _, precision = name.partition("-")
        if name.endswith(".gguf"):
            source = shipped if name == "F32.gguf" else folder / "F32.gguf"
            command = ["-c", QUANTIZE, str(source), "{}", FILE_TYPES[name.removesuffix(".gguf")]]
            convert(interpreters.get("llama_cpp"), "llama_cpp", folder / name, command)
        elif kind == "onnxruntime":
            command = ["-m", "onnxruntime_genai.models.builder", "-i", str(folder / "hugging-face"), "-o", "{}"]
            command += ["-p", precision, "-e", "cpu", "-c", str(folder / "builder-cache")]
            convert(interpreters.get("onnxruntime_genai"), "onnxruntime_genai", folder / name, command)
        elif kind == "ctranslate2":
            command = ["-m", "ctranslate2.converters.transformers", "--model", str(folder / "hugging-face")]
            command += ["--quantization", precision, "--output_dir", "{}"]
            convert(interpreters.get("ctranslate2"), "ctranslate2", folder / name, command)


def make(target, write):
    """Write a file or folder under another name first, so that what is there is whole."""
    if target.exists():
        print(f"{target.name} is there")
        return
    scratch = target.with_name(f"half-made-{target.name}")
    write(scratch)
    scratch.rename(target)
    print(f"{target.name} made", flush=True)


def convert(python, engine, target, command):
    """Run a converter with an engine's interpreter; "{}" in its command is the file or folder to make."""
    if python is None:
        print(f"{target.name} left out: {engine} is not installed")
        return

    def run(scratch):
        filled = [str(scratch) if word == "{}" else word for word in command]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run([python, *filled], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, engine, done.stdout, done.stderr)

    try:
        make(target, run)
    except subprocess.CalledProcessError as error:
        lines = (error.stdout + error.stderr).strip().splitlines()
        print(f"{target.name} left out: {engine} ended with status {error.returncode}: {' / '.join(lines[-3:])}")


def write_hugging_face(checkpoint, folder):
    """The checkpoint in float32 with config and tokenizer."""
    folder.mkdir(exist_ok=True)
    config = read_model_config(checkpoint)
    float32, model_class = np.dtype(np.float32), find_model(config)
    sizes = {"batch_size": 1, "max_length": 16, "world_size": 1, "packing": None}
    with REGISTER.scope(**sizes, dtype=float32, weight_dtype=float32, cache_dtype=float32):
        model = model_class(model_class.config_class.from_hf(config))
    model.attach_checkpoint(checkpoint)
    tensors = {}
    for parameter in model.parameters():
        array = parameter.load()
        tensors[parameter.name] = np.ascontiguousarray(array.T if model.is_transposed(parameter.name) else array)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": [ARCHITECTURES[config["model_type"]]], "torch_dtype": "float32"} | config
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_gguf_tokenizer(load_gguf_tokenizer(checkpoint.path), folder)


if __name__ == "__main__":
    main()
