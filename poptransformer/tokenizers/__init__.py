"""Text to token ids and back, whole or as a stream."""

import pathlib

from poptransformer.tokenizers import hugging_face
from poptransformer.tokenizers.detokenizer import StreamDetokenizer
from poptransformer.tokenizers.gguf import load_gguf_tokenizer
from poptransformer.tokenizers.hugging_face import Tokenizer

__all__ = ["StreamDetokenizer", "Tokenizer", "load_tokenizer"]


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
