"""The formats that weights come in: which files of a folder are whose, and what reads them."""

import dataclasses
import fnmatch
import pathlib

from poptransformer.checkpoint.pytorch_file import PytorchFile
from poptransformer.checkpoint.safetensors_file import SafetensorsFile
from poptransformer.checkpoint.tensor_file import TensorFile


@dataclasses.dataclass(frozen=True)
class Format:
    """One format. A new one is a subclass of TensorFile and an entry in FORMATS.

    Attributes:
      name: in messages.
      suffixes: how its files' names end.
      file_class: the TensorFile that reads it, called with a path.
      weights_file: what a folder's only file of weights is called; None if there is no such custom.
      strays: patterns of names that have the suffix and hold no weights, such as an optimizer's state.
      note: what a user should know about how it is read; logged.
    """

    name: str
    suffixes: tuple[str, ...]
    file_class: type[TensorFile]
    weights_file: str | None = None
    strays: tuple[str, ...] = ()
    note: str = ""

    @property
    def index_file(self):
        """The name of the file that says which shard has which weight; None if there is no such custom."""
        return self.weights_file and f"{self.weights_file}.index.json"

    def may_be_weights(self, name):
        """Say whether a file of that name belongs to this format and may hold weights."""
        return name.endswith(self.suffixes) and not any(fnmatch.fnmatchcase(name, stray) for stray in self.strays)


# The preferred one first: where a folder has weights in two formats, the first counts.
FORMATS = (
    Format("safetensors", (".safetensors",), SafetensorsFile, weights_file="model.safetensors"),
    Format(
        "PyTorch",
        (".bin", ".pth", ".pt"),
        PytorchFile,
        weights_file="pytorch_model.bin",
        # What training leaves beside the weights, and other programs' files.
        strays=(
            "optimizer*", "*optim_states.pt", "scheduler*", "scaler*", "training_args*", "rng_state*", "random_states*",
            "openvino_*", "tokenizer*", "ggml*",
        ),
        note="a pickle, read as weights only: nothing in it is executed",
    ),
)  # fmt: skip

# Suffixes of weights that have no reader.
OTHER_FORMATS = (".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".index", ".ot", ".tflite")
HOW_TO_CONVERT = (
    f"read are {', '.join(suffix for each in FORMATS for suffix in each.suffixes)}; fetch one of those. TensorFlow's .h5 and "
    "Flax's .msgpack are converted by transformers 4: AutoModelForCausalLM.from_pretrained(old_folder, from_tf=True or "
    "from_flax=True).save_pretrained(new_folder)"
)


def suffixes():
    """Return the suffixes of all files that can be read, in the order of FORMATS."""
    return tuple(suffix for each in FORMATS for suffix in each.suffixes)


def find_format(path):
    """Return the Format of a file by its suffix, or None."""
    return next((each for each in FORMATS if pathlib.PurePath(path).name.endswith(each.suffixes)), None)


def choose_weights(names):
    """Choose the weights among the files of a folder.

    Args:
      names: of all files there.
    Returns: (Format, chosen names). The names are one weights file, one index, or else all files that may be weights: more
      than one of them says that nobody can tell which; (None, []) if there is nothing to read.
    """
    names = set(names)
    for each in FORMATS:
        for name in (each.weights_file, each.index_file):
            if name in names:
                return each, [name]
    for each in FORMATS:
        held = sorted(name for name in names if each.may_be_weights(name))
        if held:
            return each, held
    return None, []
