"""Hugging Face tokenizers from a checkpoint's folder.

A folder with tokenizer.json is read by the tokenizers library alone (0.03 s to import); transformers (0.8 s and more)
is imported only for folders with the older files.
"""

import functools
import logging
import pathlib
import re
import reprlib
import threading

from poptransformer.checkpoint.json_file import is_present, read_json
from poptransformer.errors import UserError
from poptransformer.tokenizers import chat_template, chatglm
from poptransformer.tokenizers.chat import TemplateFormat
from poptransformer.tokenizers.library import NOT_OURS, errors_as

logger = logging.getLogger(__name__)

# One of these without tokenizer.json means that transformers has to convert.
OLDER_FILES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json")

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

MAX_PROBLEMS = 8  # of one file, that a message lists

# Spaces that WordPiece puts before these are taken out again, in this order, where the configuration asks for it.
CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def load_tokenizer(path):
    """Load the tokenizer of a checkpoint's folder.

    Args:
      path: the folder, or a file in it.
    Returns: Tokenizer, or None if the folder holds no tokenizer files.
    Raises: UserError, naming the file, if one is broken.
    """
    folder = pathlib.Path(path)
    folder = folder.parent if folder.is_file() else folder
    if is_present(folder / "tokenizer.json"):
        logger.debug("%s: tokenizer.json, read by the tokenizers library", folder)
        return _from_tokenizer_json(folder)
    if chatglm.is_chatglm(folder):
        return chatglm.load_chatglm(folder)
    older = [name for name in OLDER_FILES if is_present(folder / name)]
    if older:
        logger.debug("%s: no tokenizer.json, %s converted by transformers", folder, older[0])
        return _from_older_files(folder, older[0])
    return None


class Tokenizer:
    """Encodes and decodes; nothing in it changes after loading, so threads can share one.

    Attributes:
      bos_token_id, eos_token_id: ids, or None.
      vocab_size: tokens, added ones included (the model's embedding may have more rows).
      clean_up: pairs (text, replacement) that decode applies in order, mostly none.
      chat_template: text, list or dict, see chat_template.choose; nothing looks into the folder when it is needed.
      token_names: what chat templates know tokens by, bos_token and so on; None for those of the ids above.
    """

    chat_template = None
    token_names = None

    def __init__(self, backend, bos_token_id=None, eos_token_id=None, clean_up=(), path=None):
        """Take a tokenizers.Tokenizer, or anything with the same few methods; path is what messages call it."""
        self._backend = backend
        self._path = path
        self._where = "tokenizer" if path is None else str(path)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.clean_up = tuple(clean_up)
        self.vocab_size = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_values = _byte_values(backend)

    def encode(self, text):
        """Return a text's token ids, with the special tokens that the checkpoint's tokenizer puts around it."""
        try:
            return list(self._backend.encode(text).ids)
        except NOT_OURS:
            raise
        except BaseException as error:  # Exception itself, or a panic in Rust, which is a BaseException
            if not isinstance(text, str):
                raise UserError(f"a prompt is a string, not {type(text).__name__}") from None
            if (at := _first_surrogate(text)) is not None:
                raise UserError(f"prompt is not valid Unicode text: character {at} (from 0) stands for no character") from None
            raise UserError(f"{self._where}: the tokenizer cannot encode this prompt: {error}") from error

    def decode(self, ids, skip_special_tokens=True):
        """Return the text of token ids; ids outside the vocabulary have none."""
        text = self.decode_raw(ids, skip_special_tokens)
        for spaced, tight in self.clean_up:
            text = text.replace(spaced, tight)
        return text

    def decode_raw(self, ids, skip_special_tokens=True):
        """Return the text of token ids without clean-up; what a stream puts together from."""
        ids = [int(token_id) for token_id in ids]
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise UserError(f"token ids are 0 to {self.vocab_size - 1}, and {min(ids)} to {max(ids)} are given") from None
        except NOT_OURS:
            raise
        except BaseException as error:  # as in encode
            raise UserError(f"{self._where}: the tokenizer cannot decode these ids: {error}") from error

    def is_special(self, token_id):
        """Say whether decode skips this id: end of text, padding, turn markers."""
        return token_id in self._special_ids

    def has_token(self, token_id):
        """Say whether the id stands for any token."""
        return 0 <= token_id < 1 << 32 and self._backend.id_to_token(int(token_id)) is not None

    def token_text(self, token_id):
        """Return how the vocabulary writes a token; None if the id stands for none."""
        return self._backend.id_to_token(token_id)

    def to_json(self):
        """Return what a tokenizer.json says of this tokenizer; of one that the tokenizers library runs."""
        return self._backend.to_str()

    def byte_value(self, token_id):
        """Return the byte a byte-fallback token such as <0xE2> stands for; None for any other."""
        return self._byte_values.get(token_id)

    @functools.cached_property
    def chat_format(self):
        """The ChatFormat of the model's chat template.

        Raises: UserError if it has none, or one that cannot be read.
        """
        template, where = self.chat_template or None, self._where
        if template is None and self._path is not None:
            template, where = chat_template.read_chat_template(pathlib.Path(self._path))
        if template is None:
            raise UserError(f"{self._where}: the model has no chat template; {chat_template.HOW_TO_GIVE}")
        names = self.token_names
        if names is None:
            ids = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
            names = {name: self._backend.id_to_token(token_id) for name, token_id in ids.items() if token_id is not None}
        return TemplateFormat(self._backend, template, where, names, self.eos_token_id)


def _from_tokenizer_json(folder):
    import tokenizers

    path = folder / "tokenizer.json"
    with errors_as(f"{path}: not a tokenizer that the tokenizers library can read"):
        backend = tokenizers.Tokenizer.from_file(str(path))
    # The post-processor in the file says which special tokens go around a text; add_bos_token and add_eos_token in
    # tokenizer_config.json do not count beside it (as in transformers 5).
    # What is saved for training batches must not cut or pad a prompt in silence.
    backend.no_truncation()
    backend.no_padding()

    config = _read_tokens(folder / "tokenizer_config.json")
    tokens = {**_read_tokens(folder / "special_tokens_map.json"), **config}
    with errors_as(f"{folder}: the tokens of tokenizer_config.json cannot be added"):
        _add_tokens(backend, tokens)
    model_config = read_json(folder / "config.json", is_optional=True)
    bos, eos = (_named_id(backend, tokens, model_config, name) for name in ("bos", "eos"))
    tokenizer = Tokenizer(backend, bos, eos, _clean_up(config.get("clean_up_tokenization_spaces"), backend), folder)
    tokenizer.token_names = _token_names(tokens)
    return tokenizer


def _from_older_files(folder, name):
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(
            f"{folder}: has no tokenizer.json, and reading {name} needs transformers; install it, or save a "
            "tokenizer.json with AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        ) from None
    try:
        # Code that comes with a checkpoint never runs, and nobody is asked whether it may.
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any class, depending on the tokenizer
        raise UserError(f"{folder}: transformers cannot read its tokenizer ({name}): {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        backend = _PythonBackend(loaded)
    else:
        backend.no_truncation()
        backend.no_padding()
    clean_up = _clean_up(loaded.clean_up_tokenization_spaces, backend)
    tokenizer = Tokenizer(backend, loaded.bos_token_id, loaded.eos_token_id, clean_up, folder)
    tokenizer.token_names = dict(loaded.special_tokens_map)
    return tokenizer


def _clean_up(is_asked_for, backend):
    """Return the replacements; none for byte-pair tokens, which carry their own spaces (as transformers has it)."""
    return CLEAN_UP if is_asked_for and type(getattr(backend, "model", None)).__name__ != "BPE" else ()


class _PythonBackend:
    """A tokenizer of transformers that is written in Python, with the methods of the tokenizers library.

    A lock, since such a tokenizer promises nothing about threads.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.decoder = None

    def encode(self, text, add_special_tokens=True):
        with self._lock:
            return _Encoding(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids, skip_special_tokens):
        with self._lock:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def get_vocab_size(self):
        return len(self._tokenizer)

    def get_added_tokens_decoder(self):
        special = set(self._tokenizer.all_special_ids)
        return {token_id: _AddedToken(self._tokenizer.convert_ids_to_tokens(token_id)) for token_id in special}

    def id_to_token(self, token_id):
        with self._lock:
            return self._tokenizer.convert_ids_to_tokens(token_id) if token_id < len(self._tokenizer) else None


class _Encoding:
    def __init__(self, ids):
        self.ids = ids


class _AddedToken:
    special = True

    def __init__(self, content):
        self.content = content


def _first_surrogate(text):
    """Return the index of the first character that UTF-8 has no bytes for; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _read_tokens(path):
    """Return what a file says about tokens, a dict, empty if there is no file; all entries used here are checked."""
    fields = read_json(path, is_optional=True)
    problems = []
    described = fields.get("added_tokens_decoder") or {}
    if isinstance(described, dict):
        for key, token in described.items():
            if not re.fullmatch(r"[0-9]{1,10}", key):
                problems.append(f"added_tokens_decoder: {key!r} is no token id")
            problems += _token_problems(f"added_tokens_decoder: {key}", token)
    else:
        problems.append(f"added_tokens_decoder is {reprlib.repr(described)}; an object, token id to token, is wanted")
    for name in _NAMED_TOKENS:
        problems += _token_problems(name, fields.get(name))
    for name in _TOKEN_LISTS:
        tokens = fields.get(name) or []
        if isinstance(tokens, (list, dict)):
            for token in tokens.values() if isinstance(tokens, dict) else tokens:
                problems += _token_problems(name, token)
        else:
            problems.append(f"{name} is {reprlib.repr(tokens)}; a list of tokens is wanted")
    if problems:
        raise UserError("\n".join(f"{path}: {problem}" for problem in problems[:MAX_PROBLEMS]))
    return fields


def _token_problems(name, token):
    """Return what is wrong with a token: text, an object with content and options, or nothing."""
    if not token:
        return []
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return [f"{name} is {reprlib.repr(token)}; text, or an object with content, is wanted"]
    problems = []
    if _first_surrogate(content) is not None:
        problems.append(f"{name} is {reprlib.repr(content)}, which is not valid Unicode text")
    for option in _TOKEN_OPTIONS if isinstance(token, dict) else ():
        if not isinstance(token.get(option, False), bool):
            problems.append(f"{name}: {option} is {reprlib.repr(token[option])}; true or false is wanted")
    return problems


def _content(token):
    """Return a token's text, given as text or as an object with content; None for anything else."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def _token_names(tokens):
    """Return what a chat template knows tokens by: bos_token and the like, those that are set."""
    names = {name: _content(tokens.get(name)) for name in _NAMED_TOKENS if _content(tokens.get(name))}
    for name in _TOKEN_LISTS:
        listed = tokens.get(name) or []
        if listed:
            names[name] = [_content(token) for token in (listed.values() if isinstance(listed, dict) else listed)]
    return names


def _add_tokens(backend, config):
    """Add tokens that only tokenizer_config.json knows, and mark the named ones as special, as transformers does."""
    import tokenizers

    present = backend.get_added_tokens_decoder()
    for key, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if int(key) not in present and _content(token):
            options = {name: token[name] for name in _TOKEN_OPTIONS if name in token} if isinstance(token, dict) else {}
            backend.add_tokens([tokenizers.AddedToken(_content(token), **options)])
    named = [config.get(name) for name in _NAMED_TOKENS]
    for name in _TOKEN_LISTS:
        tokens = config.get(name) or []
        named.extend(tokens.values() if isinstance(tokens, dict) else tokens)
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [text for text in map(_content, named) if text and text not in special]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in new])


def _named_id(backend, tokens, model_config, name):
    """Return the id of "bos" or "eos": what the tokenizer's files say, or else the model's."""
    text = _content(tokens.get(f"{name}_token"))
    if text is not None:
        return backend.token_to_id(text)
    token_id = model_config.get(f"{name}_token_id")
    token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
    return token_id if isinstance(token_id, int) else None


def _byte_values(backend):
    """Return id -> byte for the tokens that stand for one byte, if the decoder joins those into characters."""
    if "ByteFallback" not in repr(backend.decoder):
        return {}
    matches = ((_BYTE_TOKEN.fullmatch(token), token_id) for token, token_id in backend.get_vocab().items())
    return {token_id: int(match[1], 16) for match, token_id in matches if match}
