"""Tokenizers out of a GGUF file's metadata: byte-level BPE as GPT-2 has it, and SentencePiece's BPE as Llama has it.

The file has tokens, merges or scores, and a name for the way texts are cut up before; the rest of what a tokenizer.json says
follows from these. Source: llama.cpp's llama-vocab.cpp for the names and their patterns; the tokenizer.json files of the
models for what they stand for.
"""

import dataclasses
import json
import logging
import reprlib

from poptransformer.checkpoint.gguf_header import GGUFHeader
from poptransformer.errors import UnsupportedError, UserError, near_miss
from poptransformer.tokenizers.hugging_face import Tokenizer
from poptransformer.tokenizers.library import errors_as

logger = logging.getLogger(__name__)

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE = "\u2581"  # stands for a space in SentencePiece's tokens

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (  # with DIGITS for how numbers are cut
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How texts are cut up before merges apply.

    Attributes:
      patterns: each cuts the pieces that the one before left; what it matches and what lies between become pieces.
      ignore_merges: whether a piece that is a token is taken as it is, whatever the merges would make of it.
      adds_bos: whether a BOS goes in front where the file does not say.
      is_nfc: whether texts are brought into Unicode's normal form C first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    is_nfc: bool = False


_DIGITS_APART = _Cut((r"\p{N}", _GPT2))
_LLAMA3 = _Cut((_CL100K.replace("DIGITS", r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_QWEN2 = _Cut((_CL100K.replace("DIGITS", r"\p{N}"),), is_nfc=True)

# tokenizer.ggml.pre -> what it stands for.
CUTS = {
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Cut((_GPT2,)),
    "phi-2": _Cut((_GPT2,)),
    "olmo": _Cut((_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "minerva-7b": _DIGITS_APART,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": dataclasses.replace(_LLAMA3, ignore_merges=False, adds_bos=False),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Cut((_TEKKEN,), ignore_merges=True, adds_bos=True),
}
# What older files that do not say were cut by, as far as their architecture tells.
_CUT_OF = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}


def load_gguf_tokenizer(path):
    """Build the tokenizer that a GGUF file describes.

    Args:
      path: the file.
    Returns: Tokenizer, or None, which is logged, if the file describes none.
    Raises: UserError, naming the file, if what it says does not make a tokenizer; UnsupportedError, with the list, for a kind
      of tokenizer or a way to cut texts up that is not known.
    """
    header = GGUFHeader(path)
    kind = header.get("tokenizer.ggml.model", str)
    if kind is None or kind == "none":
        logger.warning("%s: has no tokenizer; prompts must be token ids", path)
        return None
    if kind not in _BUILDERS:
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.model={reprlib.repr(kind)} is not supported; {' and '.join(_BUILDERS)} are"
        )
    vocabulary = _Vocabulary(header)
    bos, eos = (vocabulary.named_id(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    with errors_as(f"{path}: its metadata does not make a tokenizer"):
        backend, adds_bos = _BUILDERS[kind](header, vocabulary)
        _add_tokens(backend, vocabulary)
        _add_around(backend, header, vocabulary, bos, eos, adds_bos)
    tokenizer = Tokenizer(backend, bos, eos, path=path)
    tokenizer.chat_template = header.get("tokenizer.chat_template", str)
    return tokenizer


def save_gguf_tokenizer(tokenizer, folder):
    """Write tokenizer.json and tokenizer_config.json for a tokenizer that load_gguf_tokenizer gave.

    Raises: OSError as writing does.
    """
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    config = {name: tokenizer.token_text(token_id) for name, token_id in ids.items() if token_id is not None}
    if tokenizer.chat_template:
        config["chat_template"] = tokenizer.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _array(header, key, kind, length=None):
    """Return an array of the metadata, empty if there is none. Raises: UserError if it holds, or is, something else."""
    values = header.get(key, list, [])
    found = header.item_kind(key)
    if found not in (None, kind):
        raise UserError(f"{header.path}: metadata: {key} is an array of {found.__name__}; {kind.__name__} is wanted")
    if values and length not in (None, len(values)):
        raise UserError(f"{header.path}: metadata: {key} has {len(values)} entries for {length} tokens")
    return values


class _Vocabulary:
    """Tokens and their types.

    Attributes:
      tokens: texts, by id.
      types: of each token, by id.
      ids: text -> id; of tokens that share a text the first.
    """

    def __init__(self, header):
        self._header = header
        self.tokens = _array(header, "tokenizer.ggml.tokens", str)
        if not self.tokens:
            raise UserError(f"{header.path}: metadata lacks tokenizer.ggml.tokens")
        types = _array(header, "tokenizer.ggml.token_type", int, len(self.tokens))
        self.types = types or [NORMAL] * len(self.tokens)
        self.ids = {}
        for token_id, text in enumerate(self.tokens):
            self.ids.setdefault(text, token_id)
        if len(self.ids) < len(self.tokens):
            twin = next(text for token_id, text in enumerate(self.tokens) if self.ids[text] != token_id)
            logger.warning(
                "%s: %d tokens have the text of another, %s for one; the first of each counts",
                header.path, len(self.tokens) - len(self.ids), reprlib.repr(twin),
            )  # fmt: skip

    def named_id(self, key):
        """Return the id under a key of the metadata, or None."""
        token_id = self._header.get(key, int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise UserError(f"{self._header.path}: metadata: {key}={token_id} is no token; there are {len(self.tokens)}")
        return token_id


def _byte_level(header, vocabulary):
    """Return (tokenizers.Tokenizer, whether a BOS goes in front by default) of GPT-2's kind."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    cut = _cut(header)
    merges = [tuple(merge.split(" ", 1)) for merge in _array(header, "tokenizer.ggml.merges", str)]
    if not merges:
        raise UserError(f"{header.path}: metadata lacks tokenizer.ggml.merges")
    ids = vocabulary.ids
    for merge in merges:
        if len(merge) != 2 or merge[0] not in ids or merge[1] not in ids or merge[0] + merge[1] not in ids:
            what = reprlib.repr(" ".join(merge))
            raise UserError(
                f"{header.path}: metadata: tokenizer.ggml.merges has {what}; two tokens that make a third are wanted"
            )
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=cut.ignore_merges))
    if cut.is_nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, cut.adds_bos


def _cut(header):
    name = header.get("tokenizer.ggml.pre", str)
    if name is None:
        name = _CUT_OF.get(header.get("general.architecture", str), "default")
        logger.warning("%s: does not say how texts are cut up (tokenizer.ggml.pre); taking %r", header.path, name)
    if name not in CUTS:
        raise UnsupportedError(
            f"{header.path}: tokenizer.ggml.pre={reprlib.repr(name)} is not supported{near_miss(name, CUTS)}; "
            f"there are {', '.join(CUTS)}"
        )
    return CUTS[name]


def _sentence_piece(header, vocabulary):
    """Return (tokenizers.Tokenizer, whether a BOS goes in front by default) of Llama's kind.

    SentencePiece joins the neighbours that make the piece with the best score; here every way to make a piece out of two
    others is a merge, in the order of the scores.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _array(header, "tokenizer.ggml.scores", float, len(vocabulary.tokens))
    if not scores:
        raise UserError(f"{header.path}: metadata lacks tokenizer.ggml.scores")
    # Only these come out of texts piece by piece; the others are found whole, or not at all.
    pieces = {text: token_id for text, token_id in vocabulary.ids.items() if vocabulary.types[token_id] in (NORMAL, UNUSED)}
    merges = []
    for text, token_id in pieces.items():
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in pieces and right in pieces:
                merges.append((-scores[token_id], pieces[left], pieces[right], left, right))
    merges.sort()
    unknown = next((text for text, token_id in vocabulary.ids.items() if vocabulary.types[token_id] == UNKNOWN), None)
    has_bytes = BYTE in vocabulary.types
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids, merges=[merge[3:] for merge in merges], unk_token=unknown, fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )  # fmt: skip
    steps = [normalizers.Replace(" ", SPACE)]
    undo = [decoders.Replace(SPACE, " "), *([decoders.ByteFallback()] if has_bytes else []), decoders.Fuse()]
    if header.get("tokenizer.ggml.add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend(SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undo)
    return backend, True


# tokenizer.ggml.model -> what builds it.
_BUILDERS = {"gpt2": _byte_level, "llama": _sentence_piece}


def _add_tokens(backend, vocabulary):
    """Enter the tokens that are found whole in texts: control tokens, which decoding skips, and the user's own."""
    from tokenizers import AddedToken

    special, own = [], []
    for text, token_id in vocabulary.ids.items():
        kind = vocabulary.types[token_id]
        if kind in (CONTROL, UNKNOWN) and text:
            special.append(AddedToken(text, special=True, normalized=False))
        elif kind == USER_DEFINED and text:
            own.append(AddedToken(text, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(own)


def _add_around(backend, header, vocabulary, bos, eos, adds_bos):
    """Have the tokens put around each text that the file asks for."""
    from tokenizers import processors

    around = []
    for name, token_id, default in (("bos", bos, adds_bos and bos is not None), ("eos", eos, False)):
        is_wanted = header.get(f"tokenizer.ggml.add_{name}_token", bool, default)
        if is_wanted and token_id is None:
            raise UserError(f"{header.path}: metadata: add_{name}_token is true, but there is no {name}_token_id")
        around.append([vocabulary.tokens[token_id]] if is_wanted else [])
    if any(around):
        named = {text: vocabulary.ids[text] for texts in around for text in texts}
        backend.post_processor = processors.TemplateProcessing(
            single=[*around[0], "$A", *around[1]], special_tokens=list(named.items())
        )
