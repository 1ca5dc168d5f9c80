"""Which weight of a checkpoint each parameter takes, with everything that does not fit said in one message."""

import dataclasses
import logging
import re

from poptransformer.errors import UnsupportedError, UserError

logger = logging.getLogger(__name__)

# What a weight may be stored as; of anything else, a quantised weight, the numbers alone do not give the values.
FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")

SHOWN = 8  # names of a kind that a message lists


@dataclasses.dataclass(frozen=True)
class WantedWeight:
    """What one parameter asks of a checkpoint.

    Attributes:
      keys: names it may have there, the preferred one first.
      shape: its shape in the checkpoint's own layout.
      meaning: the shape in words of the configuration, such as "(hidden_size, 3 * hidden_size)".
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    meaning: str = ""


def match_weights(wanted, checkpoint, ignore=()):
    """Give each parameter its key in the checkpoint.

    Args:
      wanted: parameter name -> WantedWeight; two parameters may share a key.
      checkpoint: has names(), shape(name) and stored_dtype(name).
      ignore: regular expressions; a key that one of them matches whole is known to be no weight, such as a mask.
    Returns: dict of parameter name -> checkpoint key.
    Raises: UserError with all weights that are missing, have another shape, or are left over; UnsupportedError if
      some are not stored as floats.
    """
    present = dict.fromkeys(checkpoint.names())
    found, missing, misshapen, quantised = {}, [], [], {}
    for parameter, want in wanted.items():
        key = next((key for key in want.keys if key in present), None)
        if key is None:
            missing.append(want.keys[0])
            continue
        found[parameter] = key
        dtype = checkpoint.stored_dtype(key)
        if dtype not in FLOAT_DTYPES:
            quantised.setdefault(dtype, {})[key] = True
        shape = tuple(checkpoint.shape(key))
        if shape != tuple(want.shape):
            meaning = f" = {want.meaning}" if want.meaning else ""
            misshapen.append(f"{key}: checkpoint has {shape}, config gives {tuple(want.shape)}{meaning}")

    known = {key for want in wanted.values() for key in want.keys}
    left = [key for key in present if key not in known]
    patterns = [re.compile(pattern) for pattern in ignore]
    extra = [key for key in left if not any(pattern.fullmatch(key) for pattern in patterns)]
    if len(left) > len(extra):
        logger.debug("%d keys of the checkpoint are no weights and were ignored", len(left) - len(extra))

    problems = [
        f"{_shorten(list(keys), ', ')}: stored as {dtype}: a quantised checkpoint; this version reads float32, float16 and "
        "bfloat16"
        for dtype, keys in quantised.items()
    ]
    if missing:
        problems.append(
            f"checkpoint lacks {len(missing)} of {len(wanted)} weights: {_shorten(missing, ', ')}; "
            "set random_weights: true to run without a checkpoint"
        )
    if misshapen:
        problems.append(_shorten(misshapen, "\n"))
    if extra:
        count = "1 weight" if len(extra) == 1 else f"{len(extra)} weights"
        problems.append(
            f"checkpoint has {count} that this model has no place for: {_shorten(extra, ', ')}; "
            "is it of another model family, or config.json of another checkpoint?"
        )
    if problems:
        raise (UnsupportedError if quantised else UserError)("\n".join(problems))
    return found


def _shorten(texts, separator):
    shown = separator.join(texts[:SHOWN])
    if len(texts) > SHOWN:
        shown += f"{separator if separator != ', ' else ' '}and {len(texts) - SHOWN} more"
    return shown
