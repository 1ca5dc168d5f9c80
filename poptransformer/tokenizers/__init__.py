"""Text to token ids and back, whole or as a stream."""

from poptransformer.tokenizers.detokenizer import StreamDetokenizer
from poptransformer.tokenizers.hugging_face import Tokenizer, load_tokenizer

__all__ = ["StreamDetokenizer", "Tokenizer", "load_tokenizer"]
