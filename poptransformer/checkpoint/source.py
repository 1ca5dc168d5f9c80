"""From what a user calls a model to files on this machine: a folder, one file, or a name on the Hugging Face hub."""

import fnmatch
import glob
import json
import logging
import os
import pathlib
import queue
import re
import threading

from poptransformer.checkpoint.formats import HOW_TO_CONVERT, OTHER_FORMATS, choose_weights, find_format, suffixes
from poptransformer.errors import UnsupportedError, UserError, near_miss

logger = logging.getLogger(__name__)

# The hub is asked once, and answers within this time or counts as out of reach.
HUB_TIMEOUT_S = 4.0

MAX_SHOWN = 400  # characters of a path that a message shows

# What a model's folder holds beside its weights.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer*.model",
    "sentencepiece*.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "*.tiktoken",
    "ice_text.model",  # ChatGLM's
)
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)


def resolve_source(source, weights=True):
    """Find a checkpoint, fetching it from the hub if need be.

    Args:
      source: a folder, one file of weights, a name that fetch.py knows (``smollm2``), or a hub name (``gpt2-xl``,
        ``org/name``). Text that starts with ``.``, ``/`` or ``~``, has more than one ``/``, ends like a file of weights or
        starts with a folder that exists is a path and never asked of the hub; so is a ``pathlib.Path``.
      weights: False fetches configuration and tokenizer only.
    Returns: the path of the folder, or of the one file.
    Raises: UserError if it is nowhere; UnsupportedError if it holds weights in a format without a reader.
    """
    text = os.fspath(source)
    if not text:
        raise UserError("model is an empty string; give a folder, a file of weights or a hub name such as gpt2-xl")
    try:
        path = pathlib.Path(text).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except RuntimeError:
        raise UserError(f"{text}: {text.partition('/')[0]} has no home folder here; give the path in full") from None
    except OSError as error:
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
        raise UserError(f"{shown}: cannot be looked up ({error.strerror})") from error
    if is_folder:
        return path
    if is_file:
        if find_format(path):
            return path
        if path.suffix in OTHER_FORMATS:
            raise UnsupportedError(f"{text}: there is no reader for {path.suffix} files; {HOW_TO_CONVERT}")
        raise UserError(f"{text} is a file but not a checkpoint; give its folder, or a {_or(suffixes())} file")
    if path.is_symlink():
        raise UserError(f"{text}: is a link to {os.readlink(path)}, which is not there")
    if isinstance(source, pathlib.PurePath) or _looks_like_path(text):
        raise UserError(_missing_path(text, path))
    if "/" not in text and (path := _fetched(text)) is not None:
        return path
    if not _HUB_NAME.fullmatch(text):
        raise UserError(f"{text!r} is neither a local path nor a hub name (name or org/name, of A-Z a-z 0-9 _ . -)")
    return _from_hub(text, weights)


def _fetched(name):
    """Return the file of a model that fetch.py knows; None for other names."""
    from poptransformer.checkpoint import fetch  # not above: python -m runs this module by itself

    if name not in fetch.SHIPPED:
        return None
    path = fetch.find(name)
    if path is None:
        raise UserError(f"{name}: is not fetched yet; run `{fetch.how_to_fetch(name)}`")
    return path


def _looks_like_path(text):
    first, separator, _ = text.partition("/")
    return (
        text[0] in "./~"
        or text.count("/") > 1
        or text.endswith(suffixes() + OTHER_FORMATS)
        or (bool(separator) and os.path.exists(first))
    )


def _or(words):
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words)


def _missing_path(text, path):
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    try:
        siblings = os.listdir(missing.parent)
    except OSError:
        siblings = []
    where = "" if missing == path else f" ({missing} is not there)"
    return f"{text}: no such file or folder{where}{near_miss(missing.name, siblings)}"


def _from_hub(name, weights):
    """Ask the hub for the newest snapshot; without an answer take what its local cache holds."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _from_cache(name, weights, "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE to fetch it")
    files, error = _ask_hub(name)
    if error is None:
        return _download(name, files, weights)
    why, remedy = _explain(name, error)
    return _from_cache(name, weights, why, remedy)


def _ask_hub(name):
    """Return (file names, None), or (None, the error) within a few seconds even where packets are dropped."""
    answers = queue.SimpleQueue()

    def ask():
        try:
            from huggingface_hub import HfApi

            info = HfApi().repo_info(name, timeout=HUB_TIMEOUT_S)
            answers.put(([sibling.rfilename for sibling in info.siblings or ()], None))
        except Exception as error:  # whatever the HTTP client in use raises
            answers.put((None, error))

    # A thread, because looking up the host's address has no time limit of its own.
    threading.Thread(target=ask, name="poptransformer-hub", daemon=True).start()
    try:
        return answers.get(timeout=HUB_TIMEOUT_S + 0.5)
    except queue.Empty:
        return None, TimeoutError(f"no answer in {HUB_TIMEOUT_S:g} s")


def _explain(name, error):
    """Return (what went wrong, what to do) in words."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it only to accounts that were granted access", f"ask for access to {name}, then log in"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no public model of that name", "check the spelling, or log in if it is private"
    reason = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__
    return f"the hub cannot be reached ({reason})", "check the network, or give a local folder"


def _from_cache(name, weights, why, remedy):
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        raise UserError(f"{name}: no local folder of that name, nothing in the local hub cache, and {why}; {remedy}")
    folder = pathlib.Path(config).parent
    if weights and choose_weights(os.listdir(folder)) == (None, []):
        raise UserError(f"{name}: the local hub cache has its configuration but no weights to read, and {why}; {remedy}")
    logger.log(
        logging.INFO if why.startswith("HF_HUB_OFFLINE") else logging.WARNING,
        "%s: taken from the local hub cache, since %s",
        name,
        why,
    )
    return folder


def _download(name, files, weights):
    """Fetch configuration, tokenizer and, if asked for, the weights that belong to the model."""
    files = [file for file in files if "/" not in file]
    wanted = [file for file in files if any(fnmatch.fnmatchcase(file, pattern) for pattern in SMALL_FILES)]
    kind, chosen = choose_weights(files) if weights else (None, [])
    if weights and kind is None:
        other = sorted({os.path.splitext(file)[1] for file in files} & set(OTHER_FORMATS))
        if other:
            raise UnsupportedError(f"{name}: the hub has its weights only as {', '.join(other)}; {HOW_TO_CONVERT}")
    if len(chosen) > 1:
        raise UserError(
            f"{name}: the hub has {', '.join(chosen)}, and nothing that says which of them belong together; fetch the one to "
            "run, put its config.json beside it, and give the file as the model"
        )
    wanted += chosen
    if not wanted:
        raise UserError(f"{name}: the hub has no config.json and no weights to read under that name; is it a model?")
    folder = _fetch(name, wanted)
    if kind and chosen == [kind.index_file]:
        try:
            shards = set(json.loads((folder / kind.index_file).read_text(encoding="utf-8-sig"))["weight_map"].values())
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return folder  # a broken index: opening the folder says what is wrong with it
        _fetch(name, sorted(map(str, shards)))
    return folder


def _fetch(name, files):
    from huggingface_hub import snapshot_download

    try:
        return pathlib.Path(snapshot_download(name, allow_patterns=[glob.escape(file) for file in files]))
    except Exception as error:  # the HTTP client's, the disk's or the hub's
        why, remedy = _explain(name, error)
        raise UserError(f"{name}: fetching it from the hub stopped ({why}); {remedy}") from error
