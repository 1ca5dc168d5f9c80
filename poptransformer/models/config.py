"""Reading the keys of a checkpoint's config.json."""

from __future__ import annotations

import math

from poptransformer.errors import UserError

MOST_LAYERS = 10_000  # building more takes minutes and memory, and means a damaged config
LARGEST_SIZE = 2**31 - 1  # of an axis, as int32 indices reach it


def read_config(config: dict, **keys: str) -> dict:
    """Take required sizes out of a config.json, under the project's own names.

    Args:
      config: the parsed file.
      keys: our name -> key in the file; each must be a positive whole number.
    Raises: UserError naming every key that is missing, not a positive whole number, or beyond LARGEST_SIZE or MOST_LAYERS.
    """
    wrong = [
        f"{key}={config[key]!r}" if key in config else f"{key} (missing)"
        for key in keys.values()
        if not _is_size(config.get(key))
    ]
    if wrong:
        raise UserError(f"config.json: wanted positive whole numbers for {', '.join(wrong)}")
    sizes = {name: config[key] for name, key in keys.items()}
    if sizes.get("num_layers", 1) > MOST_LAYERS:
        raise UserError(
            f"config.json: {keys['num_layers']}={sizes['num_layers']} is more than any model has; at most {MOST_LAYERS}"
        )
    return sizes


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE


def read_bool(config: dict, key: str, default: bool) -> bool:
    """Take a switch that may be missing out of a config.json. Raises: UserError if it is not true or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key}={value!r}: wanted true or false")
    return value


def read_number(config: dict, key: str, default: float) -> float:
    """Take a number that may be missing out of a config.json. Raises: UserError if it is not a number of at least 0."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UserError(f"config.json: {key}={value!r}: wanted a number of at least 0")
    return value
