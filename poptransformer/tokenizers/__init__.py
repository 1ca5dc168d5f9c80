"""Text to token ids and back, whole or as a stream."""

import fnmatch
import pathlib
import shutil

from poptransformer.checkpoint.source import SMALL_FILES
from poptransformer.tokenizers import hugging_face
from poptransformer.tokenizers.detokenizer import StreamDetokenizer
from poptransformer.tokenizers.gguf import load_gguf_tokenizer, save_gguf_tokenizer
from poptransformer.tokenizers.hugging_face import Tokenizer

__all__ = ["StreamDetokenizer", "Tokenizer", "load_tokenizer", "save_tokenizer"]


def load_tokenizer(path):
    """Load a checkpoint's tokenizer.

    Args:
      path: the folder, a file in it, or a GGUF file, which holds its own.
    Returns: Tokenizer, or None if there is none.
    Raises: UserError, naming the file, if it is broken.
    """
    if pathlib.Path(path).suffix == ".gguf":
        return load_gguf_tokenizer(path)
    return hugging_face.load_tokenizer(path)


def save_tokenizer(tokenizer, path, folder):
    """Put a tokenizer's files into a folder, so that load_tokenizer(folder) gives the same one.

    Args:
      tokenizer: what load_tokenizer(path) gave.
      path: where it came from: a folder, whose files are copied, or a GGUF file.
      folder: a folder that is there.
    Raises: OSError as copying does.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        if tokenizer is not None:
            save_gguf_tokenizer(tokenizer, folder)
        return
    source = path.parent if path.is_file() else path
    for file in sorted(source.iterdir()):
        is_config = file.name in ("config.json", "generation_config.json")
        if not is_config and file.is_file() and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in SMALL_FILES):
            shutil.copyfile(file, folder / file.name)
